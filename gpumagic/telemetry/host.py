"""Measure the CPU and RAM use of the host and of kernels, and a container's RAM.

A kernel's use includes its child processes. ``GPUMAGIC_CGROUP`` sets the container's cgroup folder.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from gpumagic import drm
from gpumagic.telemetry.processes import Kernel
from gpumagic.telemetry.snapshot import Host, KernelSample

# One row for control groups (cgroups) of version 2, one for version 1. A row names the files of the
# RAM limit, the used RAM and the number of kills, then the page cache's line in memory.stat.
_VERSIONS = (
    ("memory.max", "memory.current", "memory.events", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"),
)
_Group = tuple[int, drm.Folder, tuple[str, ...]]  # limit (0 if none), folder, row of _VERSIONS


class MemoryGroup:
    """The control group with the smallest RAM limit: this process's group, or a group above it."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def limit(self) -> int | None:
        return next((limit for limit, _, _ in self._limited()), None)

    def ram(self) -> tuple[int | None, int | None]:
        """Return the used and total RAM: the group's if a limit exists, else the machine's."""
        for limit, folder, names in self._limited():
            used = folder.number(names[1])
            cache = _row(folder, "memory.stat", names[3]) or 0
            return None if used is None else max(used - cache, 0), limit
        memory = psutil.virtual_memory()
        return memory.total - memory.available, memory.total

    def kills(self) -> int | None:
        """Return how many processes the out-of-memory killer has ended; None if unknown."""
        groups = self._limited() or list(self._groups())
        counts = [_row(folder, names[2], "oom_kill") for _, folder, names in groups]
        counts.append(_row(drm.Folder(self._root / "proc"), "vmstat", "oom_kill"))
        return next((count for count in counts if count is not None), None)

    def _limited(self) -> list[_Group]:
        """Return the group with the smallest limit, in a list; [] if there is no limit."""
        # Control groups of version 1 write "no limit" as a number above the machine's RAM.
        total = psutil.virtual_memory().total
        found = [group for group in self._groups() if 0 < group[0] < total]
        return sorted(found, key=lambda group: group[0])[:1]

    def _groups(self) -> Iterator[_Group]:
        for path in self._folders():
            for names in _VERSIONS:
                folder = drm.Folder(path)
                yield folder.number(names[0]) or 0, folder, names

    def _folders(self) -> Iterator[Path]:
        if named := os.environ.get("GPUMAGIC_CGROUP"):
            yield Path(named)
            return
        for line in drm.Folder(self._root).text("proc/self/cgroup").splitlines():
            _, kinds, path = [*line.split(":", 2), "", ""][:3]
            if kinds in ("", "memory"):
                mount = self._root / "sys/fs/cgroup" / kinds
                inner = mount / path.strip("/")
                # In a container, the path may exist only on the host, so try its parents too.
                yield from (inner, *inner.parents[: len(inner.relative_to(mount).parts)])


def _row(folder: drm.Folder, file: str, name: str) -> int | None:
    rows = (line.split() for line in folder.text(file).splitlines())
    return next((drm.whole(row[1]) for row in rows if row[:1] == [name] and row[1:]), None)


_asked = threading.local()


def host_name() -> str:
    return os.environ.get("GPUMAGIC_HOST") or socket.gethostname()


def read_host() -> Host:
    """Return the host's readings; ``cpu_utilization`` is the mean since this thread's last call."""
    utilization = psutil.cpu_percent()
    meaningless = not getattr(_asked, "before", False)  # psutil's first result is 0
    _asked.before = True
    memory = psutil.virtual_memory()
    group = MemoryGroup()
    limit = group.limit()
    return Host(
        name=host_name(),
        boot=drm.Folder("/proc/sys/kernel/random").text("boot_id") or None,
        cpu_count=os.cpu_count(),
        cpu_utilization=None if meaningless else utilization,
        memory_total=memory.total,
        memory_used=memory.total - memory.available,
        memory_limit=limit,
        limit_used=None if limit is None else group.ram()[0],
    )


Trail = Sequence[tuple[float, int]]  # Unix times and bytes of RAM, the oldest first


class KernelLoads:
    """Measures the CPU and RAM use of the kernels that `kernels` returns; thread-safe."""

    def __init__(self, kernels: Callable[[], Sequence[Kernel]]) -> None:
        self._kernels = kernels
        self._lock = threading.Lock()
        self._families: dict[int, list[psutil.Process]] = {}  # by kernel's pid, kernel first
        self._listed_at = 0.0
        self._last: tuple[float, Sequence[Kernel], tuple[KernelSample, ...]] | None = None
        # psutil's object of each measured process. The object stores the process's last CPU time.
        self._measured: dict[psutil.Process, psutil.Process] = {}
        self._trails: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def samples(self) -> tuple[KernelSample, ...]:
        """Return a sample of each kernel, at most 0.2 s old; takes about 0.1 ms per process."""
        with self._lock:
            kernels, now = self._kernels(), time.time()
            if self._last and abs(now - self._last[0]) < 0.2 and self._last[1] == kernels:
                return self._last[2]  # CPU use over less than 0.2 s is noise
            known = {kernel.pid for kernel in kernels} == self._families.keys()
            if not known or abs(now - self._listed_at) >= 2.0:  # there may be new child processes
                self._list(kernels)
                self._listed_at = now
            found = tuple(self._sample(kernel, now) for kernel in kernels)
            self._last = now, tuple(kernels), found
            return found

    def _list(self, kernels: Sequence[Kernel]) -> None:
        """List the kernels' processes; discard the stored values of all other processes."""
        self._families = {kernel.pid: _family(kernel.pid) for kernel in kernels}
        living = {process for family in self._families.values() for process in family}
        self._measured = {one: old for one, old in self._measured.items() if one in living}
        keys = {(kernel.id, kernel.pid) for kernel in kernels}
        self._trails = {key: trail for key, trail in self._trails.items() if key in keys}

    def trail(self, kernel: str, pid: int) -> Trail:
        """Return the RAM of a kernel and its children over time; empty if never measured."""
        return list(self._trails.get((kernel, pid), ()))

    def _sample(self, kernel: Kernel, now: float) -> KernelSample:
        family = self._families[kernel.pid]
        known = [each for process in family if (each := self._percent(process)) is not None]
        memory = _memory(family)
        trail = self._trails.setdefault((kernel.id, kernel.pid), deque(maxlen=120))
        if memory is not None:
            trail.append((now, memory))
        return KernelSample(
            kernel=kernel.id,
            pid=kernel.pid,
            notebook=kernel.notebook,
            idle_since=kernel.idle_since,
            cpu=round(sum(known), 1) if known else None,
            host_memory=memory,
            growth=_growth(trail),
        )

    def _percent(self, process: psutil.Process) -> float | None:
        first = process not in self._measured
        with suppress(psutil.Error):
            percent = self._measured.setdefault(process, process).cpu_percent()
            return None if first else percent
        return None


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def _memory(family: Sequence[psutil.Process]) -> int | None:
    """Return the RAM of a kernel and its children; None if unknown. Shared pages count once."""
    memory = 0
    for process in family:
        try:
            own = process.memory_info().rss
        except psutil.Error:
            if process is family[0]:
                return None
            continue
        with suppress(psutil.Error):  # count a child's whole RAM if its unshared part is unreadable
            own = own if process is family[0] else process.memory_full_info().uss
        memory += own
    return memory or None  # 0: the kernel has just ended


def _growth(trail: Trail) -> float | None:
    """Return the RAM's growth in bytes per second, over about 2.5 s; None for the first 0.5 s."""
    if not trail:
        return None
    now, memory = trail[-1]
    earlier = [one for one in trail if now - one[0] >= 2.5]
    at, before = earlier[-1] if earlier else trail[0]
    return round((memory - before) / (now - at)) if now - at >= 0.5 else None
