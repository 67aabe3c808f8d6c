"""Open what one name holds: the layers of a module, the items of anything else.

A layer's row includes what optimizers keep for its parameters and what autograd saved of its
outputs, although other objects hold those.
"""

import ast
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gpumagic.device import cuda_state
from gpumagic.display import table
from gpumagic.display.table import Column, Fold, Shown, block, folded, tag
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError, as_typed
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.holders_by_name import allocations
from gpumagic.memory.memory_report import SAVED, STATE, Made
from gpumagic.memory.object_graph import Root
from gpumagic.memory.references import GRAPH
from gpumagic.usercode.values import is_module, torch_here

_OWN = {"parameter", "buffer", "gradient", STATE, SAVED}
"""Kinds shown as columns of their module; all others get a row."""
_STEP = r"\.\w+|\[(?:'[^']*'|\"[^\"]*\"|[^\]'\"])*\]"
_NAMED = re.compile(rf"[^\W\d]\w*(?:{_STEP})*")
_PRIVATE = re.compile(r"\._\w+$")
_PARTS = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|[\[\]]|[.:]?[^.:\[\]'\"]+|.")


@dataclass(frozen=True)
class MemoryBranch:
    """Record a layer, or an item, with everything below it.

    Attributes
    ----------
    path : str
        What to type: ``"net.encoder[0]"``.
    depth : int
        0 for the whole.
    nbytes : dict of str to int
        Bytes by kind, without the storages that are counted elsewhere in the tree.
    alike : int
        How many adjacent branches are alike; this one counts them all.
    """

    path: str
    depth: int
    nbytes: dict[str, int]
    alike: int = 1

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, repr=False)
class MemoryTree(Shown):
    """Record what one name holds on GPUs.

    Attributes
    ----------
    name : str
    devices : tuple of str
    branches : tuple of MemoryBranch
        Each before those below it.
    held_for_it : dict of str to int
        The bytes of these that others hold for it: an optimizer's state, what autograd saved.
    made : Made or None
        Where most of it was made.
    aliases : tuple of str
        Who else holds some of it.
    """

    name: str
    devices: tuple[str, ...]
    branches: tuple[MemoryBranch, ...]
    held_for_it: dict[str, int] = field(default_factory=dict)
    made: Made | None = None
    aliases: tuple[str, ...] = ()


@dataclass
class _Node:
    path: str
    own: Counter[str] = field(default_factory=Counter)
    below: dict[str, "_Node"] = field(default_factory=dict)

    def at(self, steps: Iterable[str]) -> "_Node":
        node = self
        for step in steps:
            node = node.below.setdefault(step, _Node(node.path + step))
        return node

    def sum(self) -> Counter[str]:
        return sum((node.sum() for node in self.below.values()), self.own.copy())

    def shape(self) -> tuple[Any, ...]:
        """Equal for layers that are alike."""
        return tuple(sorted(self.own.items())), tuple(n.shape() for n in self.below.values())


def tree(name: str, namespace: Mapping[str, Any]) -> MemoryTree:
    """Return what a name, which may have attributes and items, holds on GPUs.

    Raises
    ------
    GpuError
        There is no such variable, or nothing on a GPU in it; CUDA is dead.
    """
    cuda_state.check()
    value, name = _value(name, namespace), ast.unparse(ast.parse(name))
    first = first_name(name)
    # Walked before everything else, so that what is reached from it has a path from it.
    start = [Root(name, value, holder=first)]
    allocator, made_in = allocations()
    root, devices, held_for_it = _Node(name), dict[str, None](), Counter[str]()
    made, aliases = Counter[Made | None](), dict[str, None]()
    rows: list[tuple[FoundStorage, str, str]] = []
    for storage in find(namespace, before=start, allocator=allocator, paths=True):
        inside, kind = _is_within(name, storage.path), storage.ways[0].kind
        if inside:
            where = storage.device, storage.address
            made[made_in.of(*where) if made_in is not None else None] += storage.nbytes
            roots = (way.root for way in storage.ways)
            # Outputs are roots by their numbers.
            aliases |= {root: None for root in roots if first_name(root) != first}
        elif _is_within(name, storage.parameter):
            # What an output or an error keeps is shown as saved, whatever its own kind is.
            kind = kind if kind in _OWN else SAVED
            held_for_it[kind] += storage.nbytes
        else:
            continue
        devices[storage.device] = None
        with_layer = not inside or (kind == STATE and _is_in_module(name, storage.parameter))
        rows.append((storage, storage.parameter if with_layer else storage.path, kind))
    if not devices:
        raise GpuError(f"{name} holds nothing on a GPU")
    if is_module(value):
        for path in _in_order(value, [row[0] for row in rows]):
            root.at(_steps(name, path, "parameter"))
    for storage, path, kind in rows:
        root.at(_steps(name, path, kind)).own[kind] += storage.nbytes
    return MemoryTree(
        name=name,
        devices=tuple(sorted(devices)),
        branches=tuple(_branches(root, is_module(value))),
        held_for_it=dict(held_for_it),
        made=made.most_common(1)[0][0] if made else None,
        aliases=tuple(aliases),
    )


def first_name(name: str) -> str:
    """The variable that a name begins with: ``"data"`` of ``"data['x'][0]"``."""
    return re.split(r"[.\[]", name, maxsplit=1)[0]


def _steps(name: str, path: str, kind: str) -> list[str]:
    """Return the steps from the root to the branch whose row has a storage."""
    steps = split_steps(path[len(name) :])
    if kind == "gradient" and steps[-1:] == [".grad"]:
        del steps[-1:]
    return steps[:-1] if kind in _OWN else steps


def split_steps(path: str) -> list[str]:
    """Split a path after its variable: ``[".state", "[net[0].weight]", "['exp_avg']"]``."""
    found: list[str] = []
    depth = 0
    for part in _PARTS.findall(path):
        if depth or not (part.startswith((".", "[", ":")) or not found):
            found[-1] += part
        else:
            found.append(part)
        depth += (part == "[") - (part == "]")
    return found


def _value(name: str, namespace: Mapping[str, Any]) -> Any:
    if not _NAMED.fullmatch(name):
        raise GpuError(f"{name} is neither a variable nor a part of one, such as net or data[0]")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return eval(name, {}, namespace)
    except Exception as error:  # noqa: BLE001  it is the user's code that runs
        raise GpuError(f"{name} raises {type(error).__name__}: {error}") from None


def _is_within(name: str, path: str) -> bool:
    return path == name or path.startswith(tuple(name + sign for sign in ".[:,"))


def _is_in_module(name: str, parameter: str) -> bool:
    """Whether a parameter is inside, and not reached through an optimizer or a graph alone."""
    indirect = any(step in parameter for step in (".param_groups[", ".<key>", GRAPH))
    return _is_within(name, parameter) and not indirect


def _in_order(module: Any, found: Iterable[FoundStorage]) -> Iterator[str]:
    """Return the paths of a module's parameters, in the module's order."""
    paths = {(each.device, each.address): each.path for each in found}
    # Torch's own method: a module may have another one of this name.
    for p in torch_here().nn.Module.parameters(module):
        path = paths.get((str(p.device), p.untyped_storage().data_ptr()))
        if path is not None:
            yield path


def _branches(
    node: _Node, ordered: bool, depth: int = 0, alike: int = 1, times: int = 1
) -> Iterator[MemoryBranch]:
    """Yield a node and its descendants: in given order if `ordered`, else the largest first."""
    nbytes = {kind: times * count for kind, count in node.sum().items()}
    yield MemoryBranch(node.path, depth, nbytes, alike)
    below = [*node.below.values()]
    while len(below) == 1 and not node.own and _PRIVATE.search(below[0].path):
        node = below[0]  # all is in a private attribute: a variable of Flax NNX, or of Keras
        below = [*node.below.values()]
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
# The levels below the name that are shown at once, and the rows.
_LEVELS, _ROWS = 2, 40
_FOLD = Fold(_ROWS)
_UNFOLDED = Fold(400)


def text(tree: MemoryTree) -> str:
    """The whole, and below it two levels of its layers or items."""
    rows = _shallow(tree)
    lines = [*table.wrapped(_head(tree)), *table.lines(_columns(rows), margin="  ", fold=_FOLD)]
    if len(rows) < len(tree.branches):
        lines.append(f"  {as_typed('%gpumem')} {_with_more(tree)} opens more")
    return "\n".join(lines)


def html(tree: MemoryTree) -> str:
    """The same as a table; what is deeper is behind a fold."""
    rows = _shallow(tree)
    parts = [
        tag("div", _head(tree)),
        table.html(_columns(rows, html=True), css="gm-titled", fold=_FOLD),
    ]
    if len(rows) < len(tree.branches) or len(rows) > _ROWS:
        every = table.html(_columns(tree.branches, html=True), fold=_UNFOLDED)
        parts.append(folded(f"all {len(tree.branches):,} rows", every))
    return block("".join(parts))


def _head(tree: MemoryTree) -> str:
    """``"net: 6.4 MiB on cuda:0 · optimizers hold 12.9 MiB more for it · made in …"``."""
    whos = [who for kind, who in _WHO.items() if kind in tree.held_for_it]
    left = sum(tree.held_for_it.values())
    words = f"{tree.name}: {size(tree.branches[0].total - left)} on {', '.join(tree.devices)}"
    hold = "holds" if whos == ["autograd"] else "hold"
    words += f" · {' and '.join(whos)} {hold} {size(left)} more for it" if whos else ""
    words += f" · made in {tree.made}" if tree.made else ""
    return words + (f" · also held by {some(tree.aliases)}" if tree.aliases else "")


def _shallow(tree: MemoryTree) -> list[MemoryBranch]:
    return [branch for branch in tree.branches if branch.depth <= _LEVELS]


def _with_more(tree: MemoryTree) -> str:
    """Return the path of the first branch that has more below it than is shown."""
    hidden = next(n for n, branch in enumerate(tree.branches) if branch.depth > _LEVELS)
    return tree.branches[hidden - 1].path


def _columns(rows: Sequence[MemoryBranch], *, html: bool = False) -> list[Column]:
    kinds = dict.fromkeys(kind for row in rows for kind in row.nbytes)
    known = [kind for kind in _HEADS if kind in kinds]
    others = [kind for kind in kinds if kind not in _HEADS]
    names = [_name(row) for row in rows]
    indented = [f"<span style='padding-left:{1.2 * row.depth:g}em'>" for row in rows]
    columns = [
        Column(
            "",
            [table.GLUE * 2 * row.depth + name for row, name in zip(rows, names, strict=True)],
            fit="cut",
            css="gm-code",
            html=[
                f"{start}{tag('span', name, title=row.path)}</span>"
                for start, name, row in zip(indented, names, rows, strict=True)
            ],
        )
    ]
    shown = [*known, *others]
    columns += [
        Column(_HEADS.get(kind, f"{kind}s"), [_bytes(row, kind) for row in rows], number=True)
        for kind in shown
    ]
    if len(shown) > 1:
        columns.append(Column("together", [size(row.total) for row in rows], number=True))
    return columns


def _name(row: MemoryBranch) -> str:
    """Return a branch's label: the root's path or the last step, and how many are alike."""
    step = row.path if row.depth == 0 else _last_step(row.path)
    return f"{step} and {row.alike - 1:,} alike" if row.alike > 1 else step


def _last_step(path: str) -> str:
    return split_steps(path)[-1].lstrip(".:, ")


def _bytes(row: MemoryBranch, kind: str) -> str:
    return size(row.nbytes[kind]) if row.nbytes.get(kind) else ""
