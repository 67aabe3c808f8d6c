"""Copy the arrays of NumPy, JAX, TensorFlow and CuPy, or move them in place.

Guarantees: NumPy arrays that overlap in memory overlap in the copy, with their strides and offsets;
every other array gets a copy on the device, which a function may donate.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic.copies import memo
from gpumagic.frameworks.framework import FrameworksOn

ALIGNMENT = 64
"""Bytes between allocations, as in torch: a multiple of every element size."""


@dataclass
class Stretch:
    """One array or tensor, its addresses, and the copied range."""

    index: int
    source: Any
    first: int
    start: int
    stop: int
    device: Any = None  # of a tensor: where it is, and where its copy is made
    home: Any = None


class Arrays:
    """Arrays to copy, each once, by the number that `add` returns."""

    def __init__(self, others: FrameworksOn | None = None) -> None:
        self.nbytes = self.sent = 0  # sent: to another device
        self._others = others
        self._sources: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._made: dict[int, Any] = {}

    def has(self, value: Any, kind: type) -> bool:
        """Whether a value is an array that is copied here."""
        if memo.is_array(value, kind):
            return True
        return self._others is not None and self._others.of(value) is not None

    def know(self, kind: type) -> bool:
        """Whether a framework knows a class by its identity, so that it must not be copied."""
        return self._others is not None and self._others.know(kind)

    def reduce(self, source: Any) -> Any:
        """Return how pickle recreates an array."""
        return self.copied, (self.add(source),)

    def add(self, source: Any) -> int:
        """Add an array and return its number."""
        if id(source) not in self._numbers:
            self._numbers[id(source)] = len(self._sources)
            self._sources.append(source)
        return self._numbers[id(source)]

    def copy(self, homes: Mapping[int, Any]) -> None:
        """Make all copies; `homes` maps ids of tensors to devices."""
        pieces = []
        for index, source in enumerate(self._sources):
            if not self._copied_alone(index, source, homes):
                pieces.append(self._piece(index, source, homes))
        for device in dict.fromkeys(piece.device for piece in pieces):
            for family in families([piece for piece in pieces if piece.device == device]):
                self._copy_family(family)

    def copied(self, number: int) -> Any:
        """Return the copy with this number."""
        return self._made[number]

    def made(self) -> list[weakref.ref[Any]]:
        """Return weak references to all copies."""
        return [weakref.ref(item) for item in self._made.values()]

    def clear(self) -> None:
        """Drop all references."""
        self._made.clear()
        self._numbers.clear()
        self._sources.clear()

    def _copied_alone(self, index: int, source: Any, homes: Mapping[int, Any]) -> bool:
        """Copy an array of another framework, if it is one."""
        framework = self._others.of(source) if self._others is not None else None
        if self._others is None or framework is None:
            return False
        self._made[index] = framework.copy(source, self._others.device)
        self.nbytes += framework.nbytes(source)
        self.sent += framework.nbytes(source)
        return True

    def _piece(self, index: int, source: Any, homes: Mapping[int, Any]) -> Stretch:
        first = int(source.__array_interface__["data"][0])
        low, high = reach(source.shape, source.itemsize, source.strides)
        return Stretch(index, source, first, first + low, first + high)

    def _copy_family(self, family: list[Stretch]) -> None:
        start, stop = min(p.start for p in family), max(p.stop for p in family)
        lead = start % ALIGNMENT
        buffers: dict[Any, Any] = {}
        for piece in family:
            if len(family) == 1 and _owns_it_all(piece.source):
                self.nbytes += stop - start
            elif piece.home not in buffers and stop > start:
                buffers[piece.home] = self._filled(piece, family, start, stop)
                self.nbytes += stop - start
                self.sent += (stop - start) * (piece.home != piece.device)
            buffer = buffers.get(piece.home)
            self._made[piece.index] = self._laid_out(piece, buffer, piece.first - start + lead)

    def _filled(self, piece: Stretch, family: list[Stretch], start: int, stop: int) -> Any:
        """Return a new buffer with these bytes, aligned as they are."""
        import numpy

        lead = start % ALIGNMENT
        room = numpy.empty(lead + stop - start + ALIGNMENT, numpy.uint8)
        buffer = room[-room.ctypes.data % ALIGNMENT :]
        buffer[lead : lead + stop - start] = numpy.frombuffer(memory(start, stop), numpy.uint8)
        return buffer

    def _laid_out(self, piece: Stretch, buffer: Any, offset: int) -> Any:
        """Return an array with the layout of the source, in a NumPy buffer or its own memory."""
        source = piece.source
        if buffer is None:  # it must own its memory, or `resize` would fail
            return source.copy(order="K")
        plain: Any = next(base for base in type(source).__mro__ if base.__name__ == "ndarray")
        made = plain(source.shape, source.dtype, buffer, offset=offset, strides=source.strides)
        made = made.view(type(source))
        made.flags.writeable = source.flags.writeable
        return made


def reach(shape: tuple[int, ...], size: int, steps: tuple[int, ...]) -> tuple[int, int]:
    """Return the first used byte and the one after the last."""
    if not math.prod(shape):
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + size


def families(pieces: list[Stretch]) -> list[list[Stretch]]:
    """Group the stretches that overlap in memory."""
    found: list[list[Stretch]] = []
    end = -1
    for one in sorted(pieces, key=lambda p: (p.start, p.stop)):
        if one.start >= end or one.start == one.stop:
            found.append([])
        found[-1].append(one)
        end = max(end, one.stop)
    return found


def memory(start: int, stop: int) -> Any:
    """Return the bytes between two addresses, as a view."""
    return (ctypes.c_ubyte * (stop - start)).from_address(start)


def _owns_it_all(source: Any) -> bool:
    flags = getattr(source, "flags", None)  # tensors have none
    return flags is not None and bool(flags.owndata and flags.forc)
