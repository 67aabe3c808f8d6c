"""Copy tensors and the storages they share, all at once, or move them in place.

Guarantees: tensors that share memory share it in the copy (views, `from_numpy`, tied weights);
strides and offsets stay; the source is only read, and never copied on its own device first.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.copies.arrays import ALIGNMENT, Arrays, Stretch, memory, reach
from gpumagic.copies.memo import Uncopied
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import bytes_of
from gpumagic.usercode.values import own

# A whole storage is copied, so that `as_strided` and `storage_offset` stay valid, unless its
# tensors use only a small part.
_SMALL = 2**20
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


class StorageCopier(Arrays):
    """Tensors and arrays to copy, each once, by the number that `add` returns."""

    def __init__(self, others: FrameworksOn | None = None) -> None:
        super().__init__(others)
        self._finished: dict[int, Any] = {}
        self._token: Tensor | None = None  # the root of tensors that autograd tracks

    def reduce(self, source: Any) -> Any:
        """Return how pickle recreates it; a tensor with its gradient and hooks."""
        if not issubclass(type(source), Tensor):
            return super().reduce(source)
        if torch.nn.parameter.is_lazy(source):
            raise Uncopied("a lazy parameter", source)
        number, kind = self.add(source), type(source)
        with torch._C.DisableTorchFunctionSubclass():
            leaf = source.is_leaf
            held: dict[str, Any] = {}
            if leaf and source.grad is not None:
                held["grad"] = source.grad
            for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if leaf and getattr(source, name, None):
                    held[name] = getattr(source, name)
        state = (held, own(source) or None)
        args = (number, None if kind is Tensor else kind)
        if not any(state):
            return self.copied, args
        return self.copied, args, state, None, None, _set_tensor

    def copy(self, homes: Mapping[int, torch.device]) -> None:
        """Make all copies, on the devices in `homes` (by id), or on their own."""
        self._token = torch.zeros((), device="cpu", requires_grad=True)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            super().copy(homes)

    def _copied_alone(self, index: int, source: Any, homes: Mapping[int, Any]) -> bool:
        if super()._copied_alone(index, source, homes):
            return True
        if not isinstance(source, Tensor) or _lies_plainly(source):
            return False
        home = homes.get(id(source), source.device)
        self._made[index] = _copied_alone(source, home)
        self.nbytes += bytes_of(source)
        self.sent += bytes_of(source) * (home != source.device)
        return True

    def _piece(self, index: int, source: Any, homes: Mapping[int, Any]) -> Stretch:
        if not isinstance(source, Tensor):
            host = torch.device("cpu")
            return replace(super()._piece(index, source, homes), device=host, home=host)
        size, storage = source.element_size(), source.untyped_storage()
        low, high = reach(tuple(source.shape), size, tuple(step * size for step in source.stride()))
        first = source.data_ptr()
        start, stop = first + low, first + high
        if high and storage.nbytes() <= 2 * (high - low) + _SMALL:
            start = _base(source)
            stop = start + storage.nbytes()
        home = homes.get(id(source), source.device)
        return Stretch(index, source, first, start, stop, source.device, home)

    def _filled(self, piece: Stretch, family: list[Stretch], start: int, stop: int) -> Tensor:
        pinned = piece.home.type == piece.device.type == "cpu" and _is_pinned(piece.source)
        lead = start % ALIGNMENT
        new = torch.empty(
            lead + stop - start, dtype=torch.uint8, device=piece.home, pin_memory=pinned
        )
        new[lead:].copy_(_bytes_between(start, stop, family))
        return new

    def _laid_out(self, piece: Stretch, buffer: Any, offset: int) -> Any:
        source = piece.source
        if not isinstance(source, Tensor):
            return super()._laid_out(piece, None if buffer is None else buffer.numpy(), offset)
        new = torch.empty(0, dtype=source.dtype, device=piece.home)
        if buffer is None or not source.numel():
            return new.set_(new.untyped_storage(), 0, source.size(), source.stride())
        first = offset // source.element_size()
        return new.set_(buffer.untyped_storage(), first, source.size(), source.stride())

    def copied(self, number: int, kind: type | None = None) -> Any:
        """Return the copy with this number; a tensor as one of class `kind`."""
        source, data = self._sources[number], self._made[number]
        if number in self._finished:
            return self._finished[number]
        with torch._C.DisableTorchFunctionSubclass():
            tracked = getattr(source, "grad_fn", None) is not None
            needs = getattr(source, "requires_grad", False)
        if type(data) is not Tensor:
            made = data
        elif tracked:
            with torch.enable_grad():
                made = _Rooted.apply(self._token, [data])  # type: ignore[no-untyped-call]
        elif kind is None:
            made = data.requires_grad_(needs)
        else:
            made = torch.Tensor._make_subclass(kind, data, needs)
        self._finished[number] = made
        return made

    def made(self) -> list[weakref.ref[Any]]:
        """Return weak references to all copies."""
        return [weakref.ref(item) for item in (*self._finished.values(), *self._made.values())]

    def clear(self) -> None:
        """Drop all references."""
        super().clear()
        self._finished.clear()


class _Rooted(torch.autograd.Function):
    """Turns a plain tensor into one that is no leaf, without more memory."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _lies_plainly(tensor: Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is _NO_DISPATCH
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def _copied_alone(tensor: Tensor, home: torch.device) -> Tensor:
    with torch.inference_mode(tensor.is_inference()):
        made = tensor.detach().to(home if tensor.device.type != "meta" else "meta", copy=True)
    if isinstance(tensor, nn.Parameter) and not isinstance(made, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    if not made.is_inference():
        made.requires_grad_(tensor.requires_grad)
    return made


def _base(tensor: Tensor) -> int:
    """Return the address of its storage."""
    return tensor.data_ptr() - int(tensor.storage_offset()) * tensor.element_size()


def _bytes_between(start: int, stop: int, family: list[Stretch]) -> Tensor:
    for source in (piece.source for piece in family if isinstance(piece.source, Tensor)):
        storage, base = source.untyped_storage(), _base(source)
        if base <= start and stop <= base + storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=source.device)
            return flat.set_(storage, start - base, (stop - start,), (1,))
    # Several storages of the same memory: arrays and their tensors by `from_numpy`.
    return torch.frombuffer(memory(start, stop), dtype=torch.uint8)


def _set_tensor(tensor: Tensor, state: Any) -> None:
    held, attributes = state
    with torch._C.DisableTorchFunctionSubclass():
        for name, value in held.items():
            setattr(tensor, name, value)
    if attributes:
        own(tensor).update(attributes)


def _is_pinned(source: Any) -> bool:
    return isinstance(source, Tensor) and torch.cuda.is_initialized() and source.is_pinned()


def homes(
    namespace: Mapping[str, Any], values: Mapping[str, Any], device: torch.device
) -> tuple[dict[int, torch.device], list[str]]:
    """Return the device of each tensor's copy, by id; and a note on each that autograd tracks."""
    finder = TensorFinder(namespace.get("__name__") or "__main__")
    finder.variables(values.items())
    tracked = (found.path for found in finder.tensors if found.tensor.grad_fn is not None)
    notes = [f"{path}: copied without its autograd graph" for path in tracked]
    return {id(found.tensor): found.home or device for found in finder.tensors}, notes
