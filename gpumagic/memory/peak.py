"""Replay what torch's allocator recorded up to the peak, and show what the peak was made of.

A block has one kind for all of its life, from what was found in it at any time (a parameter, a
tensor that a graph saved). A block of no known kind that is gone at the end was temporary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.display import table
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
"""The kind of a block in which several were found is the first of them."""
_TEMPORARY = len(KINDS) - 1
BEFORE = "before the cell"
UNKNOWN = "line not known"


class PeakLine(NamedTuple):
    """Record the bytes that one line had allocated at the peak, and their kinds, most first."""

    line: str
    nbytes: int
    kinds: tuple[tuple[str, int], ...]


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
    lines : tuple of PeakLine
        The same by the line that allocated them; ``"before the cell"`` is a line too.
    complete : bool
        False if there were more events than the record holds: the first ones are missing.
    saved : str
        The file of torch's own snapshot, for its viewer.
    changes : int
        How often the code allocated or freed.
    refused : tuple of (int, str) or None
        Where it last ran out of memory: the bytes that were wanted, and the line.
    events : int
        How many events of the allocator were recorded.
    added_seconds : float
        What the recording added to the cell's time at most, without torch's own part: that is about
        2 µs for each event, and is not measured.
    """

    device: str
    nbytes: int
    seconds: float
    line: str
    kinds: tuple[tuple[str, int], ...]
    lines: tuple[PeakLine, ...]
    complete: bool = True
    saved: str = ""
    changes: int = 0
    refused: tuple[int, str] | None = None
    events: int = 0
    added_seconds: float = 0.0


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
        """Follow a trace from the blocks before it; `line` returns the line of an entry."""
        live = {b["address"]: Piece(b["size"], BEFORE, -1) for b in before}
        self.pieces = list(live.values())
        self.now = self.most = sum(piece.nbytes for piece in self.pieces)
        waiting = sorted(notes)[::-1]
        for entry in trace:
            while waiting and waiting[-1].time_us < entry["time_us"]:
                _note_kinds(waiting.pop(), live)
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
            _note_kinds(note, live)

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


def _note_kinds(note: Note, live: Mapping[int, Piece]) -> None:
    for address, kind in note.kinds.items():
        if address in live:
            live[address].note(kind)


def peak_of(replay: Replay, device: str, start_us: int, **details: Any) -> MemoryPeak:
    """Return the peak of a replay; `details` are further attributes of it."""
    by_line: dict[str, Counter[str]] = {}
    for piece in replay.at_peak():
        by_line.setdefault(piece.line, Counter())[KINDS[piece.rank]] += piece.nbytes
    lines = (PeakLine(n, kinds.total(), (*kinds.most_common(),)) for n, kinds in by_line.items())
    last = replay.last()
    return MemoryPeak(
        device=device,
        nbytes=replay.most,
        seconds=max(replay.times[replay.at] - start_us, 0) / 1e6 if last else 0.0,
        line=last.line if last else BEFORE,
        kinds=(*sum(by_line.values(), Counter[str]()).most_common(),),
        lines=tuple(sorted(lines, key=lambda line: -line.nbytes)),
        changes=len(replay.times),
        refused=replay.refused,
        **details,
    )


_LINES = 8
_MANY = MANY | {"tensor": "other tensors"}


def text(peak: MemoryPeak) -> str:
    """The peak in a sentence, and a row for each line that had allocated some of it."""
    rows = table.lines(_columns(peak), margin="  ") if peak.lines else []
    return "\n".join([*table.wrapped(_head(peak)), *rows, *(f"  {note}" for note in _notes(peak))])


def html(peak: MemoryPeak) -> str:
    """The same as a table."""
    rows = table.html(_columns(peak), css="gm-titled gm-section") if peak.lines else ""
    notes = "".join(tag("div", note, "gm-note") for note in _notes(peak))
    return block(f"<div>{coded(_head(peak))}</div>{rows}{notes}")


def _head(peak: MemoryPeak) -> str:
    words = f"the peak of {peak.device}, {size(peak.nbytes)}, was "
    if peak.refused is not None:
        wanted, line = peak.refused
        words = f"out of memory at {_at(line)}, which wanted {size(wanted)} more; {words}"
    if peak.line != BEFORE:
        return f"{words}{duration(peak.seconds)} after the start, at {_at(peak.line)}"
    if peak.changes:
        return f"{words}before the cell: it gave back more than it allocated"
    return f"{words}before the cell: the cell allocated nothing"


def _at(line: str) -> str:
    place, _, code = line.partition(": ")
    return f"{place}: `{code}`" if code else place


def _columns(peak: MemoryPeak) -> list[Column]:
    """Return the columns of the first lines, and one row for all others."""
    rows, rest = peak.lines[:_LINES], peak.lines[_LINES:]
    if rest:
        kinds = sum((Counter(dict(line.kinds)) for line in rest), Counter[str]())
        rows += (PeakLine(f"{len(rest):,} more", kinds.total(), (*kinds.most_common(),)),)
    return [
        Column("by line", [row.line for row in rows], fit="cut", css="gm-code"),
        Column("memory", [size(row.nbytes) for row in rows], number=True),
        Column("share", [share(row.nbytes, peak.nbytes) for row in rows], number=True),
        Column("kind", [_kinds(row) for row in rows], fit="wrap"),
    ]


def _kinds(row: PeakLine) -> str:
    """``"gradients"``, ``"gradients 32.0 MiB, temporary 1.0 MiB"``."""
    names = [_MANY.get(name, name) for name, _ in row.kinds]
    if len(names) == 1:
        return names[0]
    return ", ".join(f"{name} {size(n)}" for name, (_, n) in zip(names, row.kinds, strict=True))


def _notes(peak: MemoryPeak) -> list[str]:
    events = f"{peak.events:,} event{'s' * (peak.events != 1)}"
    found = [f"Recording {events} added up to {duration(peak.added_seconds)} to the cell's time."]
    if not peak.complete:
        found.append("More happened than the record holds: what came first is missing.")
    if peak.saved:
        found.append(f"{peak.saved} is for the viewer at https://docs.pytorch.org/memory_viz")
    return found
