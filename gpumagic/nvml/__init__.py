"""The one door to NVML: every question to NVIDIA's driver goes through here, and none raises."""

from gpumagic.nvml.door import Call, Gpu, Nvml, door
from gpumagic.nvml.faults import Fault

__all__ = ["Call", "Fault", "Gpu", "Nvml", "door"]
