"""Note which cell made each of JAX's arrays: it lives when that has ended, and did not before.

No other framework lists its arrays at little cost.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic.frameworks.known import jax_here
from gpumagic.memory.find_holders import FoundStorage
from gpumagic.memory.memory_report import Made

_cells: dict[int, tuple["weakref.ref[Any]", str]] = {}
Places = Mapping[tuple[str, int], str]


def note(cell: str) -> None:
    """Have the arrays that are new be made by a cell, ``"In [3]"``; or by none that is known."""
    for key in [key for key, (array, _) in _cells.items() if array() is None]:
        del _cells[key]
    for array in jax_here().live():
        if id(array) not in _cells:
            _cells[id(array)] = weakref.ref(array), cell


def forget() -> None:
    """Know of none any more."""
    _cells.clear()


def places() -> Places:
    """The cells, by device and address of what they made and lives."""
    found: dict[tuple[str, int], str] = {}
    framework = jax_here() if "jax" in sys.modules and _cells else None
    for known, cell in [*_cells.values()]:
        if framework is not None and framework.is_array(array := known()):
            for place in framework.places(array):  # a part of an array, made later, is no other
                found.setdefault((place.device, place.address), cell)
    return found


def most_of(storages: Iterable[FoundStorage], made: Places) -> Made | None:
    """The cell that made most bytes of some storages; None where that is not known."""
    by_cell: Counter[str] = Counter()
    for each in storages:
        by_cell[made.get((each.device, each.address), "")] += each.nbytes
    cell = max(by_cell, key=lambda cell: by_cell[cell], default="")
    return Made(cell) if cell else None
