"""Build sparse and nested tensors on a virtual GPU of parts that are virtual tensors too.

A COO, compressed (CSR, CSC, BSR, BSC) or nested tensor is rebuilt from its flipped parts for the
CPU's kernel, and the result from its adopted ones. Operators that look at such a tensor's own
metadata, or put it together, are the CPU's as they are: they serve any device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gpumagic.virtual.flip import adopt, flip
from gpumagic.virtual.virtual_gpus import VirtualGpu, gpu_of

C: Any = torch._C
aten: Any = torch.ops.aten
KEYS = {
    "SparseCUDA": "SparseCPU",
    "SparseCsrCUDA": "SparseCsrCPU",
    "NestedTensorCUDA": "NestedTensorCPU",
}
"""The dispatch keys of such tensors, and those of the CPU kernels that serve them."""
METADATA = frozenset(
    {
        "_coalesced_",
        "_nested_tensor_size",
        "_nested_tensor_storage_offsets",
        "_nested_tensor_strides",
        "copy_sparse_to_sparse_",
        "sparse_resize_",
        "sparse_resize_and_clear_",
    }
)
"""Operators that are about how such a tensor is put together, though their schema does not tell."""
CPU_ONLY = frozenset({"_sparse_mm_reduce_impl", "_sparse_mm_reduce_impl_backward"})
"""CUDA has no such kernel, and the CPU's asks whether its arguments require a gradient."""
_COO = C.DispatchKeySet(C.DispatchKey.SparseCPU)


def makers() -> dict[str, Callable[..., Tensor]]:
    """The kernels at SparseCUDA that make a COO tensor, by the operators' names."""
    names = "_sparse_coo_tensor_with_dims", "_sparse_coo_tensor_with_dims_and_tensors"
    return {name: _made_there(getattr(aten, name).default) for name in names}


def _made_there(op: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, device: torch.device, **options: Any) -> Tensor:
        # The C++ class makes its first, empty parts on the current device.
        before = C._accelerator_getDeviceIndex()
        C._accelerator_setDeviceIndex(gpu_of(device).index)
        try:
            made: Tensor = op.redispatch(_COO, *args, device=device, **options)
        finally:
            C._accelerator_setDeviceIndex(before)
        return made

    return kernel


def in_parts(tensor: Tensor) -> bool:
    """Whether a tensor is sparse or nested."""
    return tensor.layout is not torch.strided or tensor.is_nested


def flip_parts(tensor: Tensor) -> Tensor:
    """The CPU tensor over the bytes of such a tensor of a virtual GPU."""
    return _rebuild(tensor, flip, torch.device("cpu"))


def adopt_parts(tensor: Tensor, gpu: VirtualGpu) -> Tensor:
    """A fresh sparse or nested CPU tensor becomes a tensor of `gpu`, its parts charged to it."""
    return _rebuild(tensor, lambda part: adopt(part.detach(), gpu), gpu.device)


def replace_sparse(old: Tensor, new: Tensor) -> Tensor:
    """`old` takes over the parts of `new`: what an operator that writes in place needs."""
    if old.layout is not torch.sparse_coo:
        raise NotImplementedError(f"virtual GPUs cannot write into a {old.layout} tensor in place")
    replaced: Tensor = aten.copy_sparse_to_sparse_.default.redispatch(_COO, old, new)
    return replaced._coalesced_(new.is_coalesced())


def _rebuild(tensor: Tensor, part: Any, device: torch.device) -> Tensor:
    options = {"dtype": tensor.dtype, "layout": tensor.layout, "device": device}
    rebuilt: Tensor
    if tensor.is_nested:
        rebuilt = aten._nested_view_from_buffer(
            part(tensor.values()),
            tensor._nested_tensor_size(),
            tensor._nested_tensor_strides(),
            tensor._nested_tensor_storage_offsets(),
        )
        return rebuilt
    if tensor.layout is torch.sparse_coo:
        rebuilt = aten._sparse_coo_tensor_with_dims_and_tensors(
            tensor.sparse_dim(),
            tensor.dense_dim(),
            tensor.shape,
            part(tensor._indices()),
            part(tensor._values()),
            **options,
            is_coalesced=tensor.is_coalesced(),
        )
        return rebuilt
    by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    starts = tensor.crow_indices() if by_row else tensor.ccol_indices()
    across = tensor.col_indices() if by_row else tensor.row_indices()
    rebuilt = aten._sparse_compressed_tensor_unsafe(
        part(starts), part(across), part(tensor.values()), tensor.shape, **options
    )
    return rebuilt
