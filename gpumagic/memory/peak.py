"""Replay what torch's allocator recorded, up to the moment when the most was allocated.

What is said of a piece of memory at any time of its life (that a parameter lies there, that a graph
saved it) holds for all of it; what nobody says anything of and is gone at the end was temporary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.display.table import Shown
from gpumagic.memory.memory_report import EXCEPTION, OUTPUT, SAVED, STATE

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
    """Bytes of each kind at some time, in seconds from the start."""

    seconds: float
    nbytes: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class MemoryPeak(Shown):
    """The moment of a cell at which the most memory was allocated on one GPU.

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
    """At a time, in µs: what lies at some addresses."""

    time_us: int
    kinds: Mapping[int, str]


@dataclass
class Piece:
    """A piece of memory, from when it was allocated until it was freed."""

    nbytes: int
    line: str
    born: int  # of what happened: which one it was
    died: int | None = None
    rank: int = _TEMPORARY  # its kind's

    def note(self, kind: str) -> None:
        """Believe what is said of it; that a graph saves what a name held before is no reason."""
        known = kind if kind in KINDS else "tensor"
        if not (known == SAVED and self.born < 0 and self.rank != _TEMPORARY):
            self.rank = min(self.rank, KINDS.index(known))


@dataclass
class Replay:
    """The pieces that lived in a stretch of time, and when each change happened."""

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
        """The pieces that lived when the most was allocated."""
        return [
            p for p in self.pieces if p.born <= self.at and (p.died is None or p.died > self.at)
        ]

    def last(self) -> Piece | None:
        """The piece that was the last one before the most was reached."""
        return next((piece for piece in self.pieces if piece.born == self.at >= 0), None)

    def curve(self, start_us: int) -> Iterator[Moment]:
        """The bytes of each kind over time; of many moments those of the most memory."""
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
    """What a replay came to."""
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
