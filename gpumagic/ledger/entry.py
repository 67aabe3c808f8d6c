"""Record and count each copy and each wait by line, operator and devices.

Entries are plain data. Repeated calls share one count, so loops do not make a ledger longer.
"""

import dis
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from gpumagic.display.table import Shown
from gpumagic.usercode import files

OFTEN = 16
"""Minimum number of calls at one line for a warning. Fewer calls, say one per epoch, are fine."""


@dataclass(slots=True)
class Entry:
    """Record all calls of one operator in one expression."""

    kind: str  # "copy", "wait" (of the host), or "placement" (result not on the requested device)
    operator: str  # in torch: "copy_", "item", "index" …; for JAX, see jax_copies.py
    source: str  # a device, such as "cuda:1" or "cpu"
    destination: str
    count: int = 0  # number of copies or waits
    nbytes: int = 0  # total; waits read few bytes, such as one element
    seconds: float | None = 0.0  # duration of the copies or of the host's waits; None if unknown
    implicit: bool = False  # whether the code named no device, as in `.item()` or `print`
    where: files.UserLine | None = None  # the user's line; None if no user code was found
    code: str = ""  # the expression in that line
    via: str = ""  # cause of an indirect call: PRINT, LOADER, DISPLAY or ENGINE; else empty
    within: str = ""  # the library's module that made the call, such as "torch.optim.lbfgs"
    calls: int = 0  # number of calls; one call, such as a print, may wait several times
    repeats: int = 0  # copies that sent the same unchanged tensor as the previous copy
    blocking: int = 0  # copies and waits that blocked the host
    pinned: bool | None = None  # whether host memory was pinned; None if this varied or is unknown
    names: tuple[str, ...] = ()  # variables whose values were, or contained, the copied arrays
    framework: str = ""  # "JAX" for JAX's arrays; empty for torch's tensors
    unsized: bool = False  # whether `nbytes` lacks copies of unknown size

    @property
    def file(self) -> str | None:
        """The label of the user's file: ``"In [3]"`` or ``"train.py"``; None without user code."""
        return None if self.where is None else self.where.label

    @property
    def line(self) -> int | None:
        """The line's number in its cell or file."""
        return None if self.where is None else self.where.line


@dataclass(frozen=True, repr=False)
class Ledger(Shown):
    """Hold every copy between devices and every wait of a run; display them as a table."""

    _view = "gpumagic.ledger.ledger_view"
    entries: tuple[Entry, ...] = ()  # sorted by file and line
    virtual: bool = False  # whether the GPUs were virtual; times then say nothing about real GPUs
    predicted: bool = False  # whether the ledger is from a dry run, which has no times

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def copies(self) -> tuple[Entry, ...]:
        """The entries that are copies."""
        return tuple(e for e in self.entries if e.kind == "copy")

    @property
    def transfers(self) -> int:
        """Number of copies between devices."""
        return sum(e.count for e in self.copies)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies between devices."""
        return sum(e.nbytes for e in self.copies)

    @property
    def waits(self) -> int:
        """Number of times that the host waited for a GPU, not counting blocking copies."""
        return sum(e.count for e in self.entries if e.kind == "wait")

    @property
    def implicit(self) -> int:
        """Number of implicit copies and waits."""
        return sum(e.count for e in self.entries if e.implicit)


def merged(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Merge entries with equal expression, operator, `via` and devices. Sort the result by line."""
    found: dict[tuple[object, ...], Entry] = {}
    for e in entries:
        place = e.where and (e.where.file, e.where.line, e.code)
        ends = e.source, e.destination
        key = (place, e.kind, e.operator, *ends, e.implicit, e.via, bool(e.within))
        found[key] = _sum(found[key], e) if key in found else e
    return tuple(sorted(found.values(), key=lambda e: (e.file or "~", e.line or 0)))


def _sum(a: Entry, b: Entry) -> Entry:
    summed = ("count", "nbytes", "calls", "repeats", "blocking")
    return replace(
        a if a.count >= b.count else b,
        seconds=None if a.seconds is None or b.seconds is None else a.seconds + b.seconds,
        unsized=a.unsized or b.unsized,
        pinned=a.pinned if a.pinned == b.pinned else None,
        names=tuple(dict.fromkeys((*a.names, *b.names))),
        **{name: getattr(a, name) + getattr(b, name) for name in summed},
    )


# Kinds of frame. IN_FRONT frames run code of gpumagic or torch/_ops.py. LIBRARY frames run a
# library's code, USER frames the user's code. The other kinds are causes, as in `Entry.via`.
IN_FRONT, LIBRARY, USER = "in front", "library", "user"
PRINT, LOADER, DISPLAY, ENGINE = "print", "loader", "display", "backward"
_SPECIAL = {
    os.path.join("torch", "_ops.py"): IN_FRONT,  # its functions call the wrapped kernels
    os.path.join("torch", "_tensor_str.py"): PRINT,
    os.path.join("torch", "autograd", "graph.py"): ENGINE,
    os.path.join("torch", "autograd", "__init__.py"): ENGINE,
    os.path.join("gpumagic", "placement", "dataloader.py"): LOADER,
    os.path.join("IPython", "core", "displayhook.py"): DISPLAY,
    os.path.join("IPython", "core", "formatters.py"): DISPLAY,
}

# Prefixes of bytecode instructions for subscripts, operators and comparisons, which are not calls.
_NO_CALL = ("BINARY_", "INPLACE_", "COMPARE_", "STORE_SUBSCR", "STORE_SLICE", "UNARY_", "CONTAINS_")
# Names of functions that copy or read values without naming a device.
_READING = {
    *("__contains__", "__getitem__", "__setitem__", "getitem", "setitem", "index_put"),
    *("index_put_", "bool", "float", "int", "str", "format", "item", "print", "repr", "tolist"),
}


@lru_cache(maxsize=4096)  # bounded, because each cell adds a file name
def kind_of(file: str) -> str:
    """Return the kind of the frames that run a file's code."""
    if files.is_users(file):
        return USER
    ends = (kind for end, kind in _SPECIAL.items() if file.endswith(os.sep + end))
    return next(ends, IN_FRONT if files.is_ours(file) else LIBRARY)


def locate(frame: FrameType | None, watches: Iterable[Any] = ()) -> tuple[FrameType | None, str]:
    """Search `frame` and its callers. Return the user's innermost frame and the cause for `via`."""
    via, first = "", frame
    while frame is not None:
        if (kind := kind_of(frame.f_code.co_filename)) == USER:
            return frame, via
        if kind not in (IN_FRONT, LIBRARY) and (kind != ENGINE or frame is first):
            via = kind
        frame = frame.f_back
    # A library's thread runs no user code. Use the user's frame in a thread that began a watch.
    others = (locate(sys._current_frames().get(watch.thread))[0] for watch in watches)
    return next(filter(None, others), None), via


def is_implicit(operator: str, via: str, code: CodeType | None, at: int) -> bool:
    """Whether Python code called an operator without naming a device; False if unknown."""
    if operator == "synchronize" or via in (LOADER, ENGINE):
        return False
    if operator != "copy_" or via:
        return True
    if code is None:  # an autograd thread, which runs no Python code
        return False
    return opcode(code, at).startswith(_NO_CALL) or files.called(code, at) in _READING


def opcode(code: CodeType | None, at: int) -> str:
    """Return the name of the instruction at offset `at`; empty if there is none."""
    return dis.opname[code.co_code[at]] if code and 0 <= at < len(code.co_code) else ""


_MOST = 4096  # after this many counts, count by line only, because a loop may recompile code
before_reading: list[Callable[[], None]] = []
"""Functions to call before counts are read; they wait for pending measurements."""


@dataclass(slots=True, eq=False)
class Count(Entry):
    """Count the calls of one bytecode instruction; `entry` finds the line and the expression."""

    at: tuple[CodeType, int] | None = None  # the user's code object, and the instruction's offset
    kept: object = None  # keeps code objects alive, because the key in `Tally.counts` has their ids
    timed: int = 0  # number of copies that CUDA events timed; 0 without events
    looks: int = 0  # number of copies that `look_at` checked
    last: weakref.ref[Any] | None = None  # the tensor that `look_at` saw last
    version: int | None = None  # the version counter of `last`, to notice changes
    warned: bool = False

    def add(self, nbytes: int, seconds: float | None) -> None:
        """Count one call; a copy to the host counts as blocking."""
        self.count += 1
        self.nbytes += nbytes
        self.seconds = None if self.seconds is None or seconds is None else self.seconds + seconds
        self.calls += 1
        self.blocking += self.destination == "cpu"

    def look_at(self, tensor: Any, host: Any) -> None:
        """Record whether a copy repeats the previous one, and whether host memory is pinned."""
        version = None if tensor.is_inference() else tensor._version
        if self.last is not None and self.last() is tensor and self.version == version:
            self.repeats += 1
        self.last, self.version = weakref.ref(tensor), version
        if host.get_device() < 0:
            pinned = bool(host.is_pinned())
            self.pinned = pinned if not self.looks or self.pinned is pinned else None
        self.looks += 1

    def entry(self, at_least: int = 0) -> Entry:
        """Return the count as an entry of the ledger, with at least `at_least` calls."""
        known = {field.name: getattr(self, field.name) for field in fields(Entry)}
        known["count"] = max(self.count, at_least)
        calls = self.calls if self.via == PRINT else self.calls or self.count
        known["calls"] = max(calls, at_least)
        if self.timed:  # assume that the other copies took as long on average
            known["seconds"] = (self.seconds or 0.0) * self.count / self.timed
        if self.looks > 1:  # the first copy repeats none
            known["repeats"] = round(self.repeats * (self.count - 1) / (self.looks - 1))
        if self.at is not None:
            known |= {"where": files.line_at(*self.at), "code": files.expression(*self.at)}
        return Entry(**known)


@dataclass(eq=False)
class Tally:
    """The counts of one watch: a context such as `with gpumagic.watch()`, or a `%%ongpu` cell."""

    virtual: bool = False  # whether the devices are virtual
    counts: dict[tuple[Any, ...], Count] = field(default_factory=dict)  # by call and instruction
    _lock: Any = field(default_factory=threading.RLock)  # reentrant: finalizers may call `add`

    def add(self, key: tuple[Any, ...], new: Count) -> Count:
        """Return the count under `key`; if there is none, add and return `new`."""
        with self._lock:
            if len(self.counts) >= _MOST and new.at is not None:
                key = (key[0], new.at[0].co_filename, files.line_of(*new.at), key[-1])
            return self.counts.setdefault(key, new)

    def ledger(self) -> Ledger:
        """Return the counts so far; on a real GPU, wait for the timed copies."""
        for wait in before_reading:
            wait()
        with self._lock:
            counts = [*self.counts.values()]
        return Ledger(merged(count.entry() for count in counts if count.count), self.virtual)


@dataclass(frozen=True)
class Memory:
    """Record the bytes of a device's arrays: before a cell, at the peak, and at the cell's end."""

    device: str
    peak: int
    allocated: int
    before: int
    allocations: int = 1
