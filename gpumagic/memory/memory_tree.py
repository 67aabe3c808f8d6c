"""Show the GPU memory of one variable by part: a module's layers, or the items of other values.

A layer's row includes its parameters' optimizer state and the tensors that autograd saved in it,
although other objects hold them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import add
from typing import Any

from gpumagic.device import cuda_state
from gpumagic.display import table
from gpumagic.display.table import Column, Fold, Shown, block, folded, tag
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError, as_typed
from gpumagic.memory.holders_by_name import allocations, find, value_of
from gpumagic.memory.memory_report import SAVED, STATE, Made
from gpumagic.memory.object_graph import Root, module_step
from gpumagic.usercode.frames import first_name
from gpumagic.usercode.values import is_module, own

_OF_LAYER = {"parameter", "buffer", "gradient", STATE, SAVED}
"""Kinds shown as columns of their module; all others get a row."""


@dataclass(frozen=True)
class MemoryBranch:
    """Record a layer, or an item, with everything below it."""

    path: str  # expression to reach it: "net.encoder[0]"
    label: str  # its last step
    depth: int  # 0 for the whole
    nbytes: dict[str, int]  # by kind, without storages that are counted elsewhere in the tree
    alike: int = 1  # number of equal adjacent branches, all counted in this one

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, repr=False)
class MemoryTree(Shown):
    """Record the GPU memory of one variable, by part."""

    name: str
    devices: tuple[str, ...]
    branches: tuple[MemoryBranch, ...]  # each before its children
    # The part of these bytes that other objects hold: optimizer state and autograd's saved tensors.
    held_for_it: dict[str, int] = field(default_factory=dict)
    made: Made | None = None  # allocation site of most bytes
    aliases: tuple[str, ...] = ()  # other holders of a part


@dataclass
class _Node:
    path: str
    step: str
    held: Counter[str] = field(default_factory=Counter)
    below: dict[str, "_Node"] = field(default_factory=dict)

    def at(self, steps: Iterable[str]) -> "_Node":
        node = self
        for step in steps:
            node = node.below.setdefault(step, _Node(node.path + step, step))
        return node

    def add(self, path: tuple[str, ...], kind: str, nbytes: int) -> None:
        """Add a storage to the row of its layer, or to a row of its own."""
        first, *steps = path
        if rest := first.removeprefix(self.path):  # a global of a Python module: `.table`
            steps.insert(0, rest)
        self.at(steps[:-1] if kind in _OF_LAYER else steps).held[kind] += nbytes

    def sum(self) -> Counter[str]:
        return sum((node.sum() for node in self.below.values()), self.held.copy())

    def shape(self) -> tuple[Any, ...]:
        """Return a key that is equal for nodes whose trees hold equal memory."""
        return tuple(sorted(self.held.items())), tuple(n.shape() for n in self.below.values())


def tree(name: str, namespace: Mapping[str, Any]) -> MemoryTree:
    """Return the GPU memory of a name by part; the name may have attributes and items.

    Raises
    ------
    GpuError
        There is no such variable; it has nothing on a GPU; CUDA is dead.
    """
    cuda_state.check()
    value, first, allocator = value_of(name, namespace), first_name(name), allocations()
    # This value is visited first, so that all paths to its parts begin at the value.
    start = [Root(name, value, holder=first)]
    every = find(namespace, before=start, allocator=allocator, paths=True)
    root, devices, held_for_it = _Node(name, name), Counter[str](), Counter[str]()
    if is_module(value):
        _add_layers(root, value)
    aliases, addresses = dict[str, None](), dict[str, list[int]]()
    for each in every:
        kind, path, is_for_it = each.ways[0].kind, each.path, each.parameter[:1] == (name,)
        if name in (path[0], first_name(path[0])):
            path = each.parameter if is_for_it and kind in ("gradient", STATE) else path
            aliases |= dict.fromkeys(way.root for way in each.ways)
            addresses.setdefault(each.device, []).append(each.address)
        elif is_for_it:
            # Memory that an output or an error keeps alive is shown as saved, whatever its kind.
            path, kind = each.parameter, kind if kind in _OF_LAYER else SAVED
            held_for_it[kind] += each.nbytes
        else:
            continue
        devices[each.device] += each.nbytes
        root.add(path, kind, each.nbytes)
    if not devices:
        raise GpuError(f"{name} holds nothing on a GPU")
    most = devices.most_common(1)[0][0]
    return MemoryTree(
        name=name,
        devices=tuple(sorted(devices)),
        branches=tuple(_branches(root, is_module(value))),
        held_for_it=dict(held_for_it),
        made=allocator.made_in(most, addresses.get(most, ())) if allocator is not None else None,
        # A root may be a part of this variable, such as `Out[5]`.
        aliases=tuple(root for root in aliases if first_name(root) != first),
    )


def _add_layers(node: _Node, module: Any) -> None:
    """Add the named children of a module, in their order."""
    for name, child in own(module)["_modules"].items():
        if child is not None:
            _add_layers(node.at([module_step(name)]), child)


def _branches(
    node: _Node, ordered: bool, depth: int = 0, alike: int = 1, times: int = 1
) -> Iterator[MemoryBranch]:
    """Yield a node and its descendants: in given order if `ordered`, else the largest first."""
    nbytes = {kind: times * count for kind, count in node.sum().items()}
    yield MemoryBranch(node.path, node.step.lstrip(".: "), depth, nbytes, alike)
    below = [child for child in node.below.values() if child.sum()]
    if not ordered:
        below.sort(key=lambda child: (-child.sum().total(), len(child.path), child.path))
    for _, group in groupby(below, key=_Node.shape):
        first, *others = group
        count = 1 + len(others)
        yield from _branches(first, ordered, depth + 1, count, times * count)


# The order of the columns, and their heads.
_HEADS = {each: f"{each}s" for each in ("parameter", "buffer", "gradient")}
_HEADS |= {STATE: "optimizer", SAVED: "saved"}
_WHO = {STATE: "optimizers", SAVED: "autograd"}
_LEVELS, _ROWS = 2, 40  # levels below the name, and rows, that are shown unfolded
_FOLD = Fold(_ROWS)
_UNFOLDED = Fold(400)


def text(tree: MemoryTree) -> str:
    """Return the total, and below it two levels of layers or items."""
    rows = [branch for branch in tree.branches if branch.depth <= _LEVELS]
    lines = [*table.wrapped(_head(tree)), *table.lines(_columns(rows), margin="  ", fold=_FOLD)]
    if len(rows) < len(tree.branches):
        # The branch before the first hidden one has hidden descendants.
        hidden = next(n for n, each in enumerate(tree.branches) if each.depth > _LEVELS)
        lines.append(f"  {as_typed('%gpumem')} {tree.branches[hidden - 1].path} opens more")
    return "\n".join(lines)


def html(tree: MemoryTree) -> str:
    """Return the same as an HTML table; deeper levels are folded."""
    rows = [branch for branch in tree.branches if branch.depth <= _LEVELS]
    found = tag("div", _head(tree)) + table.html(_columns(rows), css="gm-titled", fold=_FOLD)
    if len(rows) < len(tree.branches) or len(rows) > _ROWS:
        every = table.html(_columns(tree.branches), fold=_UNFOLDED)
        found += folded(f"all {len(tree.branches):,} rows", every)
    return block(found)


def _head(tree: MemoryTree) -> str:
    """Return ``"net: 6.4 MiB on cuda:0 · optimizers hold 12.9 MiB more for it · made in …"``."""
    whos = [who for kind, who in _WHO.items() if kind in tree.held_for_it]
    left = sum(tree.held_for_it.values())
    words = f"{tree.name}: {size(tree.branches[0].total - left)} on {', '.join(tree.devices)}"
    hold = "holds" if whos == ["autograd"] else "hold"
    words += f" · {' and '.join(whos)} {hold} {size(left)} more for it" if whos else ""
    words += f" · made in {tree.made}" if tree.made else ""
    return words + (f" · also held by {some(tree.aliases)}" if tree.aliases else "")


def _columns(rows: Sequence[MemoryBranch]) -> list[Column]:
    found = dict.fromkeys(kind for row in rows for kind in row.nbytes)
    kinds = [*dict.fromkeys((*(kind for kind in _HEADS if kind in found), *found))]
    alike = [f" and {row.alike - 1:,} alike" if row.alike > 1 else "" for row in rows]
    labels = [f"{table.GLUE * 2 * row.depth}{row.label}" for row in rows]
    columns = [Column("", [*map(add, labels, alike)], fit="cut", css="gm-code")]
    for kind in kinds:
        cells = [size(row.nbytes[kind]) if row.nbytes.get(kind) else "" for row in rows]
        columns.append(Column(_HEADS.get(kind, f"{kind}s"), cells, number=True))
    if len(kinds) > 1:
        columns.append(Column("together", [size(row.total) for row in rows], number=True))
    return columns
