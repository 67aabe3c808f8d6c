"""The one door to NVML: every question to NVIDIA's driver goes through here, and none raises."""

from gpumagic.nvml.door import Nvml
from gpumagic.nvml.faults import Fault
from gpumagic.nvml.fields import ALL_LINKS, Field, FieldId
from gpumagic.nvml.gpu import Call, Gpu
from gpumagic.nvml.shared import door

__all__ = ["ALL_LINKS", "Call", "Fault", "Field", "FieldId", "Gpu", "Nvml", "door"]
