"""Measure the CPU and RAM of kernels and their child processes, and keep the last RAM readings."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import psutil

from gpumagic.telemetry.processes import Kernel, resident
from gpumagic.telemetry.snapshot import KernelSample

# New child processes are looked for this often, in seconds, and in at most 5 % of the time.
_LIST_S = 2.0
_LIST_SHARE = 0.05
# Over a shorter time, a percentage means little.
_AGAIN_S = 0.2
# A growth is measured over at least this many seconds.
_GROWTH_S = 2.5
_MOST = 120

Trail = Sequence[tuple[float, int]]  # Unix times and bytes of RAM, the oldest first


class KernelLoads:
    """Measures the kernels that a function returns; any thread."""

    def __init__(
        self, kernels: Callable[[], Sequence[Kernel]], clock: Callable[[], float] = time.time
    ) -> None:
        self._kernels = kernels
        self._clock = clock
        self._lock = threading.Lock()
        self._families: dict[int, list[psutil.Process]] = {}
        self._list_at = 0.0
        self._last: tuple[float, Sequence[Kernel], tuple[KernelSample, ...]] | None = None
        # psutil's first percentage of a process is meaningless.
        self._measured: dict[psutil.Process, psutil.Process] = {}
        self._trails: dict[tuple[str, int], deque[tuple[float, int]]] = {}

    def samples(self) -> tuple[KernelSample, ...]:
        """Return a sample of each kernel now; takes some 0.1 ms per process."""
        with self._lock:
            kernels, now = self._kernels(), self._clock()
            if self._last and now - self._last[0] < _AGAIN_S and self._last[1] == kernels:
                return self._last[2]
            if {kernel.pid for kernel in kernels} != self._families.keys() or now >= self._list_at:
                self._list(kernels, now)
            found = tuple(self._sample(kernel, now) for kernel in kernels)
            self._last = now, tuple(kernels), found
            return found

    def trail(self, kernel: str, pid: int) -> Trail:
        """Return the RAM of a kernel's process over time; empty if it was never measured."""
        return list(self._trails.get((kernel, pid), ()))

    def _list(self, kernels: Sequence[Kernel], now: float) -> None:
        start = time.perf_counter()
        self._families = {kernel.pid: _family(kernel.pid) for kernel in kernels}
        took = time.perf_counter() - start
        self._list_at = now + max(_LIST_S, took / _LIST_SHARE)
        living = {process for family in self._families.values() for process in family}
        self._measured = {one: old for one, old in self._measured.items() if one in living}
        keys = {(kernel.id, kernel.pid) for kernel in kernels}
        self._trails = {key: trail for key, trail in self._trails.items() if key in keys}

    def _sample(self, kernel: Kernel, now: float) -> KernelSample:
        family = self._families[kernel.pid]
        percents = [self._percent(process) for process in family]
        known = [percent for percent in percents if percent is not None]
        memory = _memory(family)
        trail = self._trails.setdefault((kernel.id, kernel.pid), deque(maxlen=_MOST))
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
        """Return the percentage of one core since the last call; None at the first."""
        first = process not in self._measured
        try:
            percent = self._measured.setdefault(process, process).cpu_percent()
        except psutil.Error:
            return None
        return None if first else percent


def _family(pid: int) -> list[psutil.Process]:
    """Return a process and its descendants; empty if it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def _memory(family: Sequence[psutil.Process]) -> int | None:
    """Return the bytes of a kernel and its children; pages shared after a fork count once."""
    memory = resident(family[0].pid) if family else None
    if not memory:  # 0 for a process that has just ended
        return None
    for child in family[1:]:
        try:
            memory += child.memory_full_info().uss
        except psutil.Error:
            memory += resident(child.pid) or 0
    return memory


def _growth(trail: Trail) -> float | None:
    """Return the bytes per second of the last seconds; None if too few are known."""
    if not trail:
        return None
    now, memory = trail[-1]
    earlier = [one for one in trail if now - one[0] >= _GROWTH_S]
    at, before = earlier[-1] if earlier else trail[0]
    return round((memory - before) / (now - at)) if now - at >= 0.5 else None
