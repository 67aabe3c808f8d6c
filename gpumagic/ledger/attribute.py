"""Count the copies between devices, and the host's waits, at each line of the user's code.

Call `counts(what, tensor)` before a copy or wait, and pass the result to `add` afterwards. A watch
is a context whose calls are counted, such as `with gpumagic.watch()` or a `%%ongpu` cell.
"""

import itertools
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from gpumagic.errors import CrossDeviceWarning, ImplicitCopyError
from gpumagic.ledger import entry
from gpumagic.ledger.ledger_view import EXPLICIT, advise
from gpumagic.usercode.files import in_cell, line_at, line_of, module_of

_getframe, _ident = sys._getframe, threading.get_ident
HOST = -1  # the result of `Tensor.get_device` for a tensor on the CPU
What = tuple[str, str, int, int, bool]
"""A call's kind ("copy" or "wait"), operator, two device ordinals (from, to) and `non_blocking`."""
# Modules that define tensor methods. Copies inside these methods count as the user's copies.
_METHODS = ("torch._tensor", "torch.functional")


@dataclass(eq=False)
class ActiveWatch:
    """The state of a running watch."""

    tally: entry.Tally
    alarm: "Alarm | None" = None  # called before a copy or wait
    outer: "ActiveWatch | None" = None  # the enclosing watch, which counts the same calls
    live: bool = True  # False after the watch has ended; threads with this watch may still run
    thread: int = field(default_factory=_ident)  # the thread that began the watch


current: ContextVar[ActiveWatch | None] = ContextVar("gpumagic_watch", default=None)
_current = current.get
gpu = "cuda"  # torch's device type of the GPUs; "mps" on a Mac
running: tuple[ActiveWatch, ...] = ()
"""All running watches of all threads. The tuple is replaced, never changed in place."""


class _Here(threading.local):
    copies = 0  # copies counted on this thread
    reads = 0  # reads of GPU memory by the host, counted on this thread
    within = ""  # name of the running operator, given to the waits inside that operator
    serial = 0  # unique number of the running call if it may wait several times (print); else 0
    counted = 0  # the last `serial` that `add` counted


here = _Here()
serials = itertools.count(1)
_nobody = ActiveWatch(entry.Tally(), live=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing within the context, for gpumagic's own copies and waits."""
    before = current.set(_nobody)
    try:
        yield
    finally:
        current.reset(before)


def watches() -> tuple[ActiveWatch, ...]:
    """Return the watches that count this thread's calls now."""
    watch, found = _current(), []
    if watch is _nobody:
        return ()
    if watch is not None and watch.outer is None and watch.live:
        return (watch,)  # a fast path, because every copy and wait calls this function
    while watch is not None:
        if watch.live:
            found.append(watch)
        watch = watch.outer
    if not found and running:
        # Use other threads' watches: watched code or autograd may have started this thread.
        found = [w for w in running if w.thread != _ident()]
    return tuple(found)


def counts(what: What, tensor: Any) -> Sequence[entry.Count]:
    """Call each watch's alarm, which may raise. Return each watch's `Count` of the call `what`."""
    __tracebackhide__ = True
    if not (watching := watches()):
        return ()
    inner: Any = _getframe(3)
    kind = entry.LIBRARY
    while inner is not None and (kind := entry.kind_of(inner.f_code.co_filename)) == entry.IN_FRONT:
        inner = inner.f_back
    # Keys have ids, because hashing code is slow. A thread's id makes a lock unnecessary.
    user: FrameType | None
    if kind == entry.USER:
        user, via = inner, ""
        key: tuple[Any, ...] = (what, id(inner.f_code), inner.f_lasti, _ident())
    else:
        user, via = entry.locate(inner, watching)
        via = entry.ENGINE if inner is None else via  # autograd's C++ threads have no frame
        key = (what, via, _at(inner), _at(user), _ident())
    found = []
    for watch in watching:
        if (count := watch.tally.counts.get(key)) is None:
            new = count_for(*what[:2], _device(what[2]), _device(what[3]), via, user, inner)
            count = watch.tally.add(key, new)
        found.append(count)
        alarm = watch.alarm
        # Only the innermost of nested watches warns. Every strict watch may raise.
        if alarm is not None and not count.warned and (alarm.strict or watch is watching[0]):
            alarm(count, tensor)
    return found


def _device(ordinal: int) -> str:
    return "cpu" if ordinal == HOST else f"{gpu}:{ordinal}"


def _at(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame.f_code), frame.f_lasti)


def count_for(
    kind: str,
    operator: str,
    source: str,
    destination: str,
    via: str,
    user: FrameType | None,
    inner: FrameType | None,
) -> entry.Count:
    """Return a new count. `inner` is the calling frame; `user` is the user's innermost frame."""
    at = None if user is None else in_cell(user)
    called_in = (None, 0) if inner is None else (inner.f_code, inner.f_lasti)
    place = (at or (None, 0)) if inner is user else called_in
    if operator == "copy_" and destination != "cpu" and _subscripts(*place):
        operator = "index"
    module = module_of(inner.f_code.co_filename) if inner and not via else ""
    return entry.Count(
        kind,
        operator,
        source,
        destination,
        implicit=entry.is_implicit(operator, via, *place),
        via=via,
        within="" if module in _METHODS else module,
        at=at,
        kept=[None if frame is None else frame.f_code for frame in (user, inner)],
    )


def _subscripts(code: CodeType | None, at: int) -> bool:
    name = entry.opcode(code, at)
    # Since Python 3.14 a subscript is the binary operator with number 26.
    binary = code is not None and name == "BINARY_OP" and code.co_code[at + 1] == 26
    return binary or name in ("BINARY_SUBSCR", "BINARY_SLICE")


def add(found: Sequence[entry.Count], nbytes: int, seconds: float, blocking: bool) -> None:
    """Add one successful copy or wait to the counts that `counts` returned."""
    for count in found:
        count.count += 1
        count.nbytes += nbytes
        count.seconds = (count.seconds or 0.0) + seconds
        count.blocking += blocking
    if here.serial and here.counted != here.serial:
        for count in found:
            count.calls += 1
        here.counted = here.serial


@dataclass(eq=False)
class Alarm:
    """Warn of repeated copies and waits in one watch, at most once for each line."""

    strict: bool = False  # raise at the first implicit copy or wait
    _lines: set[tuple[str, int]] = field(default_factory=set)

    def __call__(self, count: entry.Count, tensor: Any) -> None:
        """Raise `ImplicitCopyError` for an implicit call if `strict`; else warn if calls repeat."""
        __tracebackhide__ = True
        implicit = count.implicit and count.via not in (entry.LOADER, entry.ENGINE, entry.DISPLAY)
        from_host = implicit and count.operator == "copy_" and tensor.get_device() == HOST
        if from_host and tensor.dim() == 0:
            return
        if implicit and self.strict:
            index = f"move the index first: index.to('{count.destination}')"
            named = "name the device: x.cpu() or x.to(...) first"
            raise refusal(count, {"index": index}.get(count.operator, named))
        # Do not warn of a library's calls, or of explicit copies to a GPU.
        if count.within or not (implicit or (count.destination == "cpu" and not count.via)):
            count.warned = True
        elif _is_frequent(count):
            self._warn(count)

    def _warn(self, count: entry.Count) -> None:
        __tracebackhide__ = True
        count.warned = True
        if count.at is None:
            return
        place = count.at[0].co_filename, line_of(*count.at)
        if place in self._lines:
            return
        self._lines.add(place)
        advice = advise(count.entry(at_least=2))
        said = words(count) + " again and again" * bool(count.count)
        said += f"; {advice.text}" if advice else ""
        # Use an empty registry: Python's would hide an equal warning in a later cell.
        warnings.warn_explicit(said, CrossDeviceWarning, *place, registry={})


def _is_frequent(count: entry.Count) -> bool:
    if count.via == entry.PRINT:
        return count.calls + 1 >= entry.OFTEN and here.counted != here.serial
    if not count.implicit:
        return count.count + 1 >= EXPLICIT
    return count.count + 1 >= (2 if count.operator == "index" else entry.OFTEN)


def words(count: entry.Count) -> str:
    """Describe a copy, a wait, or a result that is not on the requested device."""
    where = f"`{code}` " if (code := count.entry().code) else ""
    if count.kind == "copy":
        what = "its index" if count.operator == "index" else "data"
        return f"{where}copies {what} from {count.source} to {count.destination}"
    if count.kind == "placement":
        return f"{where}is on {count.destination} instead of {count.source}"
    return f"{where}makes the host wait for {count.source}"


def refusal(count: entry.Count, instead: str) -> ImplicitCopyError:
    """Return the error that a strict watch raises for an implicit copy or wait."""
    line = "" if count.at is None else f"{line_at(*count.at).place}: "
    return ImplicitCopyError(f"{line}{words(count)}, which strict mode forbids; {instead}")
