"""Record what a stretch of code allocates on one GPU, and show what the peak was made of.

torch's own record of its allocator is turned on meanwhile, a ring of the last 100,000 events; it
costs about 2 µs for each. What the user records already is read, and left as it is. Before each
backward pass the graph is read, after it the gradients; the time that this takes is measured.

A block has one kind for all of its life, from what was found in it at any time (a parameter, a
tensor that a graph saved). A block of no known kind that is gone at the end was temporary.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch
from torch.cuda import memory

from gpumagic import faults
from gpumagic.device.caching_allocator import in_blocks
from gpumagic.display import table
from gpumagic.display.table import Column, Shown, block, coded, tag
from gpumagic.display.units import duration, size
from gpumagic.errors import GpuError
from gpumagic.memory.allocator import users
from gpumagic.memory.find_holders import find
from gpumagic.memory.memory_report import EXCEPTION, MANY, OUTPUT, SAVED, STATE, share
from gpumagic.memory.references import edges_of_node
from gpumagic.usercode.lines import UserLine, innermost, source_of

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
RING = 100_000
_ROUNDED = 0.05
"""A share of the allocated bytes: a real allocator rounds up, and records the request."""
_C: Any = torch._C
_GRAPHS = (torch.autograd, torch.autograd.graph)
_RUN = "_engine_run_backward"


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


Kinds = Mapping[int, str]
"""The kinds that were found at some addresses."""


@dataclass
class Piece:
    """A piece of memory, from when it was allocated until it was freed."""

    nbytes: int
    line: str
    born: int  # the change that allocated it; -1: before the record
    died: int | None = None
    rank: int = _TEMPORARY  # its kind's

    def note(self, kind: str) -> None:
        """Set the kind. A graph that saves an older tensor does not change it."""
        known = kind if kind in KINDS else "tensor"
        if not (known == SAVED and self.born < 0 and self.rank != _TEMPORARY):
            self.rank = min(self.rank, KINDS.index(known))


def replay(
    before: Iterable[Mapping[str, Any]],
    trace: Iterable[Mapping[str, Any]],
    notes: Iterable[tuple[int, Kinds]],
    line: Callable[[Mapping[str, Any]], str],
    device: str,
    start_us: int = 0,
) -> tuple[MemoryPeak, int]:
    """Follow a trace from the blocks before it; return the peak, and the bytes at the end.

    `notes` are the kinds at addresses, each from a time on; `line` returns the line of an entry.
    """
    live = {each["address"]: Piece(each["size"], BEFORE, -1) for each in before}
    pieces, times = [*live.values()], list[int]()
    now = most = sum(piece.nbytes for piece in pieces)
    at, refused = -1, None
    events: list[tuple[int, int, Any]] = [(time, 1, note) for time, note in notes]
    events += [(entry["time_us"], 0, entry) for entry in trace]
    for time, is_note, entry in sorted(events, key=lambda event: event[:2]):
        if is_note:
            for address in entry.keys() & live.keys():
                live[address].note(entry[address])
        elif entry["action"] == "oom":
            refused = entry["size"], line(entry)
        elif entry["action"] == "alloc":
            piece = Piece(in_blocks(entry["size"]), line(entry), len(times))
            live[entry["addr"]] = piece
            pieces.append(piece)
            times.append(time)
            now += piece.nbytes
            if now > most:
                most, at = now, piece.born
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            piece = live.pop(entry["addr"])
            piece.died = len(times)
            times.append(time)
            now -= piece.nbytes
    by_line: dict[str, Counter[str]] = {}
    for piece in pieces:
        if piece.born <= at and (piece.died is None or piece.died > at):
            by_line.setdefault(piece.line, Counter())[KINDS[piece.rank]] += piece.nbytes
    lines = (PeakLine(n, kinds.total(), (*kinds.most_common(),)) for n, kinds in by_line.items())
    peak = MemoryPeak(
        device=device,
        nbytes=most,
        seconds=max(times[at] - start_us, 0) / 1e6 if at >= 0 else 0.0,
        line=next((piece.line for piece in pieces if piece.born == at >= 0), BEFORE),
        kinds=(*sum(by_line.values(), Counter[str]()).most_common(),),
        lines=tuple(sorted(lines, key=lambda each: -each.nbytes)),
        changes=len(times),
        refused=refused,
    )
    return peak, now


class PeakRecorder:
    """Record one stretch of code: `start`, run the code, then always `stop`."""

    def __init__(
        self, device: torch.device, namespace: Mapping[str, Any], save: str | None = None
    ) -> None:
        if device.type != "cuda" or not hasattr(_C, "_cuda_memorySnapshot"):
            raise GpuError(f"--memory is about the memory of a CUDA GPU, and {device} is none")
        if save and not Path(save).absolute().parent.is_dir():
            raise GpuError(f"--save: there is no folder {Path(save).absolute().parent}")
        self._device = device
        self._index = device.index or 0
        self._namespace = namespace
        self._save = save
        self._notes: list[tuple[int, Kinds]] = []
        self._backwards: list[tuple[int, int, str]] = []
        self._stack = ExitStack()
        self._before: list[Mapping[str, Any]] = []
        self._start = 0
        self._added_seconds = 0.0

    def start(self) -> None:
        """Begin to record; memory allocated now counts as there before."""
        self._note(self._held())
        if not _C._cuda_isHistoryEnabled():
            memory._record_memory_history("all", context="alloc", stacks="python", max_entries=RING)
            self._stack.callback(memory._record_memory_history, None)
        for module in _GRAPHS:
            run = getattr(module, _RUN)
            self._stack.callback(setattr, module, _RUN, run)
            setattr(module, _RUN, self._noting(run))
        self._before = [
            block
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if segment["device"] == self._index and block["state"] == "active_allocated"
        ]
        self._start = time_ns() // 1000

    def stop(self) -> MemoryPeak | None:
        """Put back what was changed, and return what the peak was made of."""
        began = perf_counter()
        with self._stack:
            self._note(self._held())
            snapshot = memory._snapshot()
            if self._save:
                Path(self._save).write_bytes(pickle.dumps(snapshot))
        whole = snapshot["device_traces"][self._index]
        trace = [entry for entry in whole if entry["time_us"] >= self._start]
        device = str(self._device)
        peak, now = replay(self._before, trace, self._notes, self._line, device, self._start)
        missing = abs(now - torch.cuda.memory_allocated(self._index))
        return replace(
            peak,
            complete=len(whole) < RING and missing <= _ROUNDED * peak.nbytes,
            saved=self._save or "",
            events=len(trace),
            added_seconds=self._added_seconds + perf_counter() - began,
        )

    def _held(self) -> dict[int, str]:
        """What is held now, by address."""
        found = find(self._namespace)
        return {s.address: s.ways[0].kind for s in found if s.device == str(self._device)}

    def _note(self, kinds: Kinds) -> None:
        self._notes.append((time_ns() // 1000, kinds))

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            leaves: list[Any] = []
            with self._measured("reading a graph for the peak of memory"):
                leaves = self._note_graph(tensors)
            start, line = time_ns() // 1000, innermost()
            try:
                return run(tensors, *args, **kwargs)
            finally:
                self._backwards.append((start, time_ns() // 1000, _written(line)))
                with self._measured("reading gradients for the peak of memory"):
                    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
                    self._note({_address(grad): "gradient" for grad in grads})

        return backward

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        """Count the time of reading as the recording's, and keep a fault of our own."""
        began = perf_counter()
        with faults.kept(what):
            yield
        self._added_seconds += perf_counter() - began

    def _note_graph(self, tensors: Any) -> list[Any]:
        """Note what the graphs that end in some tensors have saved; the leaves that they reach."""
        leaves, saved = [], {}
        for value, step in _graph(tensors):
            if step == ".variable":
                leaves.append(value)
            else:
                saved[_address(value)] = SAVED
        for leaf in leaves:
            if isinstance(leaf, torch.nn.Parameter):
                saved[_address(leaf)] = "parameter"
        self._note(saved)
        return leaves

    def _line(self, entry: Mapping[str, Any]) -> str:
        frame = users(entry.get("frames", ()))
        if frame is not None:
            file, line, name = frame["filename"], frame["line"], frame["name"]
            function = "" if name.startswith("<") else name
            return _written(UserLine(line, source_of(file, line), function, file))
        # A thread of autograd has no line of its own.
        when = entry["time_us"]
        return next((line for a, b, line in self._backwards if a <= when <= b), UNKNOWN)


def _graph(tensors: Any) -> Iterator[tuple[Any, str]]:
    """List what the graphs behind some tensors hold, each with the step that reaches it."""
    nodes = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for value, step in edges_of_node(nodes.pop()):
            if isinstance(value, torch.Tensor):
                yield value, step
            elif step.startswith(": ") and value not in seen:
                seen.add(value)
                nodes.append(value)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(line: UserLine | None) -> str:
    if line is None:
        return UNKNOWN
    return f"{line.place}: {line.source}" if line.source else line.place


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
