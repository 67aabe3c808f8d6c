"""Run what the generic kernel cannot: making, copying, reading, resizing, pinning."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from gpumagic.ledger.copy_kernels import crossing
from gpumagic.virtual import checks, gate
from gpumagic.virtual.checks import SAME
from gpumagic.virtual.flip import adopt, flip
from gpumagic.virtual.generic_kernel import CPU, HOST, kernel_of, on_metadata
from gpumagic.virtual.virtual_gpus import SMALL, gpu_of, refuse_as_cuda

aten: Any = torch.ops.aten
Kernel = Callable[..., Any]
_copy_on_cpu = on_metadata(aten.copy_.default, CPU)
_fill_by_tensor = kernel_of(aten.fill_.Tensor)
_fill_mask_by_tensor = kernel_of(aten.masked_fill_.Tensor)
_convolve = kernel_of(aten.convolution.default)
_convolve_mixed = on_metadata(aten.convolution.default, CPU)
_put = kernel_of(aten._index_put_impl_.default)
_count = kernel_of(aten.histc.default)


# Products that CUDA has of no whole numbers, by what its kernel is called in the error.
_FLOATS_ONLY = {
    "addmm_cuda": "mm addmm addmm_",
    "baddbmm_cuda": "bmm baddbmm baddbmm_",
    "addmv_impl_cuda": "mv addmv addmv_",
    "dot": "dot vdot",
}


def overload(name: str, space: str = "aten") -> Any:
    """The operator ``space::name``, with its overload after a dot."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), variant or "default")


def own_kernels() -> dict[str, Kernel]:
    """The kernels of this module for the dispatch key CUDA, by the operators' names."""
    kernels: dict[str, Kernel] = {
        "empty.memory_format": _empty(aten.empty.memory_format),
        "empty_strided": _empty(aten.empty_strided.default),
        "zeros": _empty(aten.zeros.default),
        "copy_": _copy_,
        "fill_.Tensor": _fill_,
        "_local_scalar_dense": _item,
        "resize_": _resize_,
        "convolution": _convolution,
        "_index_put_impl_": _index_put,
        "masked_fill_.Tensor": _masked_fill,
        "index_fill_.int_Tensor": _index_fill,
        "histc": _histc,
        "record_stream": lambda *args: None,
        # The CPU's has no bytes behind it, so it cannot be flipped.
        "_efficientzerotensor": torch.zeros,
    }
    for variant in ("source_Storage_storage_offset", "source_Storage", "source_Tensor", ""):
        name = f"set_.{variant}".rstrip(".")
        kernels[name] = on_metadata(overload(name), CPU)
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"):
        kernels[name] = kernels[f"{name}.Tensor"] = lambda *args, **kwargs: False
    for said, names in _FLOATS_ONLY.items():
        kernels |= {name: _floats_only(overload(name), said) for name in names.split()}
    for name in ("_softmax", "_log_softmax"):
        kernels[name] = _softmax(overload(name))
        backward = f"{name}_backward_data"
        kernels[backward] = _softmax_backward(overload(backward))
    return kernels | pinning_kernels()


def pinning_kernels() -> dict[str, Kernel]:
    """Return the kernels that are registered at the dispatch key CPU too."""
    return {"_pin_memory": _pin_memory, "is_pinned": _is_pinned}


def _empty(op: Any) -> Kernel:
    on_cpu = on_metadata(op, CPU)

    def kernel(
        *shape: Any,
        dtype: Any = None,
        layout: Any = None,
        device: Any = None,
        pin_memory: Any = None,
        **memory_format: Any,
    ) -> Tensor:
        __tracebackhide__ = True
        gpu = gpu_of(device)
        if prod(shape[0]) > SMALL:
            gpu.account.require(shape[0], dtype)
        try:
            return adopt(on_cpu(*shape, dtype=dtype, **memory_format), gpu, depth=3)
        except RuntimeError as error:
            refuse_as_cuda(error, gpu.account)
            raise

    return kernel


def _copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    if self.device != src.device:
        nbytes = crossing(self, src, non_blocking)
        checks.emit("copy", "copy_", src.device, self.device, nbytes)
    target, source = (flip(t) if t.is_cuda else t for t in (self, src))
    _copy_on_cpu(target, source, non_blocking)
    return self


def _fill_(self: Tensor, value: Tensor) -> Tensor:
    # As C++ does it: the value of a tensor on another device is read.
    if self.device != value.device and not value.dim():
        return self.fill_(value.item())
    filled: Tensor = _fill_by_tensor(self, value)
    return filled


def _masked_fill(self: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    if not self.is_cuda:
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    return (
        _fill_mask_by_tensor(self, mask, value)
        if value.dim()
        else self.masked_fill_(mask, value.item())
    )


def _index_fill(self: Tensor, dim: int, index: Tensor, value: Tensor) -> Tensor:
    return self.index_fill_(dim, index, value.item())


def _item(self: Tensor) -> Any:
    checks.emit("sync", "item", self.device, HOST, self.element_size())
    return aten._local_scalar_dense.default.redispatch(CPU, flip(self))


def _resize_(self: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    shape = torch.empty(size, device="meta")
    needed = (self.storage_offset() + shape.numel()) * self.element_size()
    storage, offset = self.untyped_storage(), self.storage_offset()
    if needed > storage.nbytes():
        new = torch.empty(shape.numel(), dtype=self.dtype, device=self.device)
        new[: self.numel()].copy_(self.reshape(-1))
        storage, offset = new.untyped_storage(), 0
    return self.set_(storage, offset, size, shape.stride())


def _index_put(self: Tensor, indices: Any, values: Tensor, *options: bool) -> Tensor:
    """Copy indices and a single value to the written tensor's device; check all others' devices."""
    home, accumulate = self.device, options[:1] == (True,)
    fills = values.numel() == 1 and not (values.is_cuda or accumulate)
    fills = fills and [i.device for i in indices if i is not None and i.dtype is torch.bool] == [
        home
    ]
    if values.dim() and values.device != home and not fills:
        if accumulate and self.is_cuda:
            raise RuntimeError(
                f"expected device {home} but got device {values.device} for value tensor"
            )
        first, second = sorted((home, values.device), key=lambda device: device.type == "cpu")
        raise RuntimeError(f"{SAME} found at least two devices, {first} and {second}!")
    brought: list[Tensor | None] = []
    for index in indices:
        if index is None or index.device in (home, HOST):
            brought.append(index)
        else:
            masks = index.dtype in (torch.bool, torch.uint8)
            brought += [i.to(home) for i in (index.nonzero().unbind(1) if masks else [index])]
    if not fills and not (self.is_cuda and values.device == HOST):  # which the operator sends
        values = values.to(home)
    put = _put if self.is_cuda else aten._index_put_impl_
    done: Tensor = put(self, brought, values, *options)
    return done


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """Check devices as C++ does if cuDNN computes; without cuDNN, C++ itself checks."""
    where = [t.device for t in (input, weight, bias) if t is not None]
    if len({*where}) == 1:
        return _convolve(input, weight, bias, *rest)
    if not input.is_cuda:
        return _convolve_mixed(input, weight, bias, *rest)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and not other.is_cuda:
            raise RuntimeError(
                f"Input type ({input.type()}) and {name} type ({other.type()}) should be the same"
            )
    if where[0] == where[1]:
        raise RuntimeError(f"{SAME} found at least two devices, {where[0]} and {where[2]}!")
    transposed = "_transpose" * rest[3]
    raise RuntimeError(
        f"{SAME} got weight is on {where[1]}, different from other tensors on {where[0]} "
        f"(when checking argument in method wrapper_CUDA__cudnn_convolution{transposed})"
    )


def _histc(self: Tensor, *options: Any) -> Any:
    # Of integers: CUDA has a kernel for it, the CPU has not.
    numbers = self if self.is_floating_point() else self.double()
    return _count(numbers, *options).to(self.dtype)


def _floats_only(op: Any, said: str) -> Kernel:
    multiply = kernel_of(op)

    def kernel(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.is_floating_point() or self.is_complex()):
            number = self.type().rpartition(".")[2].removesuffix("Tensor")
            raise NotImplementedError(f"\"{said}\" not implemented for '{number}'")
        return multiply(self, *args, **kwargs)

    return kernel


def _softmax(op: Any) -> Kernel:
    softmax = kernel_of(op)

    def kernel(self: Tensor, dim: int, half_to_float: bool) -> Any:
        # Half in, float out: CUDA has a kernel for it, the CPU has not.
        return softmax(self.float() if half_to_float else self, dim, False)

    return kernel


def _softmax_backward(op: Any) -> Kernel:
    backward = kernel_of(op)

    def kernel(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        return backward(grad, output, dim, output.dtype).to(input_dtype)

    return kernel


def _is_pinned(self: Tensor, device: Any = None) -> bool:
    return not self.is_cuda and gate.is_pinned(self.untyped_storage())


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if self.is_cuda:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    return torch.empty_like(self, pin_memory=True).copy_(self)
