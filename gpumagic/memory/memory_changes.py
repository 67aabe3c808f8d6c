"""Compare two memory reports by name, and show what grew, shrank, came and went."""

from dataclasses import dataclass

from gpumagic.display import table
from gpumagic.display.table import Column, Fold, Shown, block, tag
from gpumagic.display.units import size
from gpumagic.memory.memory_report import MemoryHolder, MemoryReport


@dataclass(frozen=True)
class MemoryChange:
    """Record a holder whose bytes on a GPU changed.

    Attributes
    ----------
    holder : MemoryHolder
        As it is now; as it was, where it has gone.
    before, after : int
        Bytes; 0 before for what is new, and after for what has gone.
    """

    holder: MemoryHolder
    before: int
    after: int

    @property
    def word(self) -> str:
        """``"new"``, ``"gone"``, ``"grew"`` or ``"shrank"``."""
        if not self.before or not self.after:
            return "gone" if self.before else "new"
        return "grew" if self.after > self.before else "shrank"


@dataclass(frozen=True, repr=False)
class MemoryChanges(Shown):
    """Record what changed from one report to another.

    Attributes
    ----------
    allocated : tuple of (str, int, int)
        Of each GPU the bytes allocated, before and after.
    changes : tuple of MemoryChange
        The largest first.
    unchanged : int
        How many holders hold what they held.
    """

    allocated: tuple[tuple[str, int, int], ...]
    changes: tuple[MemoryChange, ...]
    unchanged: int


def changes(before: MemoryReport, after: MemoryReport) -> MemoryChanges:
    """Compare two reports, by any of the names that a holder has."""
    gone = {(h.device, h.path): h for h in before.holders}
    # A name may go while what it held stays under another one.
    known = {(h.device, name): h for h in before.holders for name in h.aliases} | gone
    found, unchanged = [], 0
    for holder in after.holders:
        names = ((holder.device, name) for name in (holder.path, *holder.aliases))
        was = next((known[name] for name in names if name in known), None)
        if was is None or gone.pop((was.device, was.path), None) is None:
            found.append(MemoryChange(holder, 0, holder.nbytes))
        elif was.nbytes != holder.nbytes:
            found.append(MemoryChange(holder, was.nbytes, holder.nbytes))
        else:
            unchanged += 1
    found += [MemoryChange(holder, holder.nbytes, 0) for holder in gone.values()]
    found.sort(key=lambda change: -abs(change.after - change.before))
    held = {device.device: [device.allocated or 0, 0] for device in before.devices}
    for device in after.devices:
        held.setdefault(device.device, [0, 0])[1] = device.allocated or 0
    allocated = tuple((name, old, new) for name, (old, new) in held.items())
    return MemoryChanges(allocated, tuple(found), unchanged)


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
