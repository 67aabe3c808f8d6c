"""Measure the peak memory of a stretch of code on each CUDA device, nested stretches included."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of torch's allocator on one device, over one stretch of code.

    Attributes
    ----------
    peak : int
        The most bytes allocated at once, what was there before included.
    allocated : int
        Bytes allocated at the end.
    before : int
        Bytes allocated at the start.
    """

    peak: int
    allocated: int
    before: int


class MemoryMeter:
    """Measures between `start` and `stop`.

    torch keeps one peak per device, so starting resets it (`torch.cuda.reset_peak_memory_stats`);
    meters that are running already are told the peak they would lose, and theirs includes ours.
    """

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}
        self._peaks: dict[int, int] = {}

    def start(self) -> None:
        """Begin, on every device that CUDA has started."""
        for index, (allocated, peak, allocations) in _read_all():
            for meter in _running:
                meter._peaks[index] = max(meter._peaks.get(index, 0), peak)
            torch.cuda.reset_peak_memory_stats(index)
            self._before[index] = allocated, allocations
        _running.append(self)

    def stop(self) -> dict[int, DeviceMemory]:
        """The memory of every device that was allocated on since `start`, by CUDA ordinal."""
        found = {}
        if self in _running:
            _running.remove(self)
        for index, (allocated, peak, allocations) in _read_all():
            before, allocations_before = self._before.get(index, (0, 0))
            if allocations != allocations_before:
                peak = max(peak, self._peaks.get(index, 0))
                found[index] = DeviceMemory(peak, allocated, before)
        return found


_running: list[MemoryMeter] = []


def measuring() -> bool:
    """Whether any meter has started and not stopped."""
    return bool(_running)


def _read_all() -> list[tuple[int, tuple[int, int, int]]]:
    """By ordinal: bytes allocated, their peak, and how many allocations there ever were."""
    # Reading must not initialise CUDA: that costs seconds and hundreds of MiB on each device.
    if not torch.cuda.is_initialized():
        return []
    read = []
    for index in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if stats:
            used = stats["allocated_bytes"]["all"]
            count = stats["allocation"]["all"]["allocated"]
            read.append((index, (used["current"], used["peak"], count)))
    return read
