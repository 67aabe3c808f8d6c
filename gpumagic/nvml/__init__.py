"""Ask NVIDIA's driver through NVML; no call raises."""

from gpumagic.nvml.door import DriverFault, Nvml, door
from gpumagic.nvml.library import ALL_LINKS, Call, Field, FieldId, Gpu

__all__ = ["ALL_LINKS", "Call", "DriverFault", "Field", "FieldId", "Gpu", "Nvml", "door"]
