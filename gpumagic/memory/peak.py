"""Replay what torch's allocator recorded up to the peak, and show what the peak was made of.

What is known of a block at any time of its life (a parameter is in it, a graph saved it) holds for
all of it; what nobody knows and is gone at the end was temporary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.display import plot, table
from gpumagic.display.table import Column, Shown, block, coded, tag
from gpumagic.display.units import duration, size
from gpumagic.memory.memory_report import EXCEPTION, MANY, OUTPUT, SAVED, STATE, share

KINDS = (
    "parameter",
    "buffer",
    STATE,
    "gradient",
    SAVED,
    EXCEPTION,
    OUTPUT,
    "tensor",
    "temporary",
)
"""In the order in which they are stacked, and in which one is believed rather than the next."""
_TEMPORARY = len(KINDS) - 1
BEFORE = "before the cell"
UNKNOWN = "line not known"
_POINTS = 160


class Moment(NamedTuple):
    """Record the bytes of each kind at some time, in seconds from the start."""

    seconds: float
    nbytes: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class MemoryPeak(Shown):
    """Record the moment of a cell at which the most memory was allocated on one GPU.

    Attributes
    ----------
    device : str
        ``"cuda:0"``.
    nbytes : int
        What was allocated then, as torch's allocator counts it.
    seconds : float
        After the cell's start.
    line : str
        Whose allocation it was: ``"line 7: loss.backward()"``.
    kinds : tuple of (str, int)
        The bytes by what they were for, the most first; they add up to `nbytes`.
    lines : tuple of (str, int)
        The same by the line that allocated them; ``"before the cell"`` is a line too.
    curve : tuple of Moment
        How it went on: at most 160 moments, whose bytes are by the kinds of `curve_kinds`.
    curve_kinds : tuple of str
    complete : bool
        False where more happened than the record holds: what was before is missing.
    saved : str
        The file of torch's own snapshot, for its viewer.
    allocations : int
        How often the code allocated.
    refused : tuple of (int, str) or None
        Where it last ran out of memory: the bytes that were wanted, and the line.
    """

    device: str
    nbytes: int
    seconds: float
    line: str
    kinds: tuple[tuple[str, int], ...]
    lines: tuple[tuple[str, int], ...]
    curve: tuple[Moment, ...] = ()
    curve_kinds: tuple[str, ...] = ()
    complete: bool = True
    saved: str = ""
    allocations: int = 0
    refused: tuple[int, str] | None = None


class Note(NamedTuple):
    """Record the kinds at some addresses at a time, in µs."""

    time_us: int
    kinds: Mapping[int, str]


@dataclass
class Piece:
    """A piece of memory, from when it was allocated until it was freed."""

    nbytes: int
    line: str
    born: int  # number of the event that allocated it
    died: int | None = None
    rank: int = _TEMPORARY  # its kind's

    def note(self, kind: str) -> None:
        """Set the kind. A graph that saves an older tensor does not change it."""
        known = kind if kind in KINDS else "tensor"
        if not (known == SAVED and self.born < 0 and self.rank != _TEMPORARY):
            self.rank = min(self.rank, KINDS.index(known))


@dataclass
class Replay:
    """Record the pieces that lived in a stretch of time, and when each change happened."""

    pieces: list[Piece] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # µs, of each change
    now: int = 0
    most: int = 0
    at: int = -1  # the change after which the most was allocated; -1: none
    refused: tuple[int, str] | None = None  # the last request that failed, and its line

    def run(
        self,
        before: Iterable[Mapping[str, Any]],
        trace: Sequence[Mapping[str, Any]],
        notes: Sequence[Note],
        line: Callable[[Mapping[str, Any]], str],
    ) -> None:
        """Follow a trace from the blocks that there were before it; `line` tells of an entry."""
        live = {b["address"]: Piece(b["size"], BEFORE, -1) for b in before}
        self.pieces = list(live.values())
        self.now = self.most = sum(piece.nbytes for piece in self.pieces)
        waiting = sorted(notes)[::-1]
        for entry in trace:
            while waiting and waiting[-1].time_us < entry["time_us"]:
                _believe(waiting.pop(), live)
            if entry["action"] == "alloc":
                nbytes = in_blocks(entry["size"])
                piece = live[entry["addr"]] = Piece(nbytes, line(entry), len(self.times))
                self.pieces.append(piece)
                self._change(entry, nbytes)
            elif entry["action"] == "oom":
                self.refused = entry["size"], line(entry)
            elif entry["action"] == "free_completed" and entry["addr"] in live:
                piece = live.pop(entry["addr"])
                piece.died = len(self.times)
                self._change(entry, -piece.nbytes)
        for note in waiting[::-1]:
            _believe(note, live)

    def _change(self, entry: Mapping[str, Any], nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.most:
            self.most, self.at = self.now, len(self.times)
        self.times.append(entry["time_us"])

    def at_peak(self) -> list[Piece]:
        """Return the pieces that lived at the peak."""
        return [
            p for p in self.pieces if p.born <= self.at and (p.died is None or p.died > self.at)
        ]

    def last(self) -> Piece | None:
        """Return the piece whose allocation reached the peak."""
        return next((piece for piece in self.pieces if piece.born == self.at >= 0), None)

    def curve(self, start_us: int) -> Iterator[Moment]:
        """Return the bytes of each kind over time, at the fullest of too many moments."""
        steps: list[list[tuple[int, int]]] = [[] for _ in self.times]
        now = [0] * len(KINDS)
        for piece in self.pieces:
            if piece.born < 0:
                now[piece.rank] += piece.nbytes
            else:
                steps[piece.born].append((piece.rank, piece.nbytes))
            if piece.died is not None:
                steps[piece.died].append((piece.rank, -piece.nbytes))
        yield Moment(0.0, tuple(now))
        each = -(-len(steps) // _POINTS)
        for first in range(0, len(steps), each or 1):
            best = Moment(0.0, ())
            for n in range(first, min(first + each, len(steps))):
                for rank, nbytes in steps[n]:
                    now[rank] += nbytes
                if not best.nbytes or sum(now) > sum(best.nbytes):
                    best = Moment(max(self.times[n] - start_us, 0) / 1e6, tuple(now))
            yield best


def _believe(note: Note, live: Mapping[int, Piece]) -> None:
    for address, kind in note.kinds.items():
        if address in live:
            live[address].note(kind)


def peak_of(
    replay: Replay, device: str, start_us: int, *, complete: bool, saved: str
) -> MemoryPeak:
    """Return the peak of a replay."""
    kinds: dict[str, int] = {}
    lines: dict[str, int] = {}
    for piece in replay.at_peak():
        kind = KINDS[piece.rank]
        kinds[kind] = kinds.get(kind, 0) + piece.nbytes
        lines[piece.line] = lines.get(piece.line, 0) + piece.nbytes
    last, curve = replay.last(), list(replay.curve(start_us))
    shown = [n for n in range(len(KINDS)) if any(moment.nbytes[n] for moment in curve)]
    return MemoryPeak(
        device=device,
        nbytes=replay.most,
        seconds=max(replay.times[replay.at] - start_us, 0) / 1e6 if last else 0.0,
        line=last.line if last else BEFORE,
        kinds=_most_first(kinds),
        lines=_most_first(lines),
        curve=tuple(Moment(m.seconds, tuple(m.nbytes[n] for n in shown)) for m in curve),
        curve_kinds=tuple(KINDS[n] for n in shown),
        complete=complete,
        saved=saved,
        allocations=sum(piece.born >= 0 for piece in replay.pieces),
        refused=replay.refused,
    )


def _most_first(nbytes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(nbytes.items(), key=lambda item: -item[1]))


_LINES = 8
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
# A plot's size in pixels, and its margins: left, right, above, below.
_WIDTH, _HEIGHT = 460.0, 170.0
_LEFT, _RIGHT, _TOP, _FOOT = 64.0, 12.0, 20.0, 144.0
# The GPU's own grays are for what nobody explains.
_GRAY = "#7d8590"
_COLORS = dict(zip(KINDS, (*plot.COLORS, _GRAY), strict=True))
_MANY = MANY | {"tensor": "other tensors"}


def text(peak: MemoryPeak) -> str:
    """What was allocated when the most was, and a line of bars over time."""
    columns = [*_columns(peak.kinds, peak, "at the peak"), *_columns(_lines(peak), peak, "by line")]
    rows = max(len(column.cells) for column in columns)
    even = [
        Column(c.head, [*c.cells, *[""] * (rows - len(c.cells))], number=c.number, fit=c.fit)
        for c in columns
    ]
    made_of = table.lines(even, margin="  ") if peak.kinds else []
    return "\n".join([*table.wrapped(_head(peak)), *made_of, *_below(peak)])


def html(peak: MemoryPeak) -> str:
    """The same, and the kinds one above the other over time."""
    kinds = table.html(_columns(peak.kinds, peak, "at the peak", colors=True))
    lines = table.html(_columns(_lines(peak), peak, "by line"))
    plot = f"<figure>{_plot(peak)}</figure>" if len(peak.curve) > 1 else ""
    notes = "".join(tag("div", note, "gm-note") for note in _notes(peak))
    body = f'<div class="gm-plots"><div>{kinds}</div>{plot}<div>{lines}</div></div>{notes}'
    return block(f"<div>{coded(_head(peak))}</div>{body}", "table", "comparison")


def _head(peak: MemoryPeak) -> str:
    words = f"the peak of {peak.device}, {size(peak.nbytes)}, was "
    if peak.refused is not None:
        wanted, line = peak.refused
        words = f"out of memory at {_at(line)}, which wanted {size(wanted)} more; {words}"
    if peak.line != BEFORE:
        return f"{words}{duration(peak.seconds)} after the start, at {_at(peak.line)}"
    if peak.allocations or len(peak.curve) > 1:
        return f"{words}before the cell: it gave back more than it allocated"
    return f"{words}before the cell: the cell allocated nothing"


def _at(line: str) -> str:
    place, _, code = line.partition(": ")
    return f"{place}: `{code}`" if code else place


def _columns(
    parts: tuple[tuple[str, int], ...], peak: MemoryPeak, head: str, *, colors: bool = False
) -> list[Column]:
    words = [_MANY.get(name, name) for name, _ in parts]
    marks = [
        f'<i style="background:{_COLORS.get(name, _GRAY)};display:inline-block;width:9px;'
        f'height:9px;border-radius:2px;margin-right:7px"></i>{escape(shown)}'
        for (name, _), shown in zip(parts, words, strict=True)
    ]
    return [
        Column(head, words, fit="cut", html=marks if colors else ()),
        Column("memory", [size(nbytes) for _, nbytes in parts], number=True),
        Column("share", [share(nbytes, peak.nbytes) for _, nbytes in parts], number=True),
    ]


def _lines(peak: MemoryPeak) -> tuple[tuple[str, int], ...]:
    """The first lines, and the others as one."""
    rest = peak.lines[_LINES:]
    if len(rest) < 2:
        return peak.lines
    more = (f"{len(rest):,} more lines", sum(nbytes for _, nbytes in rest))
    return (*peak.lines[:_LINES], more)


def _below(peak: MemoryPeak) -> list[str]:
    """Return a line of bars over time, and the notes."""
    totals = [sum(moment.nbytes) for moment in peak.curve]
    each = -(-len(totals) // _COLUMNS) or 1
    most = [max(totals[n : n + each]) for n in range(0, len(totals), each)]
    bars = "".join(_BARS[min(7, 8 * n // (peak.nbytes + 1))] for n in most)
    end = duration(peak.curve[-1].seconds) if peak.curve else ""
    drawn = [f"  {bars} 0 to {size(peak.nbytes)}, over {end}"] if len(most) > 1 else []
    return drawn + [f"  {note}" for note in _notes(peak)]


def _notes(peak: MemoryPeak) -> list[str]:
    found = []
    if not peak.complete:
        found.append("More happened than the record holds: what came first is missing.")
    if peak.saved:
        found.append(f"{peak.saved} is for the viewer at https://docs.pytorch.org/memory_viz")
    return found


def _plot(peak: MemoryPeak) -> str:
    """The kinds one above the other over time, with a line at the peak."""
    end = peak.curve[-1].seconds or 1e-6
    x = plot.Scale(0.0, end, _LEFT, _WIDTH - _RIGHT, log=False)
    y = plot.Scale(0.0, float(peak.nbytes or 1), _FOOT, _TOP, log=False)
    parts = []
    for value in (0, peak.nbytes / 2, peak.nbytes):
        parts.append(plot.line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), "gm-grid"))
        parts.append(plot.text(_LEFT - 8, y(value) + 4, size(value), "end"))
    below = [0] * len(peak.curve)
    for k, kind in enumerate(peak.curve_kinds):
        above = [low + moment.nbytes[k] for low, moment in zip(below, peak.curve, strict=True)]
        edge = [*_steps(peak, above, x, y), *_steps(peak, below, x, y)[::-1]]
        parts.append(
            f'<polygon points="{plot.path(edge)}" fill="{_COLORS[kind]}" opacity=".85">'
            f"<title>{escape(_MANY.get(kind, kind))}</title></polygon>"
        )
        below = above
    at = x(min(peak.seconds, end))
    parts.append(plot.line(at, _TOP - 4, at, _FOOT, "gm-crossing"))
    parts.append(plot.text(min(max(at, _LEFT + 14), _WIDTH - 30), _TOP - 8, "peak", "middle"))
    parts.append(plot.text(_LEFT, _FOOT + 17, "0", "middle"))
    parts.append(plot.text(_WIDTH - _RIGHT, _FOOT + 17, duration(end), "end"))
    label = f"Memory over time on {peak.device}: at most {size(peak.nbytes)}"
    return (
        f'<svg class="gm-plot" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" width="{_WIDTH:g}" role="img"'
        f' aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _steps(
    peak: MemoryPeak, heights: list[int], x: plot.Scale, y: plot.Scale
) -> list[tuple[float, float]]:
    """Return the corners of a step curve."""
    found: list[tuple[float, float]] = []
    for moment, height in zip(peak.curve, heights, strict=True):
        if found:
            found.append((x(moment.seconds), found[-1][1]))
        found.append((x(moment.seconds), y(float(height))))
    return found
