"""Read torch's allocator: the block of a tensor, the line that allocated the block, memory peaks.

A block is the memory that torch's allocator returns for one storage. A tensor counts with its whole
block, so that sizes add up to torch's total. Virtual GPUs always record the line of each
allocation; on a real GPU, `record` turns this on. A stamp names the cell that allocated a block.
"""

import pickle
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import signature
from operator import itemgetter
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any

import torch
from torch.cuda import memory

from gpumagic.device import has_virtual
from gpumagic.device.caching_allocator import in_blocks
from gpumagic.display import table
from gpumagic.display.table import Column, Shown, block, coded, tag
from gpumagic.display.units import duration, size
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import Place
from gpumagic.memory.memory_report import Made, share
from gpumagic.usercode.files import UserLine, innermost, is_users, label, source_of, swap_attribute

_C: Any = torch._C
# A subclass may override these methods, so they are taken from torch's C class.
_number, _storage = (vars(_C.TensorBase)[name] for name in ("get_device", "untyped_storage"))
# Unlike `data_ptr`, this function does not make a copy-on-write tensor copy its data.
_data_address = _C._data_address


def is_native() -> bool:
    """Whether torch uses its native allocator. CUDA's asynchronous one does not list blocks."""
    backend = getattr(_C, "_cuda_getAllocatorBackend", lambda: "native")
    return bool(backend() == "native")


class Allocator:
    """Find tensors' blocks in torch's snapshot. Without a snapshot, a storage counts as a block."""

    def __init__(self, segments: list[Any] | None = None) -> None:
        segments = _segments() if segments is None else segments
        self._lists_blocks = segments is not None
        self._blocks: dict[int, dict[int, Mapping[str, Any]]] = {}
        for segment in segments or ():
            used = [each for each in segment["blocks"] if each["state"] == "active_allocated"]
            blocks = self._blocks.setdefault(segment["device"], {})
            blocks.update((each["address"], each) for each in used)
        self._starts = {number: sorted(blocks) for number, blocks in self._blocks.items()}
        self._made: dict[tuple[int, str], Made | None] = {}  # by a stack's id and a stamp

    @property
    def total(self) -> int:
        return sum(each["size"] for blocks in self._blocks.values() for each in blocks.values())

    def blocks(self, number: int) -> list[Mapping[str, Any]]:
        return [*self._blocks.get(number, {}).values()]

    def place(self, tensor: Any) -> Place | None:
        """Return the address and size of a GPU tensor's block; None for any other tensor."""
        if (number := _number(tensor)) < 0:
            return None
        try:
            return self._at(number, _data_address(tensor)) or self._alone(_storage(tensor))
        except (RuntimeError, NotImplementedError):  # the tensor has no storage
            return None

    def block(self, place: Place) -> Place | None:
        """Return torch's block that contains the address of `place`; None if there is none."""
        return self._at(_ordinal(place.device), place.address)

    def made_in(self, device: str, addresses: Iterable[int]) -> Made | None:
        """Return the line that allocated most of the bytes at these addresses; None if unknown."""
        blocks, found = self._blocks.get(_ordinal(device), {}), Counter[tuple[int, str]]()
        for address in addresses:
            if (each := blocks.get(address)) is not None:
                stamp = each.get("user_metadata") or self._stamps.get((device, address), "")
                origin = id(each["frames"]), stamp
                found[origin] += each["size"]
                if origin not in self._made:
                    self._made[origin] = _made(each["frames"], stamp)
        return self._made[found.most_common(1)[0][0]] if found else None

    @cached_property
    def _stamps(self) -> dict[tuple[str, int], str]:
        """Map each GPU and address in torch's trace to the stamp of the latest allocation there."""
        recorded = _C._cuda_isHistoryEnabled()
        traces: list[Any] = memory._snapshot()["device_traces"] if recorded else []
        return {
            (f"cuda:{number}", entry["addr"]): entry.get("user_metadata", "")
            for number, trace in enumerate(traces)
            for entry in trace
            if entry["action"] == "alloc"
        }

    def _at(self, number: int, address: int) -> Place | None:
        starts = self._starts.get(number, [])
        if not (before := bisect_right(starts, address)):
            return None
        start = starts[before - 1]
        nbytes = self._blocks[number][start]["size"]
        return Place(f"cuda:{number}", start, nbytes) if address < start + nbytes else None

    def _alone(self, storage: Any) -> Place | None:
        """Return the storage itself as a block if the allocator does not list blocks."""
        device, address = storage.device, storage.data_ptr()
        if (self._lists_blocks and device.type == "cuda") or not address:
            return None  # another library's memory, or no memory
        return Place(str(device), address, in_blocks(storage.nbytes()))


def _ordinal(device: str) -> int:
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else -1


def clear_workspaces() -> None:
    """Give cuBLAS's workspaces back to torch's allocator; the next matmul allocates a new one."""
    # Pools other than (0, 0) belong to captured CUDA graphs, which may use the workspaces.
    segments = None if has_virtual() else _segments()
    pools = {tuple(segment.get("segment_pool_id", ())) for segment in segments or ()}
    if segments and pools <= {(), (0, 0)}:
        _C._cuda_clearCublasWorkspaces()


def _segments() -> list[Any] | None:
    if not (torch.cuda.is_initialized() and hasattr(_C, "_cuda_memorySnapshot") and is_native()):
        return None
    snapshot: Any = torch.cuda.memory_snapshot
    lean = "include_traces" in signature(snapshot).parameters
    return list(snapshot(include_traces=False) if lean else snapshot())


RING = 10_000  # number of latest events that `record` keeps in torch's trace, for `_stamps`
_recording = False  # whether `record` turned torch's recording on


def users(frames: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the innermost recorded frame of the user's code; None if there is none."""
    return next((frame for frame in frames if is_users(frame["filename"])), None)


def _made(frames: Iterable[Mapping[str, Any]], stamp: str) -> Made | None:
    """Return the user's innermost line. If another cell ran the line, `ran_in` names that cell."""
    frame = users(frames)
    if frame is None or frame["filename"].startswith("<timed "):  # `%%time` changes line numbers
        return Made(stamp) if stamp else None
    name = label(frame["filename"])
    if stamp and _is_cell(frame):
        return Made(stamp, frame["line"])
    cell = next(filter(_is_cell, frames), None)
    ran_in = stamp or (label(cell["filename"]) if cell is not None else "")
    if ran_in == name:
        return Made(name, frame["line"])
    return Made(name, frame["line"], ran_in + (f", line {cell['line']}" if cell else ""))


def _is_cell(frame: Mapping[str, Any]) -> bool:
    return frame["name"] == "<module>" and label(frame["filename"]).startswith("In [")


def record(on: bool) -> str:
    """Turn torch's recording of allocations on or off; return a message about the new state."""
    global _recording
    if has_virtual():
        return "virtual GPUs always record the allocating lines; --record changes nothing"
    if not hasattr(_C, "_cuda_memorySnapshot"):
        raise GpuError("--record is for CUDA GPUs, and this process has none")
    running = torch.cuda.is_initialized() and _C._cuda_isHistoryEnabled()
    if running and not _recording:
        return "your code already records memory history; that recording stays on"
    if on and not running:
        memory._record_memory_history("all", "alloc", "python", max_entries=RING)
    if running and not on:
        memory._record_memory_history(None)
    _recording = on
    if on:
        return "allocating lines are recorded, at about 2 µs per allocation; --record off ends it"
    return "lines are no longer recorded" if running else "--record was not on"


def forget() -> None:
    """Before the extension is unloaded, stop the recording that `record` started."""
    if _recording:
        record(on=False)


BEFORE = "before the cell"
UNKNOWN = "line not known"
ROUNDED_UP = "rounding up by the allocator"
PEAK_RING = 100_000  # maximum number of events recorded for a peak
_MISSING = 0.05  # fraction of the peak by which replay and snapshot may differ due to other threads
_GRAPHS = (torch.autograd, torch.autograd.graph)  # modules that call `_RUN` for a backward pass
_RUN = "_engine_run_backward"


@dataclass(frozen=True, repr=False)
class MemoryPeak(Shown):
    """Record the peak of a cell's memory on one GPU, and the lines that allocated the memory."""

    device: str  # "cuda:0"
    nbytes: int  # allocated by torch's allocator at the peak
    seconds: float  # from the cell's start to the peak
    line: str  # line of the allocation that reached the peak: "line 7: loss.backward()"
    lines: tuple[tuple[str, int], ...]  # allocating line (or `BEFORE`) and bytes, largest first
    complete: bool = True  # False if events are missing from the record
    saved: str = ""  # file of torch's snapshot; empty if not saved
    added_seconds: float = 0.0  # time to read the record; torch's time to write it is unknown


def replay(
    before: Iterable[Mapping[str, Any]],
    trace: Iterable[Mapping[str, Any]],
    line: Callable[[Mapping[str, Any]], str],
    device: str,
    start_us: int = 0,
) -> tuple[MemoryPeak, dict[int, tuple[int, str]]]:
    """Replay `trace`, beginning with the blocks `before`; return the peak and the blocks at the end
    (size and line by address). `line` returns the line of an entry of `trace` as text."""
    live = {each["address"]: (each["size"], BEFORE) for each in before}
    now = most = sum(nbytes for nbytes, _ in live.values())
    at, at_line = start_us, BEFORE
    # Bytes by line. `held`: allocated now. `freed`: freed since the peak, minus allocated since.
    held, freed = Counter({BEFORE: now}), Counter[str]()
    for entry in sorted(trace, key=itemgetter("time_us")):
        if entry["action"] == "alloc":
            live[entry["addr"]] = nbytes, name = in_blocks(entry["size"]), line(entry)
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            nbytes, name = live.pop(entry["addr"])
            nbytes = -nbytes
        else:
            continue
        now += nbytes
        held[name] += nbytes
        freed[name] -= nbytes
        if now > most:
            most, at, at_line = now, entry["time_us"], name
            freed.clear()
    held.update(freed)
    lines = tuple(each for each in held.most_common() if each[1])
    return MemoryPeak(device, most, max(at - start_us, 0) / 1e6, at_line, lines), live


class PeakRecorder:
    """Record the memory peak of code: call `start`, run the code, call `stop` (also on error)."""

    def __init__(self, device: torch.device, save: str | None = None) -> None:
        if device.type != "cuda" or not hasattr(_C, "_cuda_memorySnapshot"):
            raise GpuError(f"--memory needs a CUDA GPU, and {device} is not one")
        if save and not Path(save).absolute().parent.is_dir():
            raise GpuError(f"--save: there is no folder {Path(save).absolute().parent}")
        self._device, self._index, self._save = device, device.index or 0, save
        self._backwards: list[tuple[int, int, str]] = []
        self._stack = ExitStack()
        self._before: list[Mapping[str, Any]] = []
        self._start = 0

    def start(self) -> None:
        """Begin to record; memory that is already allocated counts as `BEFORE`."""
        if not _C._cuda_isHistoryEnabled():
            memory._record_memory_history("all", "alloc", "python", max_entries=PEAK_RING)
            self._stack.callback(memory._record_memory_history, None)
        for module in _GRAPHS:
            swap_attribute(self._stack, module, _RUN, self._timed(getattr(module, _RUN)))
        self._before = Allocator().blocks(self._index)
        self._start = time_ns() // 1000

    def stop(self, ran: float) -> MemoryPeak | None:
        """Stop recording and return the peak; `ran` is the cell's time in seconds."""
        began, cell_us = perf_counter(), time_ns() // 1000 - int(ran * 1e6)
        with self._stack:
            snapshot = memory._snapshot()
            if self._save:
                Path(self._save).write_bytes(pickle.dumps(snapshot))
        whole = snapshot["device_traces"][self._index]
        trace = [entry for entry in whole if entry["time_us"] >= self._start]
        peak, live = replay(self._before, trace, self._line, str(self._device), cell_us)
        blocks = Allocator(snapshot["segments"]).blocks(self._index)
        left = {each["address"]: each["size"] for each in blocks}
        missing = sum(left.get(at) or live[at][0] for at in left.keys() ^ live.keys())
        # Old events drop out first. If an event before `start` is left, no later event is missing.
        complete = len(trace) < max(len(whole), PEAK_RING) and missing <= _MISSING * peak.nbytes
        # torch's peak includes the unused ends of blocks, which the recorded sizes do not.
        rest = max(torch.cuda.max_memory_allocated(self._index) - peak.nbytes, 0)
        lines = Counter(dict(peak.lines)) + Counter({ROUNDED_UP if complete else UNKNOWN: rest})
        return replace(
            peak,
            nbytes=peak.nbytes + rest,
            lines=tuple(lines.most_common()),
            complete=complete,
            saved=self._save or "",
            added_seconds=perf_counter() - began,
        )

    def _timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run` to record the caller's line, as autograd's threads have no Python line."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            start, line = time_ns() // 1000, innermost()
            try:
                return run(*args, **kwargs)
            finally:
                self._backwards.append((start, time_ns() // 1000, _written(line)))

        return backward

    def _line(self, entry: Mapping[str, Any]) -> str:
        if (frame := users(entry.get("frames", ()))) is not None:
            file, line, name = frame["filename"], frame["line"], frame["name"]
            function = "" if name.startswith("<") else name
            return _written(UserLine(line, source_of(file, line), function, file))
        return next((line for a, b, line in self._backwards if a <= entry["time_us"] <= b), UNKNOWN)


def _written(line: UserLine | None) -> str:
    if line is None:
        return UNKNOWN
    return f"{line.place}: {line.source}" if line.source else line.place


_LINES = 8


def text(peak: MemoryPeak) -> str:
    rows = [*table.lines(_columns(peak), margin="  "), *(f"  {note}" for note in _notes(peak))]
    return "\n".join([*table.wrapped(_head(peak)), *rows])


def html(peak: MemoryPeak) -> str:
    rows = table.html(_columns(peak), css="gm-titled gm-section")
    notes = "".join(tag("div", note, "gm-note") for note in _notes(peak))
    return block(f"<div>{coded(_head(peak))}</div>{rows}{notes}")


def _head(peak: MemoryPeak) -> str:
    words = f"the peak of {peak.device}, {size(peak.nbytes)}, was "
    if peak.line == BEFORE:
        return words + BEFORE
    place, _, code = peak.line.partition(": ")
    at = f"{place}: `{code}`" if code else place
    return f"{words}{duration(peak.seconds)} after the start, at {at}"


def _columns(peak: MemoryPeak) -> list[Column]:
    rows, rest = [*peak.lines[:_LINES]], peak.lines[_LINES:]
    if rest:
        rows.append((f"{len(rest):,} more", sum(nbytes for _, nbytes in rest)))
    return [
        Column("by line", [line for line, _ in rows], fit="cut", css="gm-code"),
        Column("memory", [size(nbytes) for _, nbytes in rows], number=True),
        Column("share", [share(nbytes, peak.nbytes) for _, nbytes in rows], number=True),
    ]


def _notes(peak: MemoryPeak) -> list[str]:
    found = [f"Reading the record added {duration(peak.added_seconds)} to the cell's time."]
    if not peak.complete:
        found.append("The record lacks some events, so the table is incomplete.")
    if peak.saved:
        found.append(f"{peak.saved} is for the viewer at https://docs.pytorch.org/memory_viz")
    return found
