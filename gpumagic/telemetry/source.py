"""Define the interface of sources of GPU readings, a cache of readings, and the source for Macs.

On a Mac, ``PerformanceStatistics`` in the output of ``ioreg`` has the utilization and the used
memory. The GPU may use all of the host's memory. Only root can read temperature and power.
"""

import plistlib
import subprocess
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from platform import mac_ver
from typing import Any, Protocol, TypeVar, cast

from gpumagic.errors import Problem
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample

T = TypeVar("T")


class CachedReadings:
    """A cache of readings by key, each with the time at which it was read."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[float, Any]] = {}

    def get(self, key: Hashable, every_s: float, max_age: float, read: Callable[[], T]) -> T:
        """Return the cached reading; read again if its age exceeds `max_age` * `every_s`."""
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is None or now - kept[0] >= every_s * max_age:
            kept = self._kept[key] = (now, read())
        return cast(T, kept[1])


class Source(Protocol):
    """A source of GPU readings. Cached readings may be as old as `max_age` refresh intervals."""

    name: str

    @abstractmethod
    def gpus(self, host: Host, max_age: float) -> list[GpuSample]:
        """Return the source's GPUs, including lost ones."""

    def processes(self, max_age: float) -> list[ProcessSample]:
        """Return the processes that hold memory on these GPUs."""
        return []

    def problems(self) -> list[Problem]:
        """Return the problems that the last calls of the other methods found."""
        return []

    def software(self) -> Mapping[str, str]:
        """Return the versions of drivers and other software, by name."""
        return {}


def ioreg() -> bytes:
    """Return the output of ``ioreg``; empty if the command cannot run or takes over 5 s."""
    command = ("ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator")
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, timeout=5, check=False).stdout
    return b""


class AppleSource(Source):
    """Samples a Mac's GPU, but no processes, because macOS does not report their memory."""

    name = "apple"

    def __init__(self, read: Callable[[], bytes] = ioreg) -> None:
        self._read = read
        self._kept = CachedReadings()

    def software(self) -> dict[str, str]:
        return {"macOS": mac_ver()[0]}

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        if not (plist := self._kept.get("ioreg", 2.0, max_age, self._read)):  # ioreg takes 20 ms
            return []
        entry = plistlib.loads(plist)[0]
        known, model = entry.get("PerformanceStatistics", {}), entry.get("model")
        busy = _count(known.get("Device Utilization %"))
        sample = GpuSample(
            uuid=f"MPS-{host.name or 'here'}",
            name=model if isinstance(model, str) else None,
            index=0,
            ordinal=0,
            vendor="apple",
            unified=True,
            memory_total=host.memory_total,
            memory_used=_count(known.get("In use system memory")),
            utilization=None if busy is None or busy > 100 else float(busy),
        )
        return [sample]


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
