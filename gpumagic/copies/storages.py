"""Copy the memory that tensors and arrays lie in, all at once.

Guarantees: what overlaps in memory overlaps in the copy (views, `from_numpy`, tied weights);
strides and offsets stay; the source is only read, and never copied on its own device first.
"""

import ctypes
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gpumagic.moving.plan import bytes_of

# torch's own alignment of memory: offsets are whole in every element size.
_ALIGNMENT = 64
# A storage is copied whole, so that `as_strided` and `storage_offset` are as they were, unless the
# tensors in it use so little that this would be a waste.
_SMALL = 2**20
_NO_DISPATCH = torch._C._disabled_torch_dispatch_impl


@dataclass
class _Piece:
    """One tensor or array, the addresses that it uses, and those that are copied for it."""

    index: int
    source: Any
    first: int
    start: int
    stop: int
    home: torch.device


class Blocks:
    """Tensors and arrays to copy, each once, known by the number that `add` gives."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sources: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._made: dict[int, Any] = {}
        self._finished: dict[int, Any] = {}
        self._token: Tensor | None = None  # what tensors that autograd tracks come from

    def add(self, source: Any) -> int:
        """Note a tensor or a numpy array."""
        if id(source) not in self._numbers:
            self._numbers[id(source)] = len(self._sources)
            self._sources.append(source)
        return self._numbers[id(source)]

    def copy(self, homes: Mapping[int, torch.device]) -> None:
        """Make all copies, each on its device in `homes`, by id, or on its own."""
        self._token = torch.zeros((), device="cpu", requires_grad=True)
        places: dict[torch.device, list[_Piece]] = {}
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for index, source in enumerate(self._sources):
                is_tensor = isinstance(source, Tensor)
                device = source.device if is_tensor else torch.device("cpu")
                home = homes.get(id(source), device)
                if is_tensor and not _lies_plainly(source):
                    self._made[index] = _copied_alone(source, home)
                    self.nbytes += bytes_of(source)
                else:
                    places.setdefault(device, []).append(_piece(index, source, home))
            for device, pieces in places.items():
                for family in _families(pieces):
                    self._copy_family(family, device)

    def _copy_family(self, family: list[_Piece], device: torch.device) -> None:
        start, stop = min(p.start for p in family), max(p.stop for p in family)
        if len(family) == 1 and _owns_it_all(family[0].source):
            # It must own its memory, or `resize` would be refused.
            self._made[family[0].index] = family[0].source.copy(order="K")
            self.nbytes += stop - start
            return
        lead = start % _ALIGNMENT
        buffers: dict[torch.device, Tensor] = {}
        for piece in family:
            home = piece.home
            if home not in buffers and stop > start:
                pinned = home.type == device.type == "cpu" and _is_pinned(piece.source)
                new = torch.empty(
                    lead + stop - start, dtype=torch.uint8, device=home, pin_memory=pinned
                )
                new[lead:].copy_(_bytes_between(start, stop, family, device))
                buffers[home] = new
                self.nbytes += stop - start
            self._made[piece.index] = _laid_out(
                piece, buffers.get(home), piece.first - start + lead
            )

    def copied(self, number: int, kind: type | None = None) -> Any:
        """The copy of what has this number; of a tensor it is one of class `kind`."""
        source, data = self._sources[number], self._made[number]
        if number in self._finished:
            return self._finished[number]
        with torch._C.DisableTorchFunctionSubclass():
            tracked = getattr(source, "grad_fn", None) is not None
            needs = getattr(source, "requires_grad", False)
        if torch.nn.parameter.is_lazy(data) or type(data) is not Tensor:
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
        """Weak references to all copies."""
        return [weakref.ref(item) for item in (*self._finished.values(), *self._made.values())]

    def clear(self) -> None:
        """Hold nothing any more."""
        for held in (self._made, self._finished, self._numbers):
            held.clear()
        self._sources.clear()


class _Rooted(torch.autograd.Function):
    """Makes of a plain tensor one that is no leaf, without memory of its own."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


def _lies_plainly(tensor: Tensor) -> bool:
    return (
        type(tensor).__torch_dispatch__ is _NO_DISPATCH
        and not torch.nn.parameter.is_lazy(tensor)
        and tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_inference()
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def _copied_alone(tensor: Tensor, home: torch.device) -> Tensor:
    kind: Any = type(tensor)
    made: Any
    if torch.nn.parameter.is_lazy(tensor):
        if kind.__name__ == "UninitializedBuffer":
            made = kind(device=home, dtype=tensor.dtype)
        else:
            made = kind(tensor.requires_grad, device=home, dtype=tensor.dtype)
        return cast(Tensor, made)
    with torch.inference_mode(tensor.is_inference()):
        made = tensor.detach().to(home if tensor.device.type != "meta" else "meta", copy=True)
    if isinstance(tensor, nn.Parameter) and not isinstance(made, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    if not made.is_inference():
        made.requires_grad_(tensor.requires_grad)
    return cast(Tensor, made)


def _piece(index: int, source: Any, home: torch.device) -> _Piece:
    low, high = _reach(source)
    if not isinstance(source, Tensor):
        first = int(source.__array_interface__["data"][0])
        return _Piece(index, source, first, first + low, first + high, home)
    first = source.data_ptr()
    start, stop = first + low, first + high
    storage = source.untyped_storage()
    base = first - int(source.storage_offset()) * source.element_size()
    if high and storage.nbytes() <= 2 * (high - low) + _SMALL:
        start, stop = base, base + storage.nbytes()
    return _Piece(index, source, first, start, stop, home)


def _reach(source: Any) -> tuple[int, int]:
    """The first byte that is used and the one after the last, from the first element's address."""
    if isinstance(source, Tensor):
        shape, size = tuple(source.shape), source.element_size()
        steps = [step * size for step in source.stride()]
    else:
        shape, size, steps = source.shape, source.itemsize, source.strides
    if not math.prod(shape):
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + size


def _families(pieces: list[_Piece]) -> list[list[_Piece]]:
    families: list[list[_Piece]] = []
    end = -1
    for piece in sorted(pieces, key=lambda p: (p.start, p.stop)):
        if piece.start >= end or piece.start == piece.stop:
            families.append([])
        families[-1].append(piece)
        end = max(end, piece.stop)
    return families


def _bytes_between(start: int, stop: int, family: list[_Piece], device: torch.device) -> Tensor:
    for piece in family:
        if not isinstance(piece.source, Tensor):
            continue
        source = piece.source
        storage = source.untyped_storage()
        base = piece.first - int(source.storage_offset()) * source.element_size()
        if base <= start and stop <= base + storage.nbytes():
            flat = torch.empty(0, dtype=torch.uint8, device=device)
            return flat.set_(storage, start - base, (stop - start,), (1,))
    # Several storages over the same memory: arrays and what `from_numpy` made of them.
    memory = (ctypes.c_ubyte * (stop - start)).from_address(start)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _laid_out(piece: _Piece, buffer: Tensor | None, offset: int) -> Any:
    source = piece.source
    if not isinstance(source, Tensor):
        if buffer is None:
            return source.copy(order="K")
        plain: Any = next(base for base in type(source).__mro__ if base.__name__ == "ndarray")
        made = plain(
            source.shape, source.dtype, buffer.numpy(), offset=offset, strides=source.strides
        ).view(type(source))
        made.flags.writeable = source.flags.writeable
        return made
    new = torch.empty(0, dtype=source.dtype, device=piece.home)
    if buffer is None or not source.numel():
        return new.set_(new.untyped_storage(), 0, source.size(), source.stride())
    first = offset // source.element_size()
    return new.set_(buffer.untyped_storage(), first, source.size(), source.stride())


def _owns_it_all(source: Any) -> bool:
    return not isinstance(source, Tensor) and source.flags.owndata and source.flags.forc


def _is_pinned(source: Any) -> bool:
    return isinstance(source, Tensor) and torch.cuda.is_initialized() and source.is_pinned()
