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
_DEVICE = 1
"""Its place in DLManagedTensor, which begins with DLTensor {void* data; DLDevice device; …}."""
_to_dlpack, _from_dlpack = C._to_dlpack, C._from_dlpack
# All of this process's memory in words of eight bytes, which shifts divide by: a write through it
# takes a tenth of the time that ctypes needs to make an object of an address.
_memory = memoryview((ctypes.c_int64 * 2**59).from_address(0)).cast("B").cast("q")


def _pointer_in_capsule() -> int:
    """How many words into a capsule's object its pointer lies."""
    capsule = _to_dlpack(torch.empty(1))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = id(capsule) >> 3
    return _memory[at : at + 8].tolist().index(pointer(capsule, b"dltensor"))


_POINTER = _pointer_in_capsule()


def flip_plain(tensor: Tensor, code: int = ON_CPU) -> Tensor:
    """The bytes of a dense tensor as a tensor on another device (`code`: a DLDevice).

    NotImplementedError for the dtypes that DLPack does not have: the quantized ones.
    """
    try:
        capsule = _to_dlpack(tensor)
    except BufferError:
        raise NotImplementedError(f"virtual GPUs have no {tensor.dtype} tensors") from None
    _memory[(_memory[(id(capsule) >> 3) + _POINTER] >> 3) + _DEVICE] = code
    flipped: Tensor = _from_dlpack(capsule)
    return flipped


def flip(tensor: Tensor, code: int = ON_CPU) -> Tensor:
    """The same of a tensor that may be a conjugate or negative view, which DLPack cannot tell."""
    flipped = flip_plain(tensor, code)
    if tensor.is_conj():
        flipped = flipped.conj()
    return flipped._neg_view() if tensor.is_neg() else flipped


def adopt(tensor: Tensor, gpu: VirtualGpu, depth: int = 2) -> Tensor:
    """A fresh CPU tensor becomes a tensor of `gpu`, charged to it until its bytes are freed.

    `depth`: how many calls above this one torch called.
    """
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes:
        gpu.account.charge(tensor, nbytes, depth + 1)
    return flip(tensor, gpu.code) if tensor.is_complex() else flip_plain(tensor, gpu.code)
