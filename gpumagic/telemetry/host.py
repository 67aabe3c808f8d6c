"""Read the host's cores and memory."""

from __future__ import annotations

import os
import socket
import threading

from gpumagic.telemetry.snapshot import Host


class CpuSource:
    """The host, by psutil."""

    def __init__(self) -> None:
        self._asked = threading.local()

    def host(self) -> Host:
        """The host now; ``cpu_utilization`` is since this thread's previous call, None at first."""
        import psutil

        utilization: float | None = psutil.cpu_percent()
        # psutil has nothing to compare with yet, and says 0.
        if not getattr(self._asked, "before", False):
            utilization = None
        self._asked.before = True
        memory = psutil.virtual_memory()
        return Host(
            name=socket.gethostname(),
            cpu_count=os.cpu_count(),
            cpu_utilization=utilization,
            memory_total=memory.total,
            memory_used=memory.total - memory.available,
        )
