"""Notice a cell that leaves more GPU memory each time it runs, and name the holder, once.

After each cell one number per GPU is read. The holders are looked up only after a cell has left
more twice in a row, and again at the third time: the report names the holder that grew between.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
_ADDING = frozenset({"append", "appendleft", "add", "extend", "insert", "setdefault", "update"})


@dataclass(frozen=True)
class Grown:
    """Record what grows with each run of a cell: a name, bytes a run, and the line."""

    name: str
    nbytes: int
    where: str = ""  # "line 5", or the line that made it; nothing where neither is known
    adds: bool = False  # the line adds it there
    graph: bool = False  # what is kept has the graph of its computation

    def __str__(self) -> str:
        says = f"`{self.name}` grows by {size(self.nbytes)} a run"
        graph = " with its graph" if self.graph else ""
        if self.name == "Out":
            return (
                f"{says}: it keeps the value of the cell's last line{graph}; end that line with a "
                "semicolon, and `%gpufree` gives back what it has kept"
            )
        if self.adds:
            says = f"{says}: {self.where} adds a tensor{graph}"
        elif self.where:
            says = f"{says}, made in {self.where}"
        if self.graph:
            return f"{says}; `.item()` or `.detach()` of it keeps the numbers alone"
        return f"{says}; `del {self.name}` gives it back, `.cpu()` of a tensor keeps it elsewhere"


class _Holder(NamedTuple):
    """Record what one name holds: its bytes, the bytes that a graph keeps, and the storages."""

    nbytes: int
    graph: int
    addresses: frozenset[tuple[str, int]]


@dataclass
class _Runs:
    """Count how often a cell left more; and the bytes allocated at the end of its last run."""

    allocated: int
    grew: int = 0
    before: dict[str, _Holder] | None = None
    done: bool = False


class GrowthWatch:
    """Watch the cells of one notebook."""

    def __init__(self) -> None:
        self._cells: dict[int, _Runs] = {}
        self._told: set[str] = set()

    def ended(
        self, cell: str, as_python: Callable[[str], str], namespace: Mapping[str, Any]
    ) -> Grown | None:
        """Note that a cell has ended; return what grows, if it is time to report it."""
        now = _allocated()
        runs = self._cells.setdefault(hash(cell), _Runs(now))
        more, runs.allocated = now - runs.allocated, now
        if runs.done:
            return None
        if more < LEAST:
            runs.grew, runs.before = 0, None
            return None
        runs.grew += 1
        if runs.grew == TIMES - 1:
            runs.before = _holders(namespace)
        if runs.grew < TIMES or runs.before is None:
            return None
        runs.done = True
        grown = _grown(runs.before, _holders(namespace), more, as_python(cell))
        if grown is None or grown.name in self._told:
            return None
        self._told.add(grown.name)
        return grown


def _allocated() -> int:
    """Return the bytes allocated on all GPUs, by the counters alone."""
    every = map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))
    return sum(stats["allocated_bytes"]["all"]["current"] for stats in every if stats)


def _holders(namespace: Mapping[str, Any]) -> dict[str, _Holder]:
    """Return all holders by name; all outputs are one holder."""
    of_names: dict[str, list[FoundStorage]] = {}
    for storage in find(namespace, paths=True):
        first = storage.ways[0]
        of_names.setdefault("Out" if first.kind == OUTPUT else first.root, []).append(storage)
    return {name: _holder(storages) for name, storages in of_names.items()}


def _holder(storages: list[FoundStorage]) -> _Holder:
    graph = sum(s.nbytes for s in storages if GRAPH in s.path)
    addresses = frozenset((s.device, s.address) for s in storages)
    return _Holder(sum(s.nbytes for s in storages), graph, addresses)


def _grown(
    before: Mapping[str, _Holder], after: Mapping[str, _Holder], more: int, code: str
) -> Grown | None:
    """Return the name that holds most of the new bytes; None if there is no such name."""
    none = _Holder(0, 0, frozenset())
    name = max(after, key=lambda n: after[n].nbytes - before.get(n, none).nbytes, default=None)
    if name is None:
        return None
    new, old = after[name], before.get(name, none)
    if 2 * (new.nbytes - old.nbytes) < more:
        return None
    graph = 2 * (new.graph - old.graph) > new.nbytes - old.nbytes
    line = _adding_line(code, name)
    if line is not None:
        return Grown(name, more, f"line {line}", adds=True, graph=graph)
    came = next(iter(new.addresses - old.addresses), None)
    made = MadeIn().of(*came) if came else None
    return Grown(name, more, made.place if made else "", graph=graph)


def _adding_line(code: str, name: str) -> int | None:
    """Return the line of a cell that adds to a variable: `losses.append(x)`, `total += x`."""
    try:
        nodes = ast.walk(ast.parse(code))
    except SyntaxError:  # of a cell magic's own language
        return None
    lines = (node.lineno for node in nodes if name in _added_to(node))  # type: ignore[attr-defined]
    return min(lines, default=None)


def _added_to(node: ast.AST) -> list[str]:
    """Return the variables to which a statement or call adds something, also deep inside."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [_variable(node.func.value)] if node.func.attr in _ADDING else []
    if isinstance(node, ast.AugAssign):
        return [_variable(node.target)]
    if isinstance(node, ast.Assign):
        read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        named = [(_variable(target), target) for target in node.targets]
        return [n for n, target in named if n in read or not isinstance(target, ast.Name)]
    return []


def _variable(node: ast.AST) -> str:
    """Return the variable that an expression begins with."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
