"""Measure the peak memory of some code, also within code that is being measured."""

import torch
from torch.cuda import device_count  # all of them, also while a library is told of one

from gpumagic.ledger.entry import Memory


class MemoryMeter:
    """Measure the peak memory of code on each CUDA device, from `start` to `stop`."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}
        self._peaks: dict[int, int] = {}

    def start(self) -> None:
        """Begin, on every device that CUDA has started."""
        for index, (allocated, peak, allocations) in _read_memory():
            for meter in _running:  # torch keeps one peak, which is reset: they would lose it
                meter._peaks[index] = max(meter._peaks.get(index, 0), peak)
            torch.cuda.reset_peak_memory_stats(index)
            self._before[index] = allocated, allocations
        _running.append(self)

    def read(self) -> list[Memory]:
        """Return the memory of each device so far."""
        found = []
        for index, (allocated, peak, allocations) in _read_memory():
            before, allocations_before = self._before.get(index, (0, 0))
            peak = max(peak, self._peaks.get(index, 0))
            made = allocations - allocations_before
            found.append(Memory(f"cuda:{index}", peak, allocated, before, made))
        return found

    def stop(self) -> list[Memory]:
        """Return the memory of each device with allocations since `start`."""
        if self in _running:
            _running.remove(self)
        return [memory for memory in self.read() if memory.allocations]


_running: list[MemoryMeter] = []


def measuring() -> bool:
    """Whether any meter has started and not stopped."""
    return bool(_running)


def _read_memory() -> list[tuple[int, tuple[int, int, int]]]:
    """Return bytes allocated, their peak, and the number of allocations ever, by ordinal."""
    # Reading must not initialize CUDA: that costs seconds and hundreds of MiB on each device.
    if not torch.cuda.is_initialized():
        return []
    read = []
    for index in range(device_count()):
        stats = torch.cuda.memory_stats_as_nested_dict(index)
        if stats:
            used = stats["allocated_bytes"]["all"]
            count = stats["allocation"]["all"]["allocated"]
            read.append((index, (used["current"], used["peak"], count)))
    return read
