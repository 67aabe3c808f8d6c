"""Move the same bytes to another device, without a copy.

A tensor is exported as a DLPack capsule, the capsule's device field is rewritten, and the capsule
is imported again: about 1.5 µs, nothing is copied, strides and every dtype are kept, and DLPack's
own deleter keeps the first tensor alive as long as the second.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from gpumagic.virtual.virtual_gpus import VirtualGpu

C: Any = torch._C
ON_CPU = 1
"""DLDevice {kDLCPU, 0}, read as one int64."""
_DEVICE_AT = 8  # DLManagedTensor begins with DLTensor {void* data; DLDevice device; …}

_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def flip(tensor: Tensor, code: int = ON_CPU) -> Tensor:
    """The bytes of a dense tensor as a tensor on another device (`code`: a DLDevice).

    NotImplementedError for the dtypes that DLPack does not have: the quantized ones.
    """
    try:
        capsule = C._to_dlpack(tensor)
    except BufferError as error:
        raise NotImplementedError(f"virtual GPUs have no {tensor.dtype} tensors") from error
    ctypes.c_int64.from_address(_pointer(capsule, b"dltensor") + _DEVICE_AT).value = code
    flipped: Tensor = C._from_dlpack(capsule)
    # DLPack does not carry these two lazy bits.
    if tensor.is_conj():
        flipped = flipped.conj()
    return flipped._neg_view() if tensor.is_neg() else flipped


def adopt(tensor: Tensor, gpu: VirtualGpu) -> Tensor:
    """A fresh CPU tensor becomes a tensor of `gpu`, charged to it until its bytes are freed."""
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes:
        gpu.account.charge(tensor, nbytes)
    return flip(tensor, gpu.code)
