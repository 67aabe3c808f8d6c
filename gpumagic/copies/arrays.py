"""Copy NumPy's arrays, and those of frameworks beside torch, all at once.

Guarantees: NumPy's arrays that overlap in memory overlap in the copy, with their strides and
offsets; each other array has a copy of its own on the device, which what takes it may give away.
"""

import ctypes
import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic.copies import shared_objects
from gpumagic.frameworks.beside import Beside

ALIGNMENT = 64
"""Of memory, in bytes, as torch has it: offsets are whole in every element size."""


@dataclass
class Stretch:
    """One array or tensor, the addresses that it uses, and those that are copied for it."""

    index: int
    source: Any
    first: int
    start: int
    stop: int
    home: Any = None  # of a tensor, a torch.device


class Arrays:
    """Arrays to copy, each once, known by the number that `add` gives."""

    def __init__(self, beside: Beside | None = None) -> None:
        self.nbytes = self.sent = 0  # sent: to another device
        self._beside = beside
        self._sources: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._made: dict[int, Any] = {}

    def has(self, value: Any, kind: type) -> bool:
        """Whether it is an array that is copied here."""
        if shared_objects.is_array(value, kind):
            return True
        return self._beside is not None and self._beside.of(value) is not None

    def know(self, kind: type) -> bool:
        """Whether a framework knows a class by its identity, so that a copy would be another."""
        return self._beside is not None and self._beside.know(kind)

    def reduce(self, source: Any) -> Any:
        """How a pickle makes the copy of it."""
        return self.copied, (self.add(source),)

    def add(self, source: Any) -> int:
        """Note an array."""
        if id(source) not in self._numbers:
            self._numbers[id(source)] = len(self._sources)
            self._sources.append(source)
        return self._numbers[id(source)]

    def copy(self, homes: Mapping[int, Any]) -> None:
        """Make all copies; `homes` has the devices of tensors, by id."""
        pieces = []
        for index, source in enumerate(self._sources):
            if not self._copied_beside(index, source):
                pieces.append(stretch_of(index, source))
        for family in families(pieces):
            self._copy_arrays(family)

    def copied(self, number: int) -> Any:
        """The copy of what has this number."""
        return self._made[number]

    def made(self) -> list[weakref.ref[Any]]:
        """Weak references to all copies."""
        return [weakref.ref(item) for item in self._made.values()]

    def clear(self) -> None:
        """Hold nothing any more."""
        self._made.clear()
        self._numbers.clear()
        self._sources.clear()

    def _copied_beside(self, index: int, source: Any) -> bool:
        """Copy the array of a framework beside torch, if it is one."""
        framework = self._beside.of(source) if self._beside is not None else None
        if self._beside is None or framework is None:
            return False
        self._made[index] = framework.copy(source, self._beside.device)
        self.nbytes += framework.nbytes(source)
        self.sent += framework.nbytes(source)
        return True

    def _copy_arrays(self, family: list[Stretch]) -> None:
        start, stop = min(p.start for p in family), max(p.stop for p in family)
        self.nbytes += stop - start
        if start == stop or (len(family) == 1 and owns_it_all(family[0].source)):
            # It must own its memory, or `resize` would be refused.
            self._made[family[0].index] = family[0].source.copy(order="K")
            return
        import numpy

        lead = start % ALIGNMENT
        room = numpy.empty(lead + stop - start + ALIGNMENT, numpy.uint8)
        buffer = room[-room.ctypes.data % ALIGNMENT :]
        buffer[lead : lead + stop - start] = numpy.frombuffer(memory(start, stop), numpy.uint8)
        for one in family:
            self._made[one.index] = laid_out(one.source, buffer, one.first - start + lead)


def stretch_of(index: int, source: Any, home: Any = None) -> Stretch:
    """A NumPy array's."""
    first = int(source.__array_interface__["data"][0])
    low, high = reach(source.shape, source.itemsize, source.strides)
    return Stretch(index, source, first, first + low, first + high, home)


def reach(shape: tuple[int, ...], size: int, steps: tuple[int, ...]) -> tuple[int, int]:
    """The first byte that is used and the one after the last, from the first element's address."""
    if not math.prod(shape):
        return 0, 0
    ends = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
    return sum(e for e in ends if e < 0), sum(e for e in ends if e > 0) + size


def families(pieces: list[Stretch]) -> list[list[Stretch]]:
    """Those together that overlap in memory."""
    found: list[list[Stretch]] = []
    end = -1
    for one in sorted(pieces, key=lambda p: (p.start, p.stop)):
        if one.start >= end or one.start == one.stop:
            found.append([])
        found[-1].append(one)
        end = max(end, one.stop)
    return found


def memory(start: int, stop: int) -> Any:
    """The bytes between two addresses, as they are."""
    return (ctypes.c_ubyte * (stop - start)).from_address(start)


def laid_out(source: Any, buffer: Any, offset: int) -> Any:
    """An array like `source`, in a NumPy buffer."""
    plain: Any = next(base for base in type(source).__mro__ if base.__name__ == "ndarray")
    made = plain(source.shape, source.dtype, buffer, offset=offset, strides=source.strides)
    made = made.view(type(source))
    made.flags.writeable = source.flags.writeable
    return made


def owns_it_all(source: Any) -> bool:
    """Whether an array's memory is its own, and all of it is used."""
    return bool(source.flags.owndata and source.flags.forc)
