"""Create tensors that share an existing tensor's bytes, but are on another device.

A dense tensor is exported as a DLPack capsule, the capsule's device is changed, and the capsule is
imported again. These steps take about 1.5 µs. The new tensor has the same strides and dtype, and
keeps the original tensor alive. A sparse or nested tensor is rebuilt from its dense parts.
"""

import ctypes
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of

C: Any = torch._C
ON_CPU = 1  # DLDevice {kDLCPU, 0}, read as one int64
_DEVICE = 1  # offset of the DLDevice in DLManagedTensor, in words of eight bytes
_to_dlpack, _from_dlpack = C._to_dlpack, C._from_dlpack
# The process's memory as 8-byte words, by address >> 3. A ctypes object per access is 10x slower.
_memory = memoryview((ctypes.c_int64 * 2**59).from_address(0)).cast("B").cast("q")


def _pointer_in_capsule() -> int:
    """Return the offset, in words, of the DLPack pointer within a capsule object."""
    capsule = _to_dlpack(torch.empty(1))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    at = id(capsule) >> 3
    return _memory[at : at + 8].tolist().index(pointer(capsule, b"dltensor"))


_POINTER = _pointer_in_capsule()


def flip_plain(tensor: Tensor, code: int = ON_CPU) -> Tensor:
    """Return a tensor with the same bytes on the device `code`, which is a DLDevice as an int64."""
    try:
        capsule = _to_dlpack(tensor)
    except BufferError:
        raise NotImplementedError(f"virtual GPUs have no {tensor.dtype} tensors") from None
    _memory[(_memory[(id(capsule) >> 3) + _POINTER] >> 3) + _DEVICE] = code
    flipped: Tensor = _from_dlpack(capsule)
    return flipped


def flip(tensor: Tensor, code: int = ON_CPU) -> Tensor:
    """Call `flip_plain`, then restore the conjugate and negative bits, which DLPack drops."""
    flipped = flip_plain(tensor, code)
    if tensor.is_conj():
        flipped = flipped.conj()
    return flipped._neg_view() if tensor.is_neg() else flipped


def adopt(tensor: Tensor, gpu: VirtualGpu, depth: int = 3) -> Tensor:
    """Turn a new CPU tensor into one on `gpu`. Count the bytes; `depth` is as in `charge`."""
    nbytes = tensor.untyped_storage().nbytes()
    if nbytes:
        gpu.account.charge(tensor, nbytes, depth)
    return flip(tensor, gpu.code) if tensor.dtype.is_complex else flip_plain(tensor, gpu.code)


aten: Any = torch.ops.aten
KEYS = {f"{kind}CUDA": f"{kind}CPU" for kind in ("Sparse", "SparseCsr", "NestedTensor")}
"""The CPU's dispatch key for each GPU dispatch key of sparse and nested tensors."""
METADATA = {"_nested_tensor_size", "_nested_tensor_storage_offsets", "_nested_tensor_strides"}
METADATA |= {"_coalesced_", "copy_sparse_to_sparse_", "sparse_resize_", "sparse_resize_and_clear_"}
"""Operators whose C++ code uses a sparse or nested tensor's structure, but reads no elements."""
CPU_ONLY = frozenset({"_sparse_mm_reduce_impl", "_sparse_mm_reduce_impl_backward"})
"""Operators that CUDA lacks. Their CPU kernels would crash in a virtual GPU's backward pass."""
_COO = C.DispatchKeySet(C.DispatchKey.SparseCPU)


def makers() -> dict[str, Callable[..., Tensor]]:
    """Return the kernels that create sparse COO tensors on a GPU, by operator name."""
    names = "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"
    return {name: _made_there(getattr(aten, name).default) for name in names}


def _made_there(op: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, device: torch.device, **options: Any) -> Any:
        # C++ creates empty dense parts on the current device, so make the result's device current.
        with torch.cuda.device(gpu_of(device).index):
            return op.redispatch(_COO, *args, device=device, **options)

    return kernel


def in_parts(tensor: Tensor) -> bool:
    """Whether a tensor is sparse or nested."""
    return tensor.layout is not torch.strided or tensor.is_nested


def flip_parts(tensor: Tensor) -> Tensor:
    """Return a CPU tensor that shares the bytes of a virtual GPU's sparse or nested tensor."""
    return cast(Tensor, _rebuild(tensor, flip, torch.device("cpu")))


def adopt_parts(tensor: Tensor, gpu: VirtualGpu) -> Tensor:
    """Turn a new sparse or nested CPU tensor into a tensor on `gpu`, as `adopt` does."""
    return cast(Tensor, _rebuild(tensor, lambda part: adopt(part.detach(), gpu), gpu.device))


def _rebuild(tensor: Tensor, part: Any, device: torch.device) -> Any:
    options = {"dtype": tensor.dtype, "layout": tensor.layout, "device": device}
    if tensor.is_nested:
        return aten._nested_view_from_buffer(
            part(tensor.values()),
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        )
    if tensor.layout is torch.sparse_coo:
        return aten._sparse_coo_tensor_with_dims_and_tensors(
            tensor.sparse_dim(),
            tensor.dense_dim(),
            tensor.shape,
            part(tensor._indices()),
            part(tensor._values()),
            **options,
            is_coalesced=tensor.is_coalesced(),
        )
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    starts = tensor.crow_indices() if by_row else tensor.ccol_indices()
    across = tensor.col_indices() if by_row else tensor.row_indices()
    return aten._sparse_compressed_tensor_unsafe(
        part(starts), part(across), part(tensor.values()), tensor.shape, **options
    )


def writes(argument: Any) -> bool:
    """Whether an operator's schema marks an argument or return value as written in place."""
    return argument.alias_info is not None and argument.alias_info.is_write
