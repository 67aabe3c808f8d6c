"""Ask NVIDIA's driver by NVML: every question goes through here, and none raises."""

from gpumagic.nvml.door import Nvml, door
from gpumagic.nvml.driver_faults import DriverFault
from gpumagic.nvml.fields import ALL_LINKS, Field, FieldId
from gpumagic.nvml.library import Call, Gpu

__all__ = ["ALL_LINKS", "Call", "DriverFault", "Field", "FieldId", "Gpu", "Nvml", "door"]
