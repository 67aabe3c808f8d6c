"""Record which variables moved or stayed, and the devices where moved objects were before."""

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
    device: str = field(default="", compare=False)  # where the variable stays; empty if unknown


def clauses(left: Iterable[Left]) -> list[str]:
    """Return a clause for each reason why variables stayed: ``X, y: a dataset stays …``."""
    names: dict[str, list[str]] = {}
    for part in left:
        names.setdefault(part.reason, []).append(part.name)
    return [f"{some(found)}: {reason}" for reason, found in names.items()]


def reasons(left: Iterable[Left]) -> str:
    """Return the end of a sentence: ``"; left X, y: a dataset stays …"``; empty if all moved."""
    return f"; left {'; '.join(found)}" if (found := clauses(left)) else ""


@dataclass(frozen=True)
class Moved:
    """A variable that moved. `sources` are the devices where the variable was before."""

    name: str
    nbytes: int  # memory that two variables share counts only for the first
    sources: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Moves:
    """The result of `move`: variables that moved, variables that stayed, and the time taken."""

    moved: tuple[Moved, ...] = ()
    left: tuple[Left, ...] = ()
    seconds: float = 0.0
    value: Any = field(default=None, compare=False)
    """The moved value. It is a copy if the value cannot move in place, as with a JAX array."""

    @property
    def nbytes(self) -> int:
        """Total bytes copied."""
        return sum(m.nbytes for m in self.moved)

    @property
    def back(self) -> str:
        """The text for variables that were moved back: ``"moved back X …"``."""
        return repr(self).replace("moved", "moved back", 1)

    def __str__(self) -> str:
        """Return ``"moved X, net: 1.2 MiB from cuda:1 in 3.1 ms"``."""
        if not self.moved:
            return "moved nothing"
        sources = ", ".join(dict.fromkeys(source for m in self.moved for source in m.sources))
        names = some(dict.fromkeys(m.name for m in self.moved))
        return f"moved {names}: {size(self.nbytes)} from {sources} in {duration(self.seconds)}"

    def __repr__(self) -> str:
        return str(self) + reasons(self.left)


def all_of(several: Iterable[Moves]) -> Moves:
    """Combine the results of several moves into one result."""
    several = list(several)
    return Moves(
        tuple(moved for moves in several for moved in moves.moved),
        tuple(left for moves in several for left in moves.left),
        sum(moves.seconds for moves in several),
    )


@dataclass(frozen=True)
class Origin:
    """The former device of an object, or of a variable's arrays, that a cell moved."""

    name: str  # the variable through which the object was found
    device: Any  # a torch.device for torch's objects, else a name such as "cuda:1"
    there: Any  # the device to which the object was moved
    cell: str = ""  # the cell that moved the object, such as "In [3]"
    kind: type | None = None  # type of the variable's value; None for torch's objects
    committed: bool = True  # whether a JAX array was committed to `device`
    originals: Mapping[int, tuple[Any, Any]] = field(default_factory=dict, compare=False)
    """Map a copy's id to (copy's weak reference, original). `keep_origins` stores no original."""
    named: Mapping[str, object] = field(default_factory=dict)
    """Old values of the object's attributes that name a device, by the attribute's name."""


Origins = list[tuple[Any, Origin]]
"""Pairs (moved object, origin). For arrays, the first item is (framework name, variable name)."""


def keep_origins(known: MutableMapping[Any, Origin], origins: Origins, cell: str) -> None:
    """Store origins in `known`. An object that moves to a third device keeps its first origin."""
    for moved, origin in origins:
        copies = {key: (copy, None) for key, (copy, _) in origin.originals.items()}
        origin = replace(origin, cell=cell, originals=copies)
        with suppress(TypeError):  # skip an object that allows no weak references
            first = known.get(moved, origin)
            went_on = first.device != first.there == origin.device and first.kind is origin.kind
            kept = replace(first, there=origin.there, cell=cell) if went_on else origin
            copies = {**first.originals, **copies}
            known[moved] = replace(kept, named={**origin.named, **first.named}, originals=copies)
