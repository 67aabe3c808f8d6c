"""Tell what changed between two memory reports, and notice a cell that leaves more each time.

After each cell one number per GPU is read. Reports are made only after a cell has left more twice
in a row, and again at the third time: the holder that grew between them is named, once.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from gpumagic.display import table
from gpumagic.display.table import Column, Fold, Shown, block, tag
from gpumagic.display.units import size
from gpumagic.memory.holders_by_name import memory
from gpumagic.memory.memory_report import OUTPUT, SAVED, MemoryHolder, MemoryReport
from gpumagic.usercode.values import torch_here


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
    found = []
    for holder in after.holders:
        names = ((holder.device, name) for name in (holder.path, *holder.aliases))
        was = next((known[name] for name in names if name in known), None)
        if was is not None:
            was = gone.pop((was.device, was.path), None)  # matched once
        found.append(MemoryChange(holder, was.nbytes if was else 0, holder.nbytes))
    found += [MemoryChange(holder, holder.nbytes, 0) for holder in gone.values()]
    changed = [each for each in found if each.before != each.after]
    changed.sort(key=lambda each: -abs(each.after - each.before))
    old, new = ({d.device: d.allocated or 0 for d in report.devices} for report in (before, after))
    allocated = ((name, old.get(name, 0), new.get(name, 0)) for name in old | new)
    return MemoryChanges(tuple(allocated), tuple(changed), len(found) - len(changed))


# -- what grows with each run of a cell
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
    before: Counter[str] | None = None  # bytes by holder before the last run
    done: bool = False


class GrowthWatch:
    """Watch the cells of one notebook."""

    def __init__(self) -> None:
        self._cells: dict[int, _Runs] = {}
        self._told: set[str] = set()

    def ended(self, cell: str) -> Grown | None:
        """Note that a cell has ended; return what grows, if it is time to report it."""
        now = _allocated()
        runs = self._cells.setdefault(hash(cell), _Runs(now))
        more, runs.allocated = now - runs.allocated, now
        runs.grew = runs.grew + 1 if more >= LEAST else 0
        if runs.done or runs.grew < TIMES - 1:
            return None
        report = memory()
        if runs.grew < TIMES or runs.before is None:
            runs.before = _by_name(report.holders)
            return None
        runs.done = True
        grown = _grown(runs.before, report, more)
        if grown is None or grown.name in self._told:
            return None
        self._told.add(grown.name)
        return grown


def _allocated() -> int:
    """Return the bytes allocated on all GPUs, by the counters alone."""
    cuda = torch_here().cuda
    every = map(cuda.memory_stats_as_nested_dict, range(cuda.device_count()))
    return sum(stats["allocated_bytes"]["all"]["current"] for stats in every if stats)


def _name(holder: MemoryHolder) -> str:
    return "Out" if holder.kind == OUTPUT else holder.path


def _by_name(holders: Iterable[MemoryHolder]) -> Counter[str]:
    """Return the bytes of each holder on all GPUs; all outputs are one holder."""
    found = Counter[str]()
    for holder in holders:
        found[_name(holder)] += holder.nbytes
    return found


def _grown(before: Counter[str], report: MemoryReport, more: int) -> Grown | None:
    """Return the holder that most of the new bytes went to; None if there is no such holder."""
    added = _by_name(report.holders)
    added.subtract(before)
    ((name, nbytes),) = added.most_common(1) or [("", 0)]
    if 2 * nbytes < more or not nbytes:
        return None
    held = next(holder for holder in report.holders if _name(holder) == name)
    made = held.made.place if held.made else ""
    return Grown(name, more, made, graph=held.kind == SAVED)


# -- the view of two reports
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
    rows, holders = found.changes, [row.holder for row in found.changes]
    devices = [holder.device for holder in holders]
    columns = [
        Column("holder", [holder.path for holder in holders], fit="cut", css="gm-code gm-name"),
        Column("on", devices if len(set(devices)) > 1 else [""] * len(rows)),
        Column("", [row.word for row in rows]),
        Column("change", [difference(row.after - row.before) for row in rows], number=True),
        Column("before", [size(row.before) if row.before else "" for row in rows], number=True),
        Column("now", [size(row.after) if row.after else "" for row in rows], number=True),
        Column("kind", [holder.kind for holder in holders]),
        Column("made in", [str(holder.made or "") for holder in holders]),
    ]
    return [column for column in columns if any(column.cells)]
