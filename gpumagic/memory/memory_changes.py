"""Compare two memory reports, which list the holders (variables, outputs, …) of GPU memory."""

from dataclasses import dataclass

from gpumagic.display import table
from gpumagic.display.table import Column, Fold, Shown, block, tag
from gpumagic.display.units import many, size
from gpumagic.memory.memory_report import MemoryHolder, MemoryReport


@dataclass(frozen=True)
class MemoryChange:
    """Record a holder whose bytes on a GPU changed."""

    holder: MemoryHolder  # from the later report; if gone, from the earlier report
    before: int  # 0 if the holder is new
    after: int  # 0 if the holder is gone
    kind: str  # the kind whose bytes changed most


@dataclass(frozen=True, repr=False)
class MemoryChanges(Shown):
    """Record the differences between two reports."""

    allocated: tuple[tuple[str, int, int], ...]  # GPU, bytes before, bytes after
    changes: tuple[MemoryChange, ...]  # the largest first
    unchanged: int  # number of holders whose bytes did not change


def changes(before: MemoryReport, after: MemoryReport) -> MemoryChanges:
    """Compare two reports; match their holders by path or by any alias."""
    found = _matched(before, after)
    changed = [each for each in found if each.before != each.after]
    changed.sort(key=lambda each: -abs(each.after - each.before))
    old, new = ({d.device: d.allocated or 0 for d in report.devices} for report in (before, after))
    allocated = tuple((name, old.get(name, 0), new.get(name, 0)) for name in old | new)
    return MemoryChanges(allocated, tuple(changed), len(found) - len(changed))


def _matched(before: MemoryReport, after: MemoryReport) -> list[MemoryChange]:
    """Return each holder of either report with its bytes in both."""
    found, gone = list[MemoryChange](), {(h.device, h.path): h for h in before.holders}
    # A deleted name's value may still be reachable under another name.
    alias = {(h.device, name): (h.device, h.path) for h in before.holders for name in h.aliases}
    # Match equal paths first; otherwise an alias could match the wrong holder.
    for holder in sorted(after.holders, key=lambda h: (h.device, h.path) not in gone):
        names = [(holder.device, name) for name in (holder.path, *holder.aliases)]
        earlier = [*names, *map(alias.get, names)]
        was = next((gone.pop(key) for key in earlier if key in gone), None)
        old, new = dict(was.kinds if was else ()), dict(holder.kinds)
        kind = max(new | old, key=lambda k: abs(new.get(k, 0) - old.get(k, 0)), default="")
        found.append(MemoryChange(holder, was.nbytes if was else 0, holder.nbytes, kind))
    return found + [MemoryChange(holder, holder.nbytes, 0, holder.kind) for holder in gone.values()]


_FOLD = Fold(12)


def text(found: MemoryChanges) -> str:
    rows = table.lines(_columns(found), margin="  ", fold=_FOLD)
    same = [f"  {_unchanged(found)}"] * bool(found.unchanged)
    return "\n".join([*_lines(found), *rows, *same])


def html(found: MemoryChanges) -> str:
    lines = "".join(tag("div", line) for line in _lines(found))
    rows = table.html(_columns(found), css="gm-titled gm-section", fold=_FOLD)
    same = tag("div", _unchanged(found), "gm-note") * bool(found.unchanged)
    return block(lines + rows * bool(found.changes) + same)


def _unchanged(found: MemoryChanges) -> str:
    return f"{many(found.unchanged, 'holder')} unchanged"


def _lines(found: MemoryChanges) -> list[str]:
    """Return a line for each changed GPU: ``"cuda:0: +1.2 GiB since the last %gpumem …"``."""
    lines = [
        f"{name}: {difference(after - before)} since the last %gpumem"
        f" ({size(before)} → {size(after)} allocated)"
        for name, before, after in found.allocated
        if before != after
    ]
    return lines or [f"{'the total is ' * bool(found.changes)}unchanged since the last %gpumem"]


def difference(nbytes: int) -> str:
    """Return a number of bytes with its sign: ``"+1.2 GiB"``, ``"−300 MiB"``."""
    return f"{'−' if nbytes < 0 else '+'}{size(abs(nbytes))}"


def _columns(found: MemoryChanges) -> list[Column]:
    rows, holders = found.changes, [row.holder for row in found.changes]
    devices = [holder.device for holder in holders]
    columns = [
        Column("holder", [holder.path for holder in holders], fit="cut", css="gm-code gm-name"),
        Column("on", devices if len(set(devices)) > 1 else [""] * len(rows)),
        Column("change", [difference(row.after - row.before) for row in rows], number=True),
        Column("before", [size(row.before) * (row.before > 0) for row in rows], number=True),
        Column("now", [size(row.after) * (row.after > 0) for row in rows], number=True),
        Column("kind", [row.kind for row in rows]),
        Column("made in", [str(holder.made or "") for holder in holders]),
    ]
    return [column for column in columns if any(column.cells)]
