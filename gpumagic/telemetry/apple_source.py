"""Sample Apple's GPU by ``ioreg``, which needs no rights.

``PerformanceStatistics`` of the class ``AGXAccelerator`` tells how busy it is and how much of the
host's memory it uses; all of that memory is its own. Temperature and power only root can read.
"""

import plistlib
import subprocess
import sys
import time
from collections.abc import Callable
from platform import mac_ver
from typing import Any
from xml.parsers.expat import ExpatError

from gpumagic.telemetry.kept_readings import KeptReadings
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample

# It takes some 20 ms.
_EVERY_S = 2.0
# What plistlib raises of what is broken.
_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ExpatError)
_COMMAND = ("ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator")


def ioreg() -> bytes:
    """What the command prints; empty where there is no such command."""
    try:
        return subprocess.run(_COMMAND, capture_output=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


class AppleSource:
    """Samples of the GPU of a Mac with Apple silicon; elsewhere there is none."""

    name = "apple"

    def __init__(
        self,
        read: Callable[[], bytes] = ioreg,
        platform: str = sys.platform,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._here = platform == "darwin"
        self._kept = KeptReadings(monotonic)

    def software(self) -> dict[str, str]:
        """The system's version."""
        return {"macOS": mac_ver()[0]}

    def gpus(self, host: Host, patience: float = 0.0) -> list[GpuSample]:
        """The one GPU; `patience`: how many times its interval a reading may be old."""
        if not self._here:
            return []
        found = self._kept.get("ioreg", _EVERY_S, patience, lambda: _entries(self._read()))
        return [_sample(n, entry, host) for n, entry in enumerate(found)]

    def processes(self, patience: float = 0.0) -> list[ProcessSample]:
        """None: what a process has of the host's memory is not told by what uses it."""
        return []

    def problems(self) -> list[Problem]:
        """None: without the command there is no GPU."""
        return []

    def chore(self, *, processes: bool, seconds: float) -> None:
        """Read ahead what is due, for at most so long."""
        self._kept.read_ahead(seconds, lambda key: True)


def _entries(plist: bytes) -> list[dict[str, Any]]:
    """The accelerators that a property list has; none where it is not one."""
    try:
        found = plistlib.loads(plist)
    except _MALFORMED:
        return []
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _sample(index: int, entry: dict[str, Any], host: Host) -> GpuSample:
    told = entry.get("PerformanceStatistics")
    statistics = told if isinstance(told, dict) else {}
    model = entry.get("model")
    busy = _count(statistics.get("Device Utilization %"))
    return GpuSample(
        uuid=f"MPS-{host.name or 'here'}" + (f"-{index}" if index else ""),
        # Some have it as bytes that end with a zero.
        name=model.rstrip(b"\0").decode(errors="replace")
        if isinstance(model, bytes)
        else model
        if isinstance(model, str)
        else None,
        index=index,
        ordinal=index,
        vendor="apple",
        unified=True,
        memory_total=host.memory_total,
        memory_used=_count(statistics.get("In use system memory")),
        utilization=None if busy is None or busy > 100 else float(busy),
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
