"""Measure the most memory that code held on its devices, beyond what was there before."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.device import Device
from gpumagic.frameworks.needed import Needed
from gpumagic.usercode.values import torch_here


class PeakMemory:
    """From `start` to `stop`, by torch's own counters and those of the frameworks beside it."""

    def __init__(self, devices: Sequence[Device], needed: Needed) -> None:
        self._devices, self._others = devices, needed.others
        self._before: dict[str, list[tuple[int, int | None]]] = {}

    def start(self) -> None:
        """Begin, on every device that has started."""
        if torch_here() is not None:
            from gpumagic.ledger.memory_meter import MemoryMeter

            self._meter = MemoryMeter()
            self._meter.start()
        self._before = {str(device): self._of_others(device) for device in self._devices}

    def stop(self) -> dict[str, int]:
        """Bytes by device; what is not known has no entry."""
        found: dict[str, int] = {}
        torch = torch_here()
        if torch is not None:
            # What the kernel held before is none of the code's doing.
            found = {m.device: m.peak - m.before for m in self._meter.stop().values()}
            for device in map(str, self._devices):
                # Where others work too, nothing of torch's is not nothing at all.
                if device.startswith("cuda") and torch.cuda.is_initialized() and not self._others:
                    found.setdefault(device, 0)
        for one in self._devices:
            if (peak := self._peak_of_others(one)) is not None:
                found[str(one)] = found.get(str(one), 0) + peak
        return dict(sorted(found.items()))

    def _of_others(self, device: Device) -> list[tuple[int, int | None]]:
        return [framework.allocated(device) for framework in self._others]

    def _peak_of_others(self, device: Device) -> int | None:
        """Theirs is of the whole process: it says something of the code only where it has grown."""
        known = [
            peak - held
            for (held, before), (_, peak) in zip(
                self._before.get(str(device), ()), self._of_others(device), strict=False
            )
            if peak is not None and before is not None and peak > before
        ]
        return sum(known) if known else None
