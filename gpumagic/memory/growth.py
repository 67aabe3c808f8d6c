"""Notice a cell that leaves more GPU memory each time it runs, and name the holder, once.

After each cell one number per GPU is read. The holders are looked up only after a cell has left
more twice in a row, and again at the third time: the report names the holder that grew between.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.display.units import size
from gpumagic.memory.allocator import MadeIn
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.memory_report import OUTPUT
from gpumagic.memory.references import GRAPH

LEAST = 2**16
"""Bytes more at the end of a run that are worth a word."""
TIMES = 3
"""In a row."""


@dataclass(frozen=True)
class Grown:
    """Record what grows with each run of a cell: a name, bytes a run, and the line."""

    name: str
    nbytes: int
    where: str = ""  # the line that allocated most of it; empty if unknown
    graph: bool = False  # the graph of a computation keeps most of it

    def __str__(self) -> str:
        says = f"`{self.name}` grows by {size(self.nbytes)} a run{' with its graph' * self.graph}"
        if self.name == "Out":
            return (
                f"{says}: it keeps the value of the cell's last line; end that line with a "
                "semicolon, and `%gpufree` gives back what it has kept"
            )
        says += f", made in {self.where}" if self.where else ""
        if self.graph:
            return f"{says}; `.detach()` of it (`.item()` of a number) keeps the numbers alone"
        return f"{says}; `del {self.name}` gives it back, `.cpu()` of a tensor keeps it elsewhere"


@dataclass
class _Runs:
    """Count how often a cell left more; and the bytes allocated at the end of its last run."""

    allocated: int
    grew: int = 0
    before: dict[str, int] | None = None  # bytes by holder before the last run
    done: bool = False


class GrowthWatch:
    """Watch the cells of one notebook."""

    def __init__(self) -> None:
        self._cells: dict[int, _Runs] = {}
        self._told: set[str] = set()

    def ended(self, cell: str, namespace: Mapping[str, Any]) -> Grown | None:
        """Note that a cell has ended; return what grows, if it is time to report it."""
        now = _allocated()
        runs = self._cells.setdefault(hash(cell), _Runs(now))
        more, runs.allocated = now - runs.allocated, now
        if runs.done:
            return None
        runs.grew = runs.grew + 1 if more >= LEAST else 0
        if runs.grew == TIMES - 1:
            runs.before = {name: _bytes(held) for name, held in _holders(namespace).items()}
        if runs.grew < TIMES or runs.before is None:
            return None
        runs.done = True
        grown = _grown(runs.before, namespace, more)
        if grown is None or grown.name in self._told:
            return None
        self._told.add(grown.name)
        return grown


def _allocated() -> int:
    """Return the bytes allocated on all GPUs, by the counters alone."""
    every = map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))
    return sum(stats["allocated_bytes"]["all"]["current"] for stats in every if stats)


def _holders(namespace: Mapping[str, Any]) -> dict[str, list[FoundStorage]]:
    """Return the storages of each holder; all outputs are one holder."""
    found: dict[str, list[FoundStorage]] = {}
    for storage in find(namespace, paths=True):
        first = storage.ways[0]
        found.setdefault("Out" if first.kind == OUTPUT else first.root, []).append(storage)
    return found


def _grown(before: Mapping[str, int], namespace: Mapping[str, Any], more: int) -> Grown | None:
    """Return the holder that most of the new bytes went to; None if there is no such holder."""
    after = _holders(namespace)
    added = {name: _bytes(held) - before.get(name, 0) for name, held in after.items()}
    name = max(added, key=lambda name: added[name], default="")
    if not name or 2 * added[name] < more:
        return None
    held = after[name]
    graph = 2 * _bytes([s for s in held if GRAPH in s.path]) > _bytes(held)
    made = MadeIn().most_of(held[0].device, [s.address for s in held])
    return Grown(name, more, made.place if made else "", graph)


def _bytes(storages: list[FoundStorage]) -> int:
    return sum(storage.nbytes for storage in storages)
