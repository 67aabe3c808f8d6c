"""Copy tensors and NumPy arrays, so that copies overlap in memory where the originals do.

A family is a group of tensors and arrays that overlap in memory. A copy has the original's strides,
and takes no memory on the original's device if the copy goes to another device. Copies of other
frameworks' arrays share no memory, so that JAX can reuse the memory of a donated copy.
"""

import ctypes
import math
import weakref
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from gpumagic.frameworks.framework import NO_OTHERS, FrameworksOn
from gpumagic.usercode.values import comes_from, is_tensor, own, torch_here

if TYPE_CHECKING:
    import torch

_ALIGNMENT = 64  # of torch's allocations, in bytes; a multiple of every element size


@dataclass
class Stretch:
    """Describe the memory of a tensor or array, and the device of the copy."""

    source: Any
    first: int  # address of the first element
    start: int  # lowest address to copy
    stop: int  # address after the last byte to copy
    device: Any = None  # the source's device; None without torch
    home: Any = None  # the copy's device


class StorageCopier:
    """Collect tensors and arrays, number them, and copy each tensor or array once."""

    def __init__(self, others: FrameworksOn = NO_OTHERS) -> None:
        self.nbytes = self.sent = 0  # bytes of all copies, and of copies to other devices
        self.others = others
        self._sources: dict[int, Any] = {}  # by id; a source's id is also its number
        self._made: dict[int, Any] = {}
        self._finished: dict[int, Any] = {}
        self._token: Any = None  # first input of `_rooted`, which makes non-leaf tensors

    def has(self, value: Any, kind: type) -> bool:
        if comes_from(kind, "numpy.ndarray") and not value.dtype.hasobject:
            # Masked arrays and other subclasses with pickling methods are left to pickle.
            return bool(kind.__reduce__ is kind.__mro__[-2].__reduce__)
        return self.others.of(value) is not None

    def reduce(self, source: Any, kind: type, held: dict[str, Any]) -> Any:
        """Return how pickle recreates an array, with class `kind` and attributes `held`."""
        args = self._add(source), kind
        return self.copied, args, held, None, None, lambda array, held: own(array).update(held)

    def reduce_tensor(self, source: "torch.Tensor") -> Any:
        """Return how pickle recreates a tensor, with its gradient and hooks."""
        torch = torch_here()
        if torch.nn.parameter.is_lazy(source):
            raise TypeError("cannot copy a lazy parameter")
        held: dict[str, Any] = {}
        with torch._C.DisableTorchFunctionSubclass():
            for name in ("grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
                if source.is_leaf and (item := getattr(source, name, None)) is not None:
                    held[name] = item
        state = held, own(source)
        args = self._add(source), None if type(source) is torch.Tensor else type(source)
        return (self.copied, args, *((state, None, None, _set_tensor) if any(state) else ()))

    def _add(self, source: Any) -> int:
        self._sources[id(source)] = source
        return id(source)

    def copy(self, homes: Mapping[int, Any]) -> None:
        """Make all copies; `homes` maps the id of a tensor to the device of the copy."""
        with ExitStack() as stack:
            if (torch := torch_here()) is not None:
                self._token = torch.zeros((), device="cpu", requires_grad=True)
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch._C.DisableTorchFunctionSubclass())
            found = (self._piece(source, homes) for source in self._sources.values())
            pieces = [piece for piece in found if piece is not None]
            for device in dict.fromkeys(piece.device for piece in pieces):
                for family in _families(piece for piece in pieces if piece.device == device):
                    self._copy_family(family)

    def copied(self, number: int, kind: type | None = None) -> Any:
        """Return the copy with this number, as an object of class `kind` if given."""
        if number not in self._finished:
            self._finished[number] = self._finish(self._sources[number], self._made[number], kind)
        return self._finished[number]

    def tensors(self) -> "list[tuple[torch.Tensor, torch.Tensor]]":
        return [(self._sources[n], item) for n, item in self._finished.items() if is_tensor(item)]

    def made(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(item) for item in (*self._finished.values(), *self._made.values())]

    def clear(self) -> None:
        for held in (self._made, self._finished, self._sources):
            held.clear()

    def _piece(self, source: Any, homes: Mapping[int, Any]) -> Stretch | None:
        """Return the memory to copy later. If `source` has no plain memory, copy `source` now."""
        if is_tensor(source):
            home = homes.get(id(source), source.device)
            if _has_plain_memory(source):
                size, first = source.element_size(), source.data_ptr()
                low, high = _reach(source.shape, size, [step * size for step in source.stride()])
                return Stretch(source, first, first + low, first + high, source.device, home)
            self._made[id(source)] = _copied_alone(source, home)
            from gpumagic.moving.move import bytes_of

            self._count(bytes_of(source), sent=home != source.device)
        elif (framework := self.others.of(source)) is not None:
            self._made[id(source)] = framework.copy(source, self.others.device)
            self._count(framework.nbytes(source), sent=True)
        else:
            host = (torch := torch_here()) and torch.device("cpu")
            first = int(source.__array_interface__["data"][0])
            low, high = _reach(source.shape, source.itemsize, source.strides)
            return Stretch(source, first, first + low, first + high, host, host)
        return None

    def _count(self, nbytes: int, *, sent: bool) -> None:
        self.nbytes += nbytes
        self.sent += nbytes * sent

    def _copy_family(self, family: list[Stretch]) -> None:
        """Copy the memory of overlapping tensors and arrays once per target device."""
        start, stop = min(p.start for p in family), max(p.stop for p in family)
        lead = start % _ALIGNMENT
        buffers: dict[Any, Any] = {}
        for piece in family:
            if piece.home not in buffers and stop > start:
                buffers[piece.home] = _filled(piece, family, start, stop)
                self._count(stop - start, sent=piece.home != piece.device)
            lay_out = _tensor_in if is_tensor(piece.source) else _array_in
            buffer = buffers.get(piece.home)
            self._made[id(piece.source)] = lay_out(piece, buffer, piece.first - start + lead)

    def _finish(self, source: Any, data: Any, kind: type | None) -> Any:
        """Return the data as class `kind`, and as a non-leaf if the source has a graph."""
        torch = torch_here()
        if comes_from(type(data), "numpy.ndarray"):
            return data if kind is type(data) else data.view(kind)
        if torch is None or type(data) is not torch.Tensor:
            return data
        with torch._C.DisableTorchFunctionSubclass():
            tracked, needs = source.grad_fn is not None, source.requires_grad
        if tracked:
            with torch.enable_grad():
                made = _rooted().apply(self._token, [data])
                return made if kind is None else made.as_subclass(kind)
        if kind is None:
            return data.requires_grad_(needs)
        return torch.Tensor._make_subclass(kind, data, needs)


def _families(pieces: Iterable[Stretch]) -> list[list[Stretch]]:
    """Group the stretches so that stretches that overlap in memory are in one group."""
    found: list[list[Stretch]] = []
    end = -1
    for one in sorted(pieces, key=lambda p: (p.start == p.stop, p.start, p.stop)):  # empty last
        if one.start >= end or one.start == one.stop:
            found.append([])
        found[-1].append(one)
        end = max(end, one.stop)
    return found


def _reach(shape: tuple[int, ...], size: int, steps: Iterable[int]) -> tuple[int, int]:
    """Return an array's lowest address and its end, as byte offsets from the first element."""
    if not math.prod(shape):
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + size


def _memory(start: int, stop: int) -> Any:
    return (ctypes.c_ubyte * (stop - start)).from_address(start)


def _filled(piece: Stretch, family: list[Stretch], start: int, stop: int) -> Any:
    lead = start % _ALIGNMENT
    if (torch := torch_here()) is None:
        import numpy

        buffer = numpy.empty(lead + stop - start, numpy.uint8)  # aligned for every dtype
        buffer[lead:] = numpy.frombuffer(_memory(start, stop), numpy.uint8)
        return buffer
    pinned = (
        piece.home.type == piece.device.type == "cpu"
        and torch.cuda.is_initialized()
        and is_tensor(piece.source)
        and piece.source.is_pinned()
    )
    options = {"dtype": torch.uint8, "device": piece.home, "pin_memory": pinned}
    buffer = torch.empty(lead + stop - start, **options)
    buffer[lead:].copy_(_bytes_between(start, stop, family))
    return buffer


def _array_in(piece: Stretch, buffer: Any, offset: int) -> Any:
    import numpy

    source = piece.source
    memory = None if buffer is None else numpy.asarray(buffer)
    made: Any = numpy.ndarray(source.shape, source.dtype, memory, offset, source.strides)
    made.flags.writeable = source.flags.writeable
    return made


def _has_plain_memory(tensor: "torch.Tensor") -> bool:
    torch = torch_here()
    return (
        type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def _tensor_in(piece: Stretch, buffer: Any, offset: int) -> "torch.Tensor":
    source = piece.source
    new: torch.Tensor = torch_here().empty(0, dtype=source.dtype, device=piece.home)
    empty = buffer is None or not source.numel()
    storage = (new if empty else buffer).untyped_storage()
    first = 0 if empty else offset // source.element_size()
    return new.set_(storage, first, source.size(), source.stride())


def _copied_alone(tensor: "torch.Tensor", home: "torch.device") -> Any:
    torch = torch_here()
    with torch.inference_mode(tensor.is_inference()):
        made = tensor.detach().to(home if tensor.device.type != "meta" else "meta", copy=True)
    kind: Any = torch.nn.Parameter
    if isinstance(tensor, kind) and not isinstance(made, kind):
        return kind(made, tensor.requires_grad)
    return made if made.is_inference() else made.requires_grad_(tensor.requires_grad)


def _bytes_between(start: int, stop: int, family: list[Stretch]) -> Any:
    torch = torch_here()
    for source in (piece.source for piece in family if is_tensor(piece.source)):
        storage = source.untyped_storage()
        base = source.data_ptr() - int(source.storage_offset()) * source.element_size()
        if base <= start and stop <= base + storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=source.device)
            return flat.set_(storage, start - base, (stop - start,), (1,))
    # No storage has all bytes, for example if `from_numpy` was given slices of one array.
    return torch.frombuffer(_memory(start, stop), dtype=torch.uint8)


@cache
def _rooted() -> Any:
    """Return an autograd function that turns a tensor into a non-leaf without copying data."""
    import torch

    class Rooted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, token: torch.Tensor, held: list[torch.Tensor]) -> torch.Tensor:
            return held[0]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
            return None, None

    return Rooted


def _set_tensor(tensor: "torch.Tensor", state: Any) -> None:
    held, attributes = state
    with torch_here()._C.DisableTorchFunctionSubclass():
        for name, value in held.items():
            setattr(tensor, name, value)
    own(tensor).update(attributes)
