"""Record and show the result of `fit`: the largest value, and the memory that each value needs."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.display import table
from gpumagic.display.table import Shown, block, folded, tag
from gpumagic.display.units import duration, many, size


@dataclass(frozen=True)
class Tried:
    """Record one tried value, and the bytes that the code allocates with this value."""

    value: float
    predicted: int | None = None  # bytes, by a dry run
    measured: int | None = None  # bytes, by a run on copied variables
    ran: bool | None = None  # whether the run completed; None if there was no run

    @property
    def needed(self) -> int | None:
        """Return the measured bytes, or else the predicted bytes; None if both are unknown."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class Largest:
    """Record the largest value that fits on one GPU or card."""

    where: str
    free: int  # bytes that new tensors can use
    room: int  # `free` minus the bytes that `Fit.margin` leaves free
    value: float | None  # None if no value fits
    confirmed: bool = False  # whether a run with this value completed
    virtual: bool = False


@dataclass(frozen=True, repr=False)
class Fit(Shown):
    """Record the result of `gpumagic.fit`."""

    code: str
    name: str  # the variable's name
    largest: tuple[Largest, ...]  # one for the GPU, or one for each named card
    tried: tuple[Tried, ...]  # the tried values in ascending order
    trains: bool | None  # whether the code runs a backward pass; None if unknown
    margin: float  # the fraction of the free memory to leave free
    notes: tuple[str, ...] = ()  # remarks on how the value was found, one line each
    interrupted: bool = False  # whether Ctrl-C ended the search
    stopped: str = ""  # why larger values may fit too; empty if the search was complete
    values: Sequence[float] = ()  # the given values, in ascending order
    seconds: float = 0.0
    time: float = 0.0  # Unix time at the end of the search

    @property
    def value(self) -> float | None:
        """Return the largest value on the GPU, or on the first card; None if no value fits."""
        return self.largest[0].value

    @property
    def confirmed(self) -> bool:
        """Whether a run with the largest value completed."""
        return self.largest[0].confirmed

    @property
    def title(self) -> str:
        """Return the first line of the code."""
        return next((line.strip() for line in self.code.splitlines() if line.strip()), "no code")

    def at(self, value: float) -> Tried | None:
        """Return the result for `value`; None if `value` was not tried."""
        return next((tried for tried in self.tried if tried.value == value), None)


def text(fit: Fit) -> str:
    lines = [*(_answer(fit, found) for found in fit.largest), "", *table.lines(_columns(fit), "  ")]
    return "\n".join([*lines, *(f"  {note}" for note in _notes(fit))])


def html(fit: Fit) -> str:
    first, *rest = [_answer(fit, found) for found in fit.largest]
    bad = any(found.value is None for found in fit.largest)
    parts = [tag("div", first, f"gm-answer{' gm-bad' * bad}"), *(tag("div", each) for each in rest)]
    parts += [tag("div", fit.title, "gm-code gm-title")]
    parts.append(folded("what each value needs", table.html(_columns(fit))))
    parts += [tag("div", note, "gm-note") for note in _notes(fit)]
    return block("".join(parts), "table", "comparison")


def panel(fit: Fit) -> dict[str, object]:
    return {"title": fit.title, "bars": []}


def _answer(fit: Fit, found: Largest) -> str:
    """Return a sentence: ``batch = 384 is the largest that fits on cuda:0: it needs …``."""
    where = f"{found.where} (virtual)" if found.virtual else found.where
    free = f"{size(found.free)} free"
    if not fit.tried:
        return f"no result: no value of {fit.name} ran to its end on {where}"
    if found.value is None:
        least = fit.tried[0]
        needs = "ran out of memory with" if least.ran is False else f"needs {size(least.needed)} of"
        return f"no {fit.name} fits on {where}: {fit.name} = {least.value} {needs} {free}"
    best = next(tried for tried in fit.tried if tried.value == found.value)
    kind = {True: ", with its backward pass", False: ", without a backward pass", None: ""}
    how = "a run confirms it" if found.confirmed else "predicted, not run"
    needs = f"needs {size(best.needed)} of {free}; {how}"
    if fit.values and found.value == fit.values[-1]:
        return f"all values fit on {where}{kind[fit.trains]}; {fit.name} = {found.value} {needs}"
    words = f"{fit.name} = {_how_sure(fit, found.value)}"
    power = 1 << max(int(found.value).bit_length() - 1, 0)
    below = 2 < power < found.value and power in fit.values
    also = f"; the power of two below: {power:_}" if below else ""
    return f"{words} on {where}{kind[fit.trains]}: it {needs}{also}"


def _how_sure(fit: Fit, value: float) -> str:
    """Return ``384 is the largest that fits``, or ``384 is the largest known to fit``."""
    above = next((tried.value for tried in fit.tried if tried.value > value), None)
    known = f"{value} is the largest known to fit"
    if fit.stopped or above is None:
        return known
    if bisect_left(fit.values, above) - bisect_left(fit.values, value) <= 1:
        return f"{value} is the largest that fits"
    spare = f" with {100 * fit.margin:.3g} % left free" if fit.margin else ""
    return f"{known} ({above} does not fit{spare})"


def _size(nbytes: int | None) -> str:
    return "" if nbytes is None else size(nbytes)


def _columns(fit: Fit) -> list[table.Column]:
    runs = ["out of memory" if t.ran is False else _size(t.measured) for t in fit.tried]
    columns = [
        table.Column(fit.name, [f"{t.value}" for t in fit.tried], number=True, css="gm-code"),
        table.Column("dry run", [_size(t.predicted) for t in fit.tried], number=True),
        table.Column("run", runs, number=True),
    ]
    failed = min((t.value for t in fit.tried if t.ran is False), default=math.inf)
    for found in fit.largest:
        head = "" if len(fit.largest) == 1 else found.where
        verdicts = [_verdict(tried, found, failed) for tried in fit.tried]
        columns.append(table.Column(head, verdicts, css="gm-dim"))
    return [column for column in columns if any(column.cells)]


def _verdict(tried: Tried, found: Largest, failed: float) -> str:
    if found.value == tried.value:
        return "largest"
    if tried.value >= failed or (tried.needed or 0) > found.free:
        return "too large"
    fits = found.value is not None and tried.value < found.value
    return "fits" if fits and (tried.needed or 0) <= found.room else "fits only without the margin"


def _notes(fit: Fit) -> Iterator[str]:
    yield from filter(None, (fit.stopped, *fit.notes))
    if ran := [f"{t.value}" for t in fit.tried if t.ran is not None]:
        times = "once" if len(ran) == 1 else f"{len(ran)} times"
        written = "files it wrote remain; --dry or dry=True only predicts"
        yield f"the cell ran {times} ({fit.name} = {', '.join(ran)}): {written}"
    dry = many(sum(t.predicted is not None for t in fit.tried), "dry run")
    margin = f"{100 * fit.margin:.3g} % of the free memory stays free"
    yield f"{dry}, {many(len(ran), 'run')}, {duration(fit.seconds)}; {margin}"
