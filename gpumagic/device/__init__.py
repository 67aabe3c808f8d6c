"""Resolve what people call a GPU to the GPU that it is.

Guarantees: a WHERE in any of the usual spellings becomes a list of :class:`Device`, or a
:class:`~gpumagic.errors.GpuError` of one line that says what was given, what there is and what to
type. The UUID is the key; a CUDA ordinal and an NVML index are labels. Never imports torch, and
loads NVML only when somebody asks what there is.
"""

from gpumagic.device.device import CPU, Device
from gpumagic.device.discover import devices_changed, here, set_cuda_order, set_virtual, visible
from gpumagic.device.where import complete, resolve, resolve_one

__all__ = [
    "CPU",
    "Device",
    "complete",
    "devices_changed",
    "here",
    "resolve",
    "resolve_one",
    "set_cuda_order",
    "set_virtual",
    "visible",
]
