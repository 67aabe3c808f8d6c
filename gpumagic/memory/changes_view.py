"""Show what changed between two reports on memory: a line for each GPU, and the names."""

from gpumagic.display import table
from gpumagic.display.table import Column, Fold, block, tag
from gpumagic.display.units import size
from gpumagic.memory.memory_changes import MemoryChanges

_FOLD = Fold(12)


def text(found: MemoryChanges) -> str:
    """The GPUs, and below them who grew, came or went."""
    lines = [*_lines(found), *table.lines(_columns(found), margin="  ", fold=_FOLD)]
    return "\n".join([*lines, f"  {_unchanged(found)}"] if found.unchanged else lines)


def html(found: MemoryChanges) -> str:
    """The same as a table."""
    parts = [tag("div", line) for line in _lines(found)]
    if found.changes:
        parts.append(table.html(_columns(found), css="gm-titled gm-section", fold=_FOLD))
    if found.unchanged:
        parts.append(tag("div", _unchanged(found), "gm-note"))
    return block("".join(parts))


def _lines(found: MemoryChanges) -> list[str]:
    """``["cuda:0: +1.2 GiB since the last %gpumem (3.2 GiB → 4.4 GiB allocated)"]``."""
    lines = [
        f"{name}: {difference(after - before)} since the last %gpumem"
        f" ({size(before)} → {size(after)} allocated)"
        for name, before, after in found.allocated
        if before != after
    ]
    return lines or [
        f"as much is allocated{' in all' * bool(found.changes)} as at the last %gpumem"
    ]


def difference(nbytes: int) -> str:
    """``"+1.2 GiB"``, ``"−300 MiB"``."""
    return f"{'−' if nbytes < 0 else '+'}{size(abs(nbytes))}"


def _unchanged(found: MemoryChanges) -> str:
    return f"{found.unchanged:,} holder{'s hold' if found.unchanged > 1 else ' holds'} as much"


def _columns(found: MemoryChanges) -> list[Column]:
    rows = found.changes
    columns = [
        Column("holder", [row.holder.path for row in rows], fit="cut", css="gm-code gm-name"),
        Column("", [row.word for row in rows]),
        Column("change", [difference(row.after - row.before) for row in rows], number=True),
        Column("before", [size(row.before) if row.before else "" for row in rows], number=True),
        Column("now", [size(row.after) if row.after else "" for row in rows], number=True),
        Column("kind", [row.holder.kind for row in rows]),
        Column("made in", [str(row.holder.made or "") for row in rows]),
    ]
    if len({row.holder.device for row in rows}) > 1:
        columns.insert(1, Column("on", [row.holder.device for row in rows]))
    return [column for column in columns if any(column.cells)]
