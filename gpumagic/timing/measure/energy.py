"""Read joules by the counter that NVIDIA's driver keeps of each GPU."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic import nvml
from gpumagic.device import Device

LEAST_S = 1.0
"""A stretch shorter than this has no energy: the counter follows a power reading that is renewed
every 100 ms or so (Z. Yang, K. Adamek, W. Armour, Part-time power measurements: nvidia-smi's lack
of attention, SC24, arXiv:2312.02741), so that of ten of them a tenth is not certain."""


class EnergyMeter:
    """Reads the counters of some GPUs at the start of a stretch of work and at its end.

    The counter is the whole board's: what else runs there is in it, and so is idling.
    """

    def __init__(self, devices: Sequence[Device], door: nvml.Nvml | None = None) -> None:
        wanted = [device.uuid for device in devices]
        real = all(d.kind == "cuda" and d.uuid and not d.virtual for d in devices)
        self._door = door or (nvml.door() if real else None)
        known = {gpu.uuid: gpu for gpu in self._door.gpus()} if self._door and real else {}
        self._gpus = [known[uuid] for uuid in wanted if uuid in known]
        self._complete = bool(wanted) and len(self._gpus) == len(wanted)
        self._before: float | None = None

    @property
    def supported(self) -> bool:
        """Whether every device has a counter; virtual GPUs, the CPU and MIG devices have none."""
        return self._read() is not None

    def start(self) -> None:
        """Begin."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Since `start`, all devices together; None where that is not known."""
        now = self._read()
        if now is None or self._before is None or now < self._before:
            return None
        return now - self._before

    def _read(self) -> float | None:
        if not self._complete or self._door is None:
            return None
        question = {"energy": ("nvmlDeviceGetTotalEnergyConsumption",)}
        answers = [self._door.ask(gpu, question, alive=True)["energy"] for gpu in self._gpus]
        # Millijoules since the driver was loaded.
        return None if None in answers else sum(answers) * 1e-3
