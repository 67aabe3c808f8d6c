"""Show the profile of a cell: one sentence, and a table with a row for each line."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Literal, NamedTuple

from gpumagic.display import table
from gpumagic.display.table import Column, Shown, block, coded, folded, tag
from gpumagic.display.units import NOT_KNOWN, duration
from gpumagic.usercode.files import UserLine

Kind = Literal["loader", "copy", "wait", "launch", "python"]
"""Why a GPU is idle: a `DataLoader`, a copy, a wait of the host, operator launches, or Python."""


class Operator(NamedTuple):
    """All calls of one operator from one line. Times exclude the operators that it calls."""

    name: str
    calls: int
    host: float  # seconds
    device: float | None  # seconds; None if the profiler does not see the device

    @property
    def cost(self) -> float:
        """The larger of the host time and the device time."""
        return max(self.host, self.device or 0.0)


class ProfiledLine(NamedTuple):
    """Totals of one line of the user's code. `where` is None for events that belong to no line."""

    where: UserLine | None
    host: float  # seconds
    device: float | None  # seconds; None if the profiler does not see the device
    launches: int | None  # None if `device` is None
    copies: int
    waits: int
    operators: tuple[Operator, ...]  # the slowest first


class Cause(NamedTuple):
    """A cause of idle time, and its most frequent line. If `seconds` is None, `times` is set."""

    kind: Kind
    where: UserLine | None
    seconds: float | None = None
    times: int = 0


@dataclass(frozen=True, repr=False)
class CellProfile(Shown):
    """The profile of one cell: where its time went."""

    device: str
    virtual: bool  # whether the device is a virtual GPU, whose time cannot be measured
    seconds: float  # from the cell's start until the device is done, without tracing's overhead
    busy: float | None  # seconds in which a kernel ran; None if the profiler sees no device
    lines: tuple[ProfiledLine, ...]  # the slowest first
    causes: tuple[Cause, ...]  # the longest first
    added: float = 0.0  # seconds of overhead: the measured line tracing, and 2 µs for each event
    saved: str = ""  # the file of the trace


_LINES, _OPERATORS, _CODE = 12, 5, 50
_LEAST = 0.1  # the sentence omits causes with a smaller share of the time
_SAID = 2  # number of causes in the sentence
_FULL = 0.8  # if the device is busy for a greater share, the device is the bottleneck
_WORDS = {
    "loader": "the loader {takes} {time} at {at}",
    "python": "Python {takes} {time}, most at {at}",
    "copy": "copies {take} {time}, most at {at}",
    "wait": "the host waits at {at}, which {takes} {time}",
    "launch": "launching operators {takes} {time}, most at {at}",
}
_TAKES = ("takes", "take"), ("leaves the GPU idle for", "leave the GPU idle for")


def text(profile: CellProfile) -> str:
    rows = table.lines(_columns(profile), margin="  ", fold=table.Fold(_LINES))
    notes = (f"  {note}" for note in _notes(profile))
    return "\n".join([*table.wrapped(_sentence(profile)), *rows, *notes])


def html(profile: CellProfile) -> str:
    rows = table.html(_columns(profile), css="gm-titled", fold=table.Fold(_LINES))
    notes = "".join(tag("div", note, "gm-note") for note in _notes(profile))
    body = f"<div>{coded(_sentence(profile))}</div>{rows}{notes}"
    return block(body, "table", "comparison")


def _sentence(profile: CellProfile) -> str:
    whole = duration(profile.seconds)
    part = _percent(profile.busy, profile.seconds)
    start = whole if profile.device == "cpu" else f"GPU busy {part} of {whole}"
    least = _LEAST * profile.seconds
    causes = [c for c in profile.causes if c.seconds is None or c.seconds >= least][:_SAID]
    if (profile.busy or 0) > _FULL * profile.seconds:
        most = max(profile.lines, key=lambda line: line.device or 0.0)
        whose = f"{_at(most.where)} takes {duration(most.device)} of GPU time"
        return f"{start}: {'; '.join([whose, *(_said(profile, c) for c in causes[:1])])}"
    return f"{start}: {', '.join(_said(profile, c) for c in causes)}" if causes else start


def _said(profile: CellProfile, cause: Cause) -> str:
    at = _at(cause.where)
    if cause.seconds is None:
        return f"{cause.times:,} {'copies' if cause.kind == 'copy' else 'waits'} at {at}"
    takes, take = _TAKES[profile.busy is not None]
    return _WORDS[cause.kind].format(time=duration(cause.seconds), at=at, takes=takes, take=take)


def _at(where: UserLine | None) -> str:
    if where is None:
        return "no line"
    code = table.short(where.source, _CODE).replace("`", "'")
    return f"{where.place} (`{code}`)" if code else where.place


def _percent(part: float | None, whole: float) -> str:
    return NOT_KNOWN if part is None or not whole else f"{100 * part / whole:.0f} %"


def _columns(profile: CellProfile) -> list[Column]:
    whole = sum(line.host for line in profile.lines)
    if not (rows := [_cells(line, whole) for line in profile.lines]):
        return []
    places, code, html, slowest, *numbers = map(list, zip(*rows, strict=True))
    number = partial(Column, number=True)
    source = Column("source", code, fit="cut", notes=slowest, css="gm-code", html=html)
    heads = ("host", "device", "launches", "copies", "waits", "share")
    return [number("line", places), source, *map(number, heads, numbers)]


def _cells(line: ProfiledLine, whole: float) -> tuple[str, ...]:
    """Return a line's place, code, HTML and slowest operators, then the cells with numbers."""
    where = line.where or UserLine(0)
    place = where.place.removeprefix("line ") if where.line else "–"
    slowest = ", ".join(f"{o.name} {duration(o.cost)}" for o in line.operators[:_OPERATORS])
    html = folded(where.source, escape(slowest)) if slowest else escape(where.source)
    launches = NOT_KNOWN if line.launches is None else f"{line.launches:,}"
    times = duration(line.host), duration(line.device)
    counts = launches, f"{line.copies:,}", f"{line.waits:,}", _percent(line.host, whole)
    return place, table.short(where.source, _CODE), html, slowest, *times, *counts


def _notes(profile: CellProfile) -> Iterator[str]:
    if profile.busy is None and profile.device != "cpu":
        of = "virtual GPUs have no time of their own"
        why = of if profile.virtual else f"torch's profiler reports no events of {profile.device}"
        yield f"device time and launches are {NOT_KNOWN}: {why}"
    yield f"recording took about {duration(profile.added)}, most of which is not counted above"
    if profile.saved:
        yield f"the trace is in {profile.saved}; open it at https://ui.perfetto.dev"
