"""Tell what changed between two memory reports, and notice a cell that leaves more each time.

After each cell one number per GPU is read. Reports are made only after a cell has left more twice
in a row, and again at the third time: the holder that grew between them is named, once.
"""

from collections import Counter
from dataclasses import dataclass

from gpumagic.display import table
from gpumagic.display.table import Column, Fold, Shown, block, tag
from gpumagic.display.units import size
from gpumagic.memory.holders_by_name import memory
from gpumagic.memory.memory_report import OUTPUT, SAVED, MemoryHolder, MemoryReport
from gpumagic.usercode.values import torch_here


@dataclass(frozen=True)
class MemoryChange:
    """Record a holder whose bytes on a GPU changed."""

    holder: MemoryHolder  # as it is now; as it was, if it has gone
    before: int  # 0 for what is new
    after: int  # 0 for what has gone


@dataclass(frozen=True, repr=False)
class MemoryChanges(Shown):
    """Record what changed from one report to another."""

    allocated: tuple[tuple[str, int, int], ...]  # of each GPU the bytes, before and after
    changes: tuple[MemoryChange, ...]  # the largest first
    unchanged: int  # how many holders hold what they held


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


@dataclass
class _Runs:
    """Count how often a cell left more; and the bytes allocated at the end of its last run."""

    allocated: int
    grew: int = 0
    before: MemoryReport | None = None  # before the last run
    done: bool = False


class GrowthWatch:
    """Watch the cells of one notebook."""

    def __init__(self) -> None:
        self._cells: dict[int, _Runs] = {}
        self._told: set[str] = set()

    def ended(self, cell: str) -> str:
        """Note that a cell has ended; return what grows, if it is time to say it, else nothing."""
        now = _allocated()
        runs = self._cells.setdefault(hash(cell), _Runs(now))
        more, runs.allocated = now - runs.allocated, now
        runs.grew = runs.grew + 1 if more >= LEAST else 0
        if runs.done or runs.grew < TIMES - 1:
            return ""
        report = memory()
        if runs.grew < TIMES or runs.before is None:
            runs.before = report
            return ""
        runs.done = True
        name, holder = _grown(runs.before, report, more)
        if holder is None or name in self._told:
            return ""
        self._told.add(name)
        return _in_words(name, more, holder)


def _allocated() -> int:
    """Return the bytes allocated on all GPUs, by the counters alone."""
    cuda = torch_here().cuda
    every = map(cuda.memory_stats_as_nested_dict, range(cuda.device_count()))
    return sum(stats["allocated_bytes"]["all"]["current"] for stats in every if stats)


def _grown(before: MemoryReport, after: MemoryReport, more: int) -> tuple[str, MemoryHolder | None]:
    """Return the holder that most of the new bytes went to, and its name."""
    added, holders = Counter[str](), dict[str, MemoryHolder]()
    for each in changes(before, after).changes:
        name = "Out" if each.holder.kind == OUTPUT else each.holder.path  # all outputs are one
        added[name] += each.after - each.before
        holders.setdefault(name, each.holder)
    name = max(added, key=lambda name: added[name], default="")
    return name, holders.get(name) if 2 * added[name] >= more else None


def _in_words(name: str, nbytes: int, holder: MemoryHolder) -> str:
    """Return what grows, the line that made it, and what to do."""
    graph = holder.kind == SAVED  # the graph of a computation keeps most of it
    says = f"`{name}` grows by {size(nbytes)} a run{' with its graph' * graph}"
    if name == "Out":
        return (
            f"{says}: it keeps the value of the cell's last line; end that line with a "
            "semicolon, and `%gpufree` gives back what it has kept"
        )
    says += f", made in {holder.made.place}" if holder.made else ""
    if graph:
        return f"{says}; `.detach()` of it (`.item()` of a number) keeps the numbers alone"
    return f"{says}; `del {name}` gives it back, `.cpu()` of a tensor keeps it elsewhere"


# -- the view of two reports
_FOLD = Fold(12)


def text(found: MemoryChanges) -> str:
    """The GPUs, and below them who grew, came or went."""
    rows = table.lines(_columns(found), margin="  ", fold=_FOLD)
    return "\n".join([*_lines(found), *rows, f"  {_unchanged(found)}"])


def html(found: MemoryChanges) -> str:
    """The same as a table."""
    lines = "".join(tag("div", line) for line in _lines(found))
    rows = table.html(_columns(found), css="gm-titled gm-section", fold=_FOLD)
    return block(lines + rows * bool(found.changes) + tag("div", _unchanged(found), "gm-note"))


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
    return f"{found.unchanged:,} holder{' holds' if found.unchanged == 1 else 's hold'} as much"


def _columns(found: MemoryChanges) -> list[Column]:
    rows, holders = found.changes, [row.holder for row in found.changes]
    devices = [holder.device for holder in holders]
    columns = [
        Column("holder", [holder.path for holder in holders], fit="cut", css="gm-code gm-name"),
        Column("on", devices if len(set(devices)) > 1 else [""] * len(rows)),
        Column("change", [difference(row.after - row.before) for row in rows], number=True),
        Column("before", [_size(row.before) for row in rows], number=True),
        Column("now", [_size(row.after) for row in rows], number=True),
        Column("kind", [holder.kind for holder in holders]),
        Column("made in", [str(holder.made or "") for holder in holders]),
    ]
    return [column for column in columns if any(column.cells)]


def _size(nbytes: int) -> str:
    return size(nbytes) if nbytes else ""
