"""Record what a stretch of code allocates on one GPU, and show what the peak was made of, by line.

torch's own record of its allocator is turned on meanwhile, a ring of the last 100,000 events; it
costs about 2 µs for each. What the user records already is read, and left as it is.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any, NamedTuple

import torch
from torch.cuda import memory

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.display import table
from gpumagic.display.table import Column, Shown, block, coded, tag
from gpumagic.display.units import duration, size
from gpumagic.errors import GpuError
from gpumagic.memory.allocator import users
from gpumagic.memory.memory_report import share
from gpumagic.usercode.files import UserLine, innermost, source_of

BEFORE = "before the cell"
UNKNOWN = "line not known"
RING = 100_000
_ROUNDED = 0.05
"""A share of the allocated bytes: a real allocator rounds up, and records the request."""
_C: Any = torch._C
_GRAPHS = (torch.autograd, torch.autograd.graph)
_RUN = "_engine_run_backward"


class PeakLine(NamedTuple):
    """Record the bytes that one line had allocated at the peak."""

    line: str
    nbytes: int


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
    lines : tuple of PeakLine
        The bytes by the line that allocated them, the most first; ``"before the cell"`` is a line
        too. They add up to `nbytes`.
    complete : bool
        False if there were more events than the record holds: the first ones are missing.
    saved : str
        The file of torch's own snapshot, for its viewer.
    events : int
        How many events of the allocator were recorded.
    refused : tuple of (int, str) or None
        Where it last ran out of memory: the bytes that were wanted, and the line.
    added_seconds : float
        What reading the record added to the cell's time, without torch's about 2 µs for each event.
    """

    device: str
    nbytes: int
    seconds: float
    line: str
    lines: tuple[PeakLine, ...]
    complete: bool = True
    saved: str = ""
    refused: tuple[int, str] | None = None
    events: int = 0
    added_seconds: float = 0.0


def replay(
    before: Iterable[Mapping[str, Any]],
    trace: Iterable[Mapping[str, Any]],
    line: Callable[[Mapping[str, Any]], str],
    device: str,
    start_us: int = 0,
) -> tuple[MemoryPeak, int]:
    """Follow a trace from the blocks before it; return the peak, and the bytes at the end.

    `line` returns the line of an entry.
    """
    live = {each["address"]: (each["size"], BEFORE) for each in before}
    now = most = sum(nbytes for nbytes, _ in live.values())
    at, at_line, refused = start_us, BEFORE, None
    held, freed = Counter({BEFORE: now}), Counter[str]()  # by line: now, and since the peak
    for entry in sorted(trace, key=itemgetter("time_us")):
        if entry["action"] == "oom":
            refused = entry["size"], line(entry)
        elif entry["action"] == "alloc":
            live[entry["addr"]] = nbytes, name = in_blocks(entry["size"]), line(entry)
            now += nbytes
            held[name] += nbytes
            freed[name] -= nbytes
            if now > most:
                most, at, at_line = now, entry["time_us"], name
                freed.clear()
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            nbytes, name = live.pop(entry["addr"])
            now -= nbytes
            held[name] -= nbytes
            freed[name] += nbytes
    held.update(freed)
    peak = MemoryPeak(
        device=device,
        nbytes=most,
        seconds=max(at - start_us, 0) / 1e6,
        line=at_line,
        lines=tuple(PeakLine(*each) for each in held.most_common() if each[1]),
        refused=refused,
    )
    return peak, now


class PeakRecorder:
    """Record one stretch of code: `start`, run the code, then always `stop`."""

    def __init__(self, device: torch.device, save: str | None = None) -> None:
        if device.type != "cuda" or not hasattr(_C, "_cuda_memorySnapshot"):
            raise GpuError(f"--memory is about the memory of a CUDA GPU, and {device} is none")
        if save and not Path(save).absolute().parent.is_dir():
            raise GpuError(f"--save: there is no folder {Path(save).absolute().parent}")
        self._device, self._index, self._save = device, device.index or 0, save
        self._backwards: list[tuple[int, int, str]] = []
        self._stack = ExitStack()
        self._before: list[Mapping[str, Any]] = []
        self._start = 0

    def start(self) -> None:
        """Begin to record; memory allocated now counts as there before."""
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
            snapshot = memory._snapshot()
            if self._save:
                Path(self._save).write_bytes(pickle.dumps(snapshot))
        whole = snapshot["device_traces"][self._index]
        trace = [entry for entry in whole if entry["time_us"] >= self._start]
        peak, now = replay(self._before, trace, self._line, str(self._device), self._start)
        missing = abs(now - torch.cuda.memory_allocated(self._index))
        return replace(
            peak,
            complete=len(whole) < RING and missing <= _ROUNDED * peak.nbytes,
            saved=self._save or "",
            events=len(trace),
            added_seconds=perf_counter() - began,
        )

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Note when and in which line each backward pass runs: autograd's threads have no line."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            start, line = time_ns() // 1000, innermost()
            try:
                return run(*args, **kwargs)
            finally:
                self._backwards.append((start, time_ns() // 1000, _written(line)))

        return backward

    def _line(self, entry: Mapping[str, Any]) -> str:
        frame = users(entry.get("frames", ()))
        if frame is not None:
            file, line, name = frame["filename"], frame["line"], frame["name"]
            function = "" if name.startswith("<") else name
            return _written(UserLine(line, source_of(file, line), function, file))
        when = entry["time_us"]
        return next((line for a, b, line in self._backwards if a <= when <= b), UNKNOWN)


def _written(line: UserLine | None) -> str:
    if line is None:
        return UNKNOWN
    return f"{line.place}: {line.source}" if line.source else line.place


_LINES = 8


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
    if peak.line == BEFORE:
        return f"{words}before the cell"
    return f"{words}{duration(peak.seconds)} after the start, at {_at(peak.line)}"


def _at(line: str) -> str:
    place, _, code = line.partition(": ")
    return f"{place}: `{code}`" if code else place


def _columns(peak: MemoryPeak) -> list[Column]:
    """Return the columns of the first lines, and one row for all others."""
    rows, rest = peak.lines[:_LINES], peak.lines[_LINES:]
    if rest:
        rows += (PeakLine(f"{len(rest):,} more", sum(line.nbytes for line in rest)),)
    return [
        Column("by line", [row.line for row in rows], fit="cut", css="gm-code"),
        Column("memory", [size(row.nbytes) for row in rows], number=True),
        Column("share", [share(row.nbytes, peak.nbytes) for row in rows], number=True),
    ]


def _notes(peak: MemoryPeak) -> list[str]:
    events = f"{peak.events:,} event{'s' * (peak.events != 1)}"
    found = [f"Recording {events} added up to {duration(peak.added_seconds)} to the cell's time."]
    if not peak.complete:
        found.append("More happened than the record holds: what came first is missing.")
    if peak.saved:
        found.append(f"{peak.saved} is for the viewer at https://docs.pytorch.org/memory_viz")
    return found
