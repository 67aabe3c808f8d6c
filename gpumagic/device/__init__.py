"""Resolve the names of GPUs to devices.

This package never imports torch, and loads NVML only when the GPUs are first listed.
"""

from gpumagic.device import cuda_state as cuda_state
from gpumagic.device.discover import CPU as CPU
from gpumagic.device.discover import Device as Device
from gpumagic.device.discover import TorchBuild as TorchBuild
from gpumagic.device.discover import amd_gpus as amd_gpus
from gpumagic.device.discover import devices_changed as devices_changed
from gpumagic.device.discover import has_virtual as has_virtual
from gpumagic.device.discover import here as here
from gpumagic.device.discover import intel_gpus as intel_gpus
from gpumagic.device.discover import physical_gpus as physical_gpus
from gpumagic.device.discover import set_cuda_order as set_cuda_order
from gpumagic.device.discover import set_virtual as set_virtual
from gpumagic.device.discover import torch_build as torch_build
from gpumagic.device.discover import visible as visible
from gpumagic.device.where import complete as complete
from gpumagic.device.where import is_where as is_where
from gpumagic.device.where import resolve as resolve
from gpumagic.device.where import resolve_one as resolve_one
