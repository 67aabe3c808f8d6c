"""Plan what to copy where: new bytes for old tensors.

All of them are made before the first tensor changes, so that either all move or none.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.display.units import size
from gpumagic.faults import first_line
from gpumagic.moving.find_tensors import FoundTensor
from gpumagic.moving.moved import Left, Origin

# A multiple of every element size: offsets stay whole when a copy begins in the middle.
_ALIGNMENT = 64
# Bytes that may take seconds, over a bus or from a disk.
_MANY = 2**28
# Tensors of one storage that overlap, behind the first byte of theirs and the one after the last.
_Family = tuple[int, int, list[FoundTensor]]


@dataclass(frozen=True)
class Copying:
    """Track the progress of a long move's copies, in bytes."""

    done: int
    total: int
    device: torch.device

    @property
    def share(self) -> float:
        """The part that is done, from 0 to 1."""
        return self.done / self.total

    def __str__(self) -> str:
        """``"moving to cuda:1: 3.0 GiB of 4.2 GiB"``."""
        return f"moving to {self.device}: {size(self.done)} of {size(self.total)}"


class MovePlan:
    """New bytes for old tensors, made in full before the first tensor is changed."""

    def __init__(
        self, device: torch.device, wanted: list[FoundTensor], origins: list[tuple[Any, Origin]]
    ) -> None:
        self.device = device
        self.nbytes: dict[str, int] = {}  # by variable
        self.sources: dict[str, dict[str, None]] = {}
        self.left: list[Left] = []
        self.origins = origins  # gets what is carried out, with where it was
        self._wanted = wanted
        self._assignments: list[tuple[FoundTensor, Tensor]] = []
        self._alone: list[FoundTensor] = []
        self._shared: dict[int, list[FoundTensor]] = {}  # by storage
        for found in wanted:
            if reason := immovable(found.tensor):
                self.left.append(Left(found.path, reason))
            elif has_plain_storage(found.tensor):
                self._shared.setdefault(found.tensor.untyped_storage()._cdata, []).append(found)
            else:
                self._alone.append(found)

    def note_bystanders(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note which tensors lose the memory that they share with one that moves."""
        wanted = {id(found.tensor) for found in self._wanted}
        for name, tensor in named:
            if id(tensor) not in wanted and (sharing := self._shares_with(tensor)):
                self._note_shared(name, sharing)

    def note_arrays(self, named: Iterable[tuple[str, int, int]]) -> None:
        """Note which NumPy arrays lose shared memory, by their first and end addresses."""
        for name, first, last in named:
            for start, stop, family in self._families:
                base = family[0].tensor.untyped_storage().data_ptr()
                if first < base + stop and base + start < last:
                    self._note_shared(name, family[0].path)

    def _note_shared(self, name: str, sharing: str) -> None:
        reason = f"it shared memory with {sharing}, which moved: they are two from now on"
        self.left.append(Left(name, reason))

    def _shares_with(self, tensor: Tensor) -> str:
        """The name of a tensor that moves and overlaps with this one, or nothing."""
        if not self._shared or not has_plain_storage(tensor):
            return ""
        start, stop = _span(tensor)
        for found in self._shared.get(tensor.untyped_storage()._cdata, ()):
            first, last = _span(found.tensor)
            if first < stop and start < last:
                return found.path
        return ""

    @cached_property
    def _families(self) -> list[_Family]:
        return [family for group in self._shared.values() for family in _families(group)]

    @property
    def needed(self) -> int:
        """The bytes that the copies take on its device."""
        alone = (bytes_of(found.tensor) for found in self._alone if found.home is None)
        each = (b - a for a, b, family in self._families if any(f.home is None for f in family))
        return sum(alone) + sum(each)

    def copy(self, line: Callable[[], AbstractContextManager[Any]] | None = None) -> bool:
        """Make the new bytes; False, and none are kept, where the device has no room for them.

        Of many bytes, a `line` is made, and updated before each copy with how far it is.
        """
        done, total = 0, self.needed if line else 0
        try:
            with line() if line and total >= _MANY else nullcontext() as shown:
                for start, end, family in self._families:
                    if shown is not None:
                        shown.update(Copying(done, total, self.device))
                    done += end - start
                    self._copy_family(start, end, family)
            for found in self._alone:
                self._copy_alone(found)
        except torch.OutOfMemoryError:
            self._assignments.clear()
            return False
        return True

    def _add(self, found: FoundTensor, new: Tensor, nbytes: int) -> None:
        self._assignments.append((found, new))
        self.nbytes[found.root] = self.nbytes.get(found.root, 0) + nbytes
        self.sources.setdefault(found.root, {}).setdefault(str(found.tensor.device))

    def _copy_alone(self, found: FoundTensor) -> None:
        """Copy a tensor by its own `to`: the way of subclasses and of layouts without strides."""
        try:
            data = found.tensor.data
            with torch.inference_mode(data.is_inference()):
                new = data.to(found.home or self.device)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            self.left.append(Left(found.path, first_line(error)))
        else:
            if torch._has_compatible_shallow_copy_type(found.tensor, new):
                self._add(found, new, bytes_of(found.tensor))
            else:
                self.left.append(Left(found.path, "it cannot be moved in place; use .to()"))

    def _copy_family(self, start: int, end: int, family: list[FoundTensor]) -> None:
        """Copy tensors that overlap in memory, so that they overlap there too."""
        storage = family[0].tensor.untyped_storage()
        copies: dict[torch.device, torch.UntypedStorage] = {}
        for found in family:
            old, home = found.tensor, found.home or self.device
            copied = 0
            if home not in copies:
                flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
                flat.set_(storage, start, (end - start,), (1,))
                copies[home] = flat.to(home).untyped_storage()
                copied = end - start
            offset = old.storage_offset() - start // old.element_size()
            with torch.inference_mode(old.is_inference()):  # the moved tensor is one if `new` is
                new = torch.empty(0, dtype=old.dtype, device=home)
                new.set_(copies[home], offset if old.numel() else 0, old.size(), old.stride())
            self._add(found, new, copied)

    def carry_out(self) -> None:
        """Give each tensor its new bytes: all of them, or after an interrupt none."""
        before = [(found, found.tensor.data) for found, _ in self._assignments]
        noted = len(self.origins)
        try:
            self.origins += [
                (found.tensor, Origin(found.root, found.tensor.device, new.device))
                for found, new in self._assignments
            ]
            for found, new in self._assignments:
                found.tensor.data = new
        except BaseException:
            for found, old in before:
                found.tensor.data = old
            del self.origins[noted:]
            raise


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of its storage that a tensor uses, and the one after its last."""
    size, first = tensor.element_size(), tensor.storage_offset()
    if not tensor.numel():
        return int(first * size), int(first * size)
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return int(first * size), int((first + last + 1) * size)


def _families(group: list[FoundTensor]) -> list[_Family]:
    """Tensors of one storage, by whether they overlap: two apart need not move together."""
    families: list[_Family] = []
    for found in sorted(group, key=lambda f: _span(f.tensor)):
        start, stop = _span(found.tensor)
        if not families or start >= families[-1][1]:
            families.append((start // _ALIGNMENT * _ALIGNMENT, stop, []))
        first, end, family = families[-1]
        families[-1] = first, max(end, stop), family
        family.append(found)
    return families


def immovable(tensor: Tensor) -> str:
    """Return why a tensor cannot be moved in place; empty if it can."""
    if tensor.grad_fn is not None:
        # Its graph expects a gradient on the device where it was computed.
        return f"its graph is on {tensor.device}; compute it in this cell instead"
    if tensor.device.type == "meta":
        return "it is on the meta device and has no data"
    return ""


def has_plain_storage(tensor: Tensor) -> bool:
    """Whether its bytes lie in one storage, at strides."""
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized or tensor.is_nested)
    )


def bytes_of(tensor: Tensor) -> int:
    """Return a tensor's bytes; 0 if it has no shape yet, or no strides."""
    try:
        return tensor.nbytes
    except (RuntimeError, NotImplementedError, ValueError):
        return 0
