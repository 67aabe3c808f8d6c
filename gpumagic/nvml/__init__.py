"""Ask NVIDIA's driver by NVML: every question goes through here, and none raises."""

from gpumagic.nvml.door import Nvml, door
from gpumagic.nvml.driver_faults import DriverFault
from gpumagic.nvml.library import ALL_LINKS, Call, Field, FieldId, Gpu

__all__ = ["ALL_LINKS", "Call", "DriverFault", "Field", "FieldId", "Gpu", "Nvml", "door"]
