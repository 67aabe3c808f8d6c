"""Define the report of one cell: a line, advice and, in HTML, a table that opens on a click."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape

from gpumagic.device import Device
from gpumagic.display import table
from gpumagic.display.table import Shown, block, coded
from gpumagic.display.units import duration, size, some
from gpumagic.ledger import ledger_view
from gpumagic.ledger.entry import Ledger, Memory
from gpumagic.moving.moved import Left, Moved, Moves, clauses

FOR_GOOD = " for good (%ongpu home undoes it)"


@dataclass(frozen=True)
class Batches:
    """Number and bytes of the `DataLoader` batches that were copied to the device."""

    count: int = 0
    nbytes: int = 0


@dataclass(frozen=True, repr=False)
class Report(Shown):
    """Report the moves, copies, time and memory of one cell, in a line of several clauses."""

    device: Device  #: the device that the cell ran on
    seconds: float  #: from the cell's first statement until the device finished the cell's work
    waited: bool = True  #: whether the device was synchronized; False after an interrupt or fault
    moved: tuple[Moved, ...] = ()  #: the variables that were moved to the device
    left: tuple[Left, ...] = ()  #: the variables that were not moved, and the reasons
    move_seconds: float = 0.0  #: the time of the moves, not included in `seconds`
    returned: Moves | None = None  #: with `--back`: the moves back to the former devices
    results: tuple[str, ...] = ()  #: with `--back`: the new variables, which stay on the device
    said: frozenset[str] = frozenset((FOR_GOOD,))  #: clauses that earlier reports have shown
    batches: Batches = Batches()  #: the batches that loaders copied to the device
    memory: tuple[Memory, ...] = ()  #: memory use of each device on which the cell allocated
    peak: Shown | None = None  #: with `--memory`: the peak memory, by the lines that allocated it
    profile: Shown | None = None  #: with `--profile`: the `CellProfile` of the cell
    ledger: Ledger = field(default_factory=Ledger)  #: copies (also of batches) and waits
    ledger_complete: bool = True  #: False if an internal error left copies or waits uncounted
    table: bool = False  #: whether to show the ledger as a table too (`--report`)
    made: bool = False  #: whether the cell made arrays of a framework that counts no allocations
    taken: tuple[str, ...] = ()  #: GPU names that `device` replaced in objects: "net's cuda:0"
    elsewhere: str = ""  #: where most work ran, if not on `device`: ``"all work was on cuda:0"``
    error: str | None = None  #: the name of the exception that ended the cell
    fault: str | None = None  #: the error that the device reported at the end of the cell

    @property
    def moved_bytes(self) -> int:
        """Total bytes of the moved variables."""
        return sum(m.nbytes for m in self.moved)

    @property
    def says_once(self) -> frozenset[str]:
        """Clauses of this report that later reports of the notebook need not repeat."""
        said = [*(clauses(self.left) if self.left else ()), *([_taken(self)] if self.taken else [])]
        return frozenset([*said, FOR_GOOD] if self.moved and self.returned is None else said)

    @property
    def touched(self) -> bool:
        """Whether the cell moved, copied or allocated data, or could not move some data."""
        copied = self.batches.count or self.ledger.entries
        return bool(self.moved or self.left or copied or self.memory or self.made)


_last: list[Report] = []


def keep_last(report: Report) -> None:
    _last[:] = [report]


def last_report() -> Report | None:
    """Return the report of the last cell that ran on a device; None if no cell ran.

    Examples
    --------
    >>> report = gpumagic.last_report()
    >>> report.seconds, report.moved_bytes
    (1.24, 1234944)
    """
    return _last[0] if _last else None


# The ledger's clause omits small copies for displays, and batches, which have their own clause.
_OMITTED = ("loader", "display")
_CLAUSES = 2  # maximum number of clauses in the line; the other clauses follow below the line
_ITSELF = "the cell, or a library that it calls, chose that device itself: tell it to use {}"


def text(report: Report) -> str:
    """Return the report as text, beginning ``cuda:1 · 1.24 s · peak 12.5 MiB · moved X: …``."""
    clauses = [*_happened(report)]
    lines = [" · ".join([*_head(report), *clauses[:_CLAUSES]])]
    if more := clauses[_CLAUSES:]:
        lines.append(f"  more: {' · '.join(more)}")
    lines += [f"  → {hint}" for hint in _hints(report)]
    below = [repr(shown) for shown in (report.profile, report.peak) if shown]
    if report.table:
        below.insert(0, ledger_view.text(report.ledger))
    return "\n".join([*lines, *below])


def html(report: Report) -> str:
    """Return the report as HTML. A click on its line shows more clauses, moved bytes and memory."""
    (head, *rest), clauses = _head(report), [*_happened(report)]
    bad = " gm-bad" if report.error or report.fault or report.elsewhere else ""
    first = f'<b class="gm-where{bad}">{escape(head)}</b>'
    parts = map(coded, (*rest, *clauses[:_CLAUSES]))
    line = ' <span class="gm-dim">·</span> '.join([first, *parts])
    more = "".join(f"<div>{coded(clause)}</div>" for clause in clauses[_CLAUSES:])
    if (details := _details(report)) or more:
        more += table.html(details) if details else ""
        line = f"<details><summary>{line}</summary>{more}</details>"
    body = line + "".join(f"<div>→ {coded(hint)}</div>" for hint in _hints(report))
    shown = block(body, "report", css="gpumagic gm-report")
    shown += ledger_view.html(report.ledger, with_line=False) if report.table else ""
    return shown + "".join(each._repr_html_() for each in (report.profile, report.peak) if each)


def _hints(report: Report) -> list[str]:
    """Return advice for the cell. Omit the ledger's advice if the ledger's table shows it."""
    itself = "cuda" in report.elsewhere and "--no-move" not in report.elsewhere
    first = [_ITSELF.format(report.device)] if itself and not _causes(report) else []
    shown = report.table or not report.ledger.entries
    return first if shown else [*first, *ledger_view.hints(report.ledger)]


def _head(report: Report) -> list[str]:
    device, took = report.device, duration(report.seconds)
    named = str(device)
    where = f"asked for {named}; {report.elsewhere}" if report.elsewhere else device.label
    where += f": {device.note}" if device.note else ""
    if report.error:
        took = f"{report.error} after {took}"
    elif not report.waited:
        took = f"{took}, not synchronized"
    parts = [where, took, *([f"the device reports: {report.fault}"] if report.fault else [])]
    for memory in sorted(report.memory, key=lambda memory: memory.device != named):
        other = "" if memory.device == named else f"{memory.device} "
        parts.append(f"{other}peak {size(memory.peak)}")
    return parts


def _happened(report: Report) -> Iterator[str]:
    """Yield clauses on moves, copies and batches, the most important first."""
    if not report.ledger_complete:
        yield "some copies or waits were not counted: %gpus --doctor shows why"
    if report.moved:
        yield _moved(report)
    if report.taken and (taken := _taken(report)) not in report.said:
        yield taken
    if report.ledger.entries and (said := ledger_view.line(report.ledger, without=_OMITTED)):
        yield said
    if report.left:
        known = report.said.difference(_causes(report))
        if left := [part for part in clauses(report.left) if part not in known]:
            yield f"left {'; '.join(left)}"
    if report.results:
        yield f"new on {report.device}: {some(report.results)}"
    if report.batches.count:
        count = f"{report.batches.count} batch{'es' * (report.batches.count > 1)}"
        yield f"{count}: {size(report.batches.nbytes)} copied"


def _moved(report: Report) -> str:
    moved = str(Moves(report.moved, seconds=report.move_seconds))
    if report.returned is not None and report.returned.moved:
        return f"{moved}, and back in {duration(report.returned.seconds)}"
    return moved + FOR_GOOD if FOR_GOOD in report.says_once - report.said else moved


def _taken(report: Report) -> str:
    was = "was" if len(report.taken) == 1 else "were"
    return f"{' and '.join(report.taken)} {was} replaced by {report.device}"


def _causes(report: Report) -> list[str]:
    """Return clauses on the variables that stayed on a GPU where the cell's work ran."""
    return clauses(x for x in report.left if "cuda" in x.device and x.device in report.elsewhere)


def _details(report: Report) -> list[table.Column]:
    moved = [
        (m.name, size(m.nbytes), f"{', '.join(m.sources)} → {report.device}") for m in report.moved
    ]
    left = [(part.name, "left", part.reason) for part in report.left]
    memory = [
        (m.device, f"peak {size(m.peak)}", f"{size(m.before)} before, {size(m.allocated)} after")
        for m in report.memory
    ]
    return [table.Column("", cells) for cells in zip(*moved, *left, *memory, strict=True)]
