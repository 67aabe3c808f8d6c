"""Show a cell's report: a line of text, or the same in HTML with its details folded beneath."""

from collections.abc import Iterable, Iterator
from html import escape

from gpumagic.cell.fixed import Fixed
from gpumagic.cell.report import Report
from gpumagic.display import table
from gpumagic.display.table import block, coded
from gpumagic.display.units import duration, size, some
from gpumagic.ledger import ledger_view
from gpumagic.moving.moved import Left, Moves

# The report says the first two by themselves; that a value is shown is no news.
_SAID = ("loader", "fix", "display")
_ITSELF = "the cell, or a library that it calls, names that device itself: name {} there"


def text(report: Report) -> str:
    """`cuda:1 (virtual) · 1.24 s · moved X, net: 1.2 MiB from cpu in 3.1 ms · peak 12.5 MiB`."""
    lines = [" · ".join(_parts(report)), *(f"  → {hint}" for hint in _hints(report))]
    below = [repr(report.peak)] if report.peak else []
    if report.table:
        below.insert(0, ledger_view.text(report.ledger))
    return "\n".join([*lines, *below])


def html(report: Report) -> str:
    """The line, and behind it each variable with its bytes and each device with its memory."""
    head, *rest = _parts(report)
    bad = " gm-bad" if report.error or report.fault or report.elsewhere else ""
    line = f'<b class="gm-where{bad}">{escape(head)}</b>' + "".join(
        f' <span class="gm-dim">·</span> {coded(part)}' for part in rest
    )
    details = _details(report)
    body = line
    if details:
        body = f"<details><summary>{line}</summary>{table.html(details)}</details>"
    body += "".join(f"<div>→ {coded(hint)}</div>" for hint in _hints(report))
    shown = block(body, "report", css="gpumagic gm-report")
    shown += ledger_view.html(report.ledger, with_line=False) if report.table else ""
    return shown + (report.peak._repr_html_() if report.peak else "")


def _hints(report: Report) -> list[str]:
    """What to do where it ran elsewhere; and about the ledger, if its table does not say it."""
    told = report.table or not report.ledger.entries
    itself = [_ITSELF.format(report.device.label)] if "cuda" in report.elsewhere else []
    return itself + ([] if told else ledger_view.hints(report.ledger))


def _parts(report: Report) -> list[str]:
    device = report.device
    where = f"asked for {device}; {report.elsewhere}" if report.elsewhere else str(device)
    where += " (virtual, at CPU speed)" if device.virtual and not report.elsewhere else ""
    where += f": {device.note}" if device.note else ""
    parts = [where, *_ran(report)]
    if report.moved:
        moved = str(Moves(report.moved, seconds=report.move_seconds))
        if report.returned is not None and report.returned.moved:
            moved += f", and back in {duration(report.returned.seconds)}"
        elif report.stays:
            moved += " for good (--back brings home)"
        parts.append(moved)
    if report.batches.count:
        count = f"{report.batches.count} batch{'es' * (report.batches.count > 1)}"
        parts.append(f"{count}: {size(report.batches.nbytes)} copied")
    parts += [_fixed(f) for f in report.fixed]
    if report.ledger.entries and (said := ledger_view.line(report.ledger, without=_SAID)):
        parts.append(said)
    if not report.ledger_complete:
        parts.append("its ledger is incomplete: %gpus --doctor shows why")
    if report.left:
        parts.append(f"left {'; '.join(_left(report.left))}")
    for memory in report.memory:
        where = "" if memory.device == str(device) else f"{memory.device} "
        parts.append(f"{where}peak {size(memory.peak)}")
    return parts


def _ran(report: Report) -> list[str]:
    """How long it ran, and how it ended."""
    took = duration(report.seconds)
    if report.error:
        took = f"{report.error} after {took}"
    elif not report.waited:
        took = f"{took}, not waited for"
    parts = [took]
    if report.fault:
        parts.append(f"the device reports: {report.fault}")
    return parts


def _left(left: Iterable[Left]) -> Iterator[str]:
    """``X, y: a dataset stays where it is``, for each reason."""
    names: dict[str, list[str]] = {}
    for part in left:
        names.setdefault(part.reason, []).append(part.name)
    return (f"{some(found)}: {reason}" for reason, found in names.items())


def _fixed(f: Fixed) -> str:
    where = "" if f.line is None else f" at line {f.line}"
    again = f", {f.count:,} times" if f.count > 1 else ""
    return f"fixed {f.name}: {size(f.nbytes)} from {f.source} to {f.destination}{where}{again}"


def _details(report: Report) -> list[table.Column]:
    moved = [
        (m.name, size(m.nbytes), f"{', '.join(m.sources)} → {report.device}") for m in report.moved
    ]
    left = [(part.name, "left", part.reason) for part in report.left]
    memory = [
        (m.device, f"peak {size(m.peak)}", f"{size(m.before)} before, {size(m.allocated)} after")
        for m in report.memory
    ]
    rows = zip(*moved, *left, *memory, strict=True)
    return [table.Column("", cells) for cells in rows]
