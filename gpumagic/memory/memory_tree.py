"""Show the GPU memory of one variable, for each layer of a module or each item of a container.

A layer's row includes the optimizer state of the layer's parameters, and the tensors that autograd
saved for the layer. Optimizers and autograd graphs hold this memory, not the layer.
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
"""Kinds of tensors that a module's row shows in columns. A tensor of another kind gets a row."""


@dataclass(frozen=True)
class MemoryBranch:
    """Record the memory of a layer or an item, including everything inside."""

    path: str  # Python expression: "net.encoder[0]"
    label: str  # last step of the path: "encoder", "[0]"
    depth: int  # 0 for the variable
    nbytes: dict[str, int]  # bytes by kind, such as "parameter"
    alike: int = 1  # number of adjacent equal branches that share this row

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())


@dataclass(frozen=True, repr=False)
class MemoryTree(Shown):
    """Record the GPU memory of one variable, by part."""

    name: str
    devices: tuple[str, ...]
    branches: tuple[MemoryBranch, ...]  # parents before their children
    held_for_it: dict[str, int] = field(default_factory=dict)  # bytes by kind in other holders
    made: Made | None = None  # where most bytes were allocated
    aliases: tuple[str, ...] = ()  # other variables and objects that hold part of this memory


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
        """Add the bytes of a storage to the row of its layer, or to a separate row."""
        first, *steps = path
        if rest := first.removeprefix(self.path):  # ".table" if `first` is "utils.table"
            steps.insert(0, rest)
        self.at(steps[:-1] if kind in _OF_LAYER else steps).held[kind] += nbytes

    def sum(self) -> Counter[str]:
        return sum((node.sum() for node in self.below.values()), self.held.copy())

    def shape(self) -> tuple[Any, ...]:
        """Return a key that is equal for subtrees with equal memory."""
        return tuple(sorted(self.held.items())), tuple(n.shape() for n in self.below.values())


def tree(name: str, namespace: Mapping[str, Any]) -> MemoryTree:
    """Return the GPU memory of a variable or part (``net.encoder[0]``); GpuError if it has none."""
    cuda_state.check()
    value, first, allocator = value_of(name, namespace), first_name(name), allocations()
    # Visit this value first, so that the paths to all its parts begin with `name`.
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
            # A kind such as "output" has no column in a layer's row, so its bytes count as saved.
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
        # A part of the variable is not an alias. For example, `Out[5]` is a part of `Out`.
        aliases=tuple(root for root in aliases if first_name(root) != first),
    )


def _add_layers(node: _Node, module: Any) -> None:
    for name, child in own(module)["_modules"].items():
        if child is not None:
            _add_layers(node.at([module_step(name)]), child)


def _branches(
    node: _Node, ordered: bool, depth: int = 0, alike: int = 1, times: int = 1
) -> Iterator[MemoryBranch]:
    """Yield a row for a node and its descendants, siblings largest first unless `ordered`.
    Equal siblings share a row: `alike` is their number, `times` their number in the whole tree."""
    nbytes = {kind: times * count for kind, count in node.sum().items()}
    yield MemoryBranch(node.path, node.step.lstrip(".: "), depth, nbytes, alike)
    below = [child for child in node.below.values() if child.sum()]
    if not ordered:
        below.sort(key=lambda child: (-child.sum().total(), len(child.path), child.path))
    for _, group in groupby(below, key=_Node.shape):
        same = [*group]
        yield from _branches(same[0], ordered, depth + 1, len(same), times * len(same))


_HEADS = {each: f"{each}s" for each in ("parameter", "buffer", "gradient")}
_HEADS |= {STATE: "optimizer", SAVED: "saved"}
_WHO = {STATE: "optimizers", SAVED: "autograd"}
_LEVELS, _ROWS = 2, 40  # maximum depth and number of rows before unfolding
_FOLD = Fold(_ROWS)


def text(tree: MemoryTree) -> str:
    rows = [branch for branch in tree.branches if branch.depth <= _LEVELS]
    lines = [*table.wrapped(_head(tree)), *table.lines(_columns(rows), margin="  ", fold=_FOLD)]
    if len(rows) < len(tree.branches):
        hidden = next(n for n, each in enumerate(tree.branches) if each.depth > _LEVELS)
        lines.append(f"  {as_typed('%gpumem')} {tree.branches[hidden - 1].path} shows more")
    return "\n".join(lines)


def html(tree: MemoryTree) -> str:
    rows = [branch for branch in tree.branches if branch.depth <= _LEVELS]
    found = tag("div", _head(tree)) + table.html(_columns(rows), css="gm-titled", fold=_FOLD)
    if len(rows) < len(tree.branches) or len(rows) > _ROWS:
        every = table.html(_columns(tree.branches), fold=Fold(400))
        found += folded(f"all {len(tree.branches):,} rows", every)
    return block(found)


def _head(tree: MemoryTree) -> str:
    """Return the heading: ``"net: 6.4 MiB on cuda:0 · optimizers hold 12.9 MiB more for it"``."""
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
