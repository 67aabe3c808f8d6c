"""The one door to NVML: every question to NVIDIA's driver goes through here, and none raises."""

from .door import Call, Gpu, Nvml, door
from .faults import Fault

__all__ = ["Call", "Fault", "Gpu", "Nvml", "door"]
