"""Show a tree of what one name holds: a row for each layer, and a column for each kind of bytes."""

from collections.abc import Sequence

from gpumagic.display import table
from gpumagic.display.table import Column, Fold, block, folded, tag
from gpumagic.display.units import size, some
from gpumagic.memory.memory_report import SAVED, STATE
from gpumagic.memory.memory_tree import MemoryBranch, MemoryTree, split_steps

# The order of the columns, and their heads.
_HEADS = {each: f"{each}s" for each in ("parameter", "buffer", "gradient")}
_HEADS |= {STATE: "optimizer", SAVED: "saved"}
_WHO = {STATE: "optimizers", SAVED: "autograd"}
# Rows that are shown at once: as deep as they fit.
_ROWS = 40
_FOLD = Fold(_ROWS)
_UNFOLDED = Fold(400)


def text(tree: MemoryTree) -> str:
    """The whole, and below it its layers or items."""
    head = table.wrapped(_head(tree))
    return "\n".join([*head, *table.lines(_columns(_shallow(tree)), margin="  ", fold=_FOLD)])


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
    whos = [who for kind, who in _WHO.items() if kind in tree.beside]
    left = sum(tree.beside.values())
    words = f"{tree.name}: {size(tree.branches[0].total - left)} on {', '.join(tree.devices)}"
    hold = "holds" if whos == ["autograd"] else "hold"
    words += f" · {' and '.join(whos)} {hold} {size(left)} more for it" if whos else ""
    words += f" · made in {tree.made}" if tree.made else ""
    return words + (f" · also held by {some(tree.aliases)}" if tree.aliases else "")


def _shallow(tree: MemoryTree) -> Sequence[MemoryBranch]:
    """The branches down to where they are too many."""
    deepest = max(branch.depth for branch in tree.branches)
    kept: Sequence[MemoryBranch] = tree.branches
    for depth in range(deepest, 0, -1):
        kept = [branch for branch in tree.branches if branch.depth <= depth]
        if len(kept) <= _ROWS:
            break
    return kept


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
    """The whole path of the whole, the last step of what is below, and how many are alike."""
    step = row.path if row.depth == 0 else _last_step(row.path)
    return f"{step} and {row.alike - 1:,} alike" if row.alike > 1 else step


def _last_step(path: str) -> str:
    return split_steps(path)[-1].lstrip(".:, ")


def _bytes(row: MemoryBranch, kind: str) -> str:
    return size(row.nbytes[kind]) if row.nbytes.get(kind) else ""
