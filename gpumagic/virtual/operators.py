"""Define kernels that create, copy, read, resize and pin tensors, and kernels of collectives."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gpumagic.ledger.copy_kernels import Kernel, fills
from gpumagic.virtual import gate
from gpumagic.virtual.checks import SAME
from gpumagic.virtual.cuda_api import belongs_to_cuda
from gpumagic.virtual.flip import adopt, flip
from gpumagic.virtual.generic_kernel import CPU, HOST, NOT_PINNED, kernel_of, on_metadata
from gpumagic.virtual.memory_account import refuse_as_cuda
from gpumagic.virtual.virtual_gpus import gpu_of

C: Any = torch._C
aten: Any = torch.ops.aten
_copy_on_cpu = on_metadata(aten.copy_.default, CPU)
_fill_by_tensor: Kernel = kernel_of(aten.fill_.Tensor)
_fill_mask: Kernel = kernel_of(aten.masked_fill_.Tensor)
_convolve = kernel_of(aten.convolution.default)
_put = kernel_of(aten._index_put_impl_.default)
_count = kernel_of(aten.histc.default)
_FLOATS_ONLY = {  # products that CUDA lacks for integers, by the name in CUDA's error
    "addmm_cuda": "mm addmm addmm_",
    "baddbmm_cuda": "bmm baddbmm baddbmm_",
    "addmv_impl_cuda": "mv addmv addmv_",
    "dot": "dot vdot",
}


def overload(name: str, space: str = "aten") -> Any:
    """Return the operator ``space::name``; `name` may have an overload, as in ``fill_.Tensor``."""
    packet, _, variant = name.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), variant or "default")


def own_kernels() -> dict[str, Kernel]:
    """Return this module's kernels for the dispatch key CUDA, by the operators' names."""
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
        "index_fill_.int_Tensor": lambda x, dim, at, value: x.index_fill_(dim, at, value.item()),
        "histc": _histc,
        "record_stream": lambda *args: None,
        # torch's efficient zero tensor has no bytes to share, so create ordinary zeros.
        "_efficientzerotensor": torch.zeros,
    }
    for variant in (".source_Storage_storage_offset", ".source_Storage", ".source_Tensor", ""):
        kernels[f"set_{variant}"] = on_metadata(overload(f"set_{variant}"), CPU)
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"):
        kernels[name] = kernels[f"{name}.Tensor"] = lambda *args, **kwargs: False
    for said, names in _FLOATS_ONLY.items():
        kernels |= {name: _floats_only(kernel_of(overload(name)), said) for name in names.split()}
    for name in ("_softmax", "_log_softmax"):
        backward = f"{name}_backward_data"
        kernels[name] = _softmax(kernel_of(overload(name)))
        kernels[backward] = _softmax_backward(kernel_of(overload(backward)))
    return kernels | _PINNING


def cpu_kernels() -> dict[str, Kernel]:
    """Return the kernels at the dispatch key CPU that pin memory or refuse a GPU's generator."""
    named = (aten.randperm, aten.rand, aten.randn, aten.randint)
    ops = [*(packet.generator for packet in named), aten.randint.low_generator]
    return {op.name().removeprefix("aten::"): _on_host(op) for op in ops} | _PINNING


def _empty(op: Any) -> Kernel:
    on_cpu = on_metadata(op, CPU)

    def kernel(shape: Any, *strides: Any, dtype: Any = None, device: Any = None, **of: Any) -> Any:
        __tracebackhide__ = True
        if of.get("pin_memory"):
            raise RuntimeError(NOT_PINNED)
        gpu = gpu_of(device)
        gpu.account.require(shape, dtype)
        options = {"memory_format": of["memory_format"]} if "memory_format" in of else {}
        try:
            return adopt(on_cpu(shape, *strides, dtype=dtype, **options), gpu)
        except RuntimeError as error:
            refuse_as_cuda(error, gpu.account)
            raise

    return kernel


def _copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    target, source = (flip(t) if t.is_cuda else t for t in (self, src))
    _copy_on_cpu(target, source, non_blocking)
    return self


# As in torch's C++ code, a 0-dim value on another device is read as a number first.
def _fill_(self: Tensor, value: Tensor) -> Tensor:
    read = self.device != value.device and not value.dim()
    return self.fill_(value.item()) if read else _fill_by_tensor(self, value)


def _masked_fill(self: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    if not self.is_cuda:
        raise RuntimeError("masked_fill_: Expected inputs to be on same device")
    return _fill_mask(self, mask, value) if value.dim() else self.masked_fill_(mask, value.item())


def _item(self: Tensor) -> Any:
    return aten._local_scalar_dense.default.redispatch(CPU, flip(self))


def _resize_(self: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    shape = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format)
    storage, offset = self.untyped_storage(), self.storage_offset()
    if (needed := offset + shape.numel()) * self.element_size() > storage.nbytes():
        old = self.new_empty(0).set_(storage)
        new = self.new_empty(needed)
        new[: old.numel()] = old
        storage = new.untyped_storage()
    return self.set_(storage, offset, size, shape.stride())


def _index_put(self: Tensor, indices: Any, values: Tensor, *options: bool) -> Any:
    """Assign `values`. Indices, and 0-dim `values`, may be on another device than `self`."""
    home = self.device
    if not fills(indices, values, *options):
        if values.dim() and values.device != home:
            first, second = sorted((home, values.device), key=lambda device: device.type == "cpu")
            raise RuntimeError(f"{SAME} found at least two devices, {first} and {second}!")
        if not (self.is_cuda and values.device == HOST):  # the operator copies CPU values itself
            values = values.to(home)
    brought = [*chain.from_iterable(_brought(index, home) for index in indices)]
    put = _put if self.is_cuda else aten._index_put_impl_
    return put(self, brought, values, *options)


def _brought(index: Tensor | None, home: torch.device) -> list[Tensor | None]:
    """Copy an index from another GPU to `home`. Convert a mask to its True positions first."""
    if index is None or index.device in (home, HOST):
        return [index]
    if index.dtype in (torch.bool, torch.uint8):
        return [positions.to(home) for positions in index.nonzero().unbind(1)]
    return [index.to(home)]


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """Convolve. For a GPU input, check the devices as torch does with cuDNN."""
    if not input.is_cuda:
        return aten.convolution.default.redispatch(CPU, input, weight, bias, *rest)
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and not other.is_cuda:
            types = f"Input type ({input.type()}) and {name} type ({other.type()})"
            raise RuntimeError(f"{types} should be the same")
    return _convolve(input, weight, bias, *rest)


def _histc(self: Tensor, *options: Any) -> Any:
    # CUDA has a kernel for integers, but the CPU has none.
    return _count(self if self.is_floating_point() else self.double(), *options).to(self.dtype)


def _floats_only(multiply: Kernel, said: str) -> Kernel:
    def kernel(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not (self.is_floating_point() or self.is_complex()):
            number = self.type().rpartition(".")[2].removesuffix("Tensor")
            raise NotImplementedError(f"\"{said}\" not implemented for '{number}'")
        return multiply(self, *args, **kwargs)

    return kernel


# CUDA has kernels with half input and float output, but the CPU has none.
def _softmax(softmax: Kernel) -> Kernel:
    return lambda x, dim, half_to_float: softmax(x.float() if half_to_float else x, dim, False)


def _softmax_backward(backward: Kernel) -> Kernel:
    return lambda grad, out, dim, dtype: backward(grad, out, dim, out.dtype).to(dtype)


def _pin_memory(self: Tensor, device: Any = None) -> Tensor:
    if self.is_cuda:
        raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
    return torch.empty_like(self, pin_memory=True).copy_(self)


_PINNING: dict[str, Kernel] = {
    "_pin_memory": _pin_memory,
    "is_pinned": lambda x, device=None: not x.is_cuda and gate.is_pinned(x.untyped_storage()),
}
_ANY_DEVICE = C.DispatchKeySet(C.DispatchKey.IPU)
"""torch has no kernels at this key, so a call at this key runs the kernel for all devices."""


def _on_host(op: Any) -> Callable[..., Tensor]:
    def kernel(*args: Any, generator: Any, **options: Any) -> Any:
        if generator is not None and belongs_to_cuda(generator):
            raise RuntimeError("Expected a 'cpu' device type for generator but found 'cuda'")
        return op.redispatch(_ANY_DEVICE, *args, generator=generator, **options)

    return kernel


def collective(operator: Any) -> Kernel:
    """Return the kernel for an operator of `torch.distributed`."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        loan = _Loan()
        out = operator(*tree_map(loan.lend, args), **tree_map(loan.lend, kwargs))
        return tree_map(loan.back, out)

    return kernel


class _Loan:
    """Convert GPU tensors to CPU tensors with the same bytes for a collective, and back."""

    def __init__(self) -> None:
        self._lent: dict[int, tuple[Tensor, Tensor]] = {}

    def lend(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_cuda:
            return x
        low = flip(x)
        self._lent[id(low)] = x, low
        return low

    def back(self, x: Any) -> Any:
        if isinstance(x, C.ScriptObject):
            return InFlight.boxed(InFlight(InFlight.unbox(x), self.back))
        return self._lent[id(x)][0] if id(x) in self._lent else x


# Collectives in flight. C++ keeps only the C++ objects alive, so keep the Python objects here.
_running: set[Any] = set()
_Work: Any = getattr(torch.distributed, "Work", object)  # some builds of torch have no `Work`


class InFlight(_Work):  # type: ignore[misc]
    """A collective in flight; its future returns the GPU tensors."""

    def __init__(self, work: Any, back: Callable[[Any], Any]) -> None:
        super().__init__()
        self._work, self._back = work, back
        _running.add(self)

    def wait(self, *timeout: Any) -> Any:
        try:
            return self._work.wait(*timeout)
        finally:
            _running.discard(self)

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def get_future(self) -> Any:
        _running.discard(self)
        return self._work.get_future().then(lambda done: tree_map(self._back, done.value()))
