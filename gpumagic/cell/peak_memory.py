"""Peak memory of a stretch of code on each CUDA device, nested stretches included."""

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
        for index in _initialised():
            allocated, peak, allocations = _read(index)
            for meter in _running:
                meter._peaks[index] = max(meter._peaks.get(index, 0), peak)
            torch.cuda.reset_peak_memory_stats(index)
            self._before[index] = allocated, allocations
        _running.append(self)

    def touched(self) -> list[int]:
        """The ordinals of the devices that were allocated on since `start`."""
        return [
            index
            for index in _initialised()
            if _read(index)[2] != self._before.get(index, (0, 0))[1]
        ]

    def stop(self) -> dict[int, DeviceMemory]:
        """The memory of every device that was allocated on since `start`, by CUDA ordinal."""
        found = {}
        if self in _running:
            _running.remove(self)
        for index in self.touched():
            allocated, peak, _ = _read(index)
            peak = max(peak, self._peaks.get(index, 0))
            found[index] = DeviceMemory(peak, allocated, self._before.get(index, (0, 0))[0])
        return found


_running: list[MemoryMeter] = []


def measuring() -> bool:
    """Whether any meter has started and not stopped."""
    return bool(_running)


def _initialised() -> range:
    # Reading must not initialise CUDA: that costs seconds and hundreds of MiB on each device.
    return range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)


def _read(index: int) -> tuple[int, int, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(index)
    if not stats:
        return 0, 0, 0
    used = stats["allocated_bytes"]["all"]
    return used["current"], used["peak"], stats["allocation"]["all"]["allocated"]
