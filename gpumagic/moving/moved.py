"""Record moves: moved variables and their origins, and variables that stayed, with reasons."""

from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from gpumagic.display.units import duration, size, some

DATASET_STAYS = "a dataset stays where it is; a DataLoader's batches are copied"


@dataclass(frozen=True)
class Left:
    """A variable, or a part of a variable, that was not moved, and the reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Moved:
    """The bytes that moved with one variable, and their former devices."""

    name: str
    nbytes: int  # memory that two variables share counts for the first of them
    sources: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Moves:
    """The result of `move`: variables that moved, variables that stayed, and the seconds."""

    moved: tuple[Moved, ...] = ()
    left: tuple[Left, ...] = ()
    seconds: float = 0.0
    value: Any = field(default=None, compare=False)
    """The moved value itself, or its copy on the device (for JAX's arrays)."""

    @property
    def nbytes(self) -> int:
        """Total bytes copied."""
        return sum(m.nbytes for m in self.moved)

    @property
    def back(self) -> str:
        """The text of a move back: ``"moved back X …"``."""
        return repr(self).replace("moved", "moved back", 1)

    def __str__(self) -> str:
        """Return ``"moved X, net: 1.2 MiB from cuda:1 in 3.1 ms"``."""
        if not self.moved:
            return "moved nothing"
        sources = ", ".join(dict.fromkeys(source for m in self.moved for source in m.sources))
        names = some(dict.fromkeys(m.name for m in self.moved))
        return f"moved {names}: {size(self.nbytes)} from {sources} in {duration(self.seconds)}"

    def __repr__(self) -> str:
        return "; ".join([str(self), *(f"left {part.name}: {part.reason}" for part in self.left)])


def all_of(several: Iterable[Moves]) -> Moves:
    """Combine several moves into one."""
    several = list(several)
    return Moves(
        tuple(moved for moves in several for moved in moves.moved),
        tuple(left for moves in several for left in moves.left),
        sum(moves.seconds for moves in several),
    )


@dataclass(frozen=True)
class Origin:
    """The device of an object, or of a variable's arrays, before a cell moved them."""

    name: str  # the variable through which the object was found
    device: Any  # a torch.device for torch's objects, else a name: "cuda:1"
    there: Any  # the device to which the object was moved
    cell: str = ""  # the cell that moved the object: "In [3]"
    kind: type | None = None  # type of the variable's value, if the variable was rebound
    committed: bool = True  # whether JAX's arrays were committed to their device
    originals: Mapping[int, tuple[Any, Any]] = field(default_factory=dict, compare=False)
    """By a copy's id: a weak reference to the copy, and its original until `keep_origins`."""
    named: Mapping[str, object] = field(default_factory=dict)
    """Former values of attributes that name a device."""


Origins = list[tuple[Any, Origin]]
"""Moved objects with their origins; for arrays, the names of the framework and the variable."""


def keep_origins(known: MutableMapping[Any, Origin], origins: Origins, cell: str) -> None:
    """Store origins in `known`; if several cells moved an object, keep its first origin."""
    for moved, origin in origins:
        copies = {key: (copy, None) for key, (copy, _) in origin.originals.items()}
        origin = replace(origin, cell=cell, originals=copies)
        with suppress(TypeError):  # an object that allows no weak references
            first = known.get(moved, origin)
            went_on = first.device != first.there == origin.device and first.kind is origin.kind
            kept = replace(first, there=origin.there) if went_on else origin
            copies = {**first.originals, **copies}
            named = {**origin.named, **first.named}
            known[moved] = replace(kept, named=named, originals=copies)
