"""Ask NVIDIA's driver by NVML: every question goes through here, and none raises."""

from gpumagic.nvml.door import DriverFault, Nvml, door
from gpumagic.nvml.library import ALL_LINKS, Call, Field, FieldId, Gpu

__all__ = ["ALL_LINKS", "Call", "DriverFault", "Field", "FieldId", "Gpu", "Nvml", "door"]
