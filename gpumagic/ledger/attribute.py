"""Attribute a copy or a wait to the watches that run and to the line that it came from.

`counts(what, tensor)` is asked before each; `add` counts it once it has succeeded.
"""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from gpumagic.ledger.entry import (
    ENGINE,
    IN_FRONT,
    LIBRARY,
    USER,
    Count,
    Tally,
    is_implicit,
    kinds,
    locate,
    of_thread,
    opcode,
)
from gpumagic.usercode.files import module_of
from gpumagic.usercode.lines import in_cell

_getframe, _ident = sys._getframe, threading.get_ident
HOST = -1
"""The result of `Tensor.get_device` for the CPU."""
What = tuple[bool, str, int, int, bool]
"""Whether it is a copy; the operator; from which GPU (or `HOST`), and to which; non_blocking."""
# A tensor's own methods, which are the user's doing.
_METHODS = ("torch._tensor", "torch.functional")


@dataclass(eq=False)
class ActiveWatch:
    """Tell operators about a running watch: where to count, and what to do at an alarm."""

    tally: Tally
    # Called before each call that may be worth a warning; may raise `ImplicitCopyError`.
    alarm: Callable[[Count, Any], None] | None = None
    strict: bool = False  # the alarm raises: then it is called in nested watches too
    outer: "ActiveWatch | None" = None  # the watch around this one, which counts the same
    live: bool = True  # until it ends; a task or a thread that outlives it must not count
    thread: int = field(default_factory=_ident)  # that began it


current: ContextVar[ActiveWatch | None] = ContextVar("gpumagic_watch", default=None)
_current = current.get
running: tuple[ActiveWatch, ...] = ()
"""All running watches, in any thread. Replaced, never changed."""


class _Here(threading.local):
    copies = 0  # counted on this thread
    reads = 0
    within = ""  # the operator whose own code makes the waits on this thread
    serial = 0  # of the call that goes on and may wait more than once, such as a printing
    counted = 0  # the last of them that was counted


here = _Here()
serials = itertools.count(1)


_nobody = ActiveWatch(Tally(), live=False)


@contextmanager
def uncounted() -> Iterator[None]:
    """Count nothing within: what gpumagic reads is none of the user's copies and waits."""
    before = current.set(_nobody)
    try:
        yield
    finally:
        current.reset(before)


def watches() -> tuple[ActiveWatch, ...]:
    """Return the watches that count this thread's calls now."""
    watch, found = current.get(), []
    if watch is _nobody:
        return ()
    while watch is not None:
        if watch.live:
            found.append(watch)
        watch = watch.outer
    if not found and running:
        # A thread that the watched code started, or one of autograd's.
        me = _ident()
        found = [w for w in running if w.thread != me]
    return tuple(found)


def counts(what: What, tensor: Any) -> Sequence[Count]:
    """Return the counts for a call, after every alarm was given; an alarm may raise."""
    __tracebackhide__ = True
    watch = _current()
    # The usual case first, spelled out: it is the cost of each copy and wait.
    if watch is not None and watch.outer is None and watch.live:
        watching: tuple[ActiveWatch, ...] = (watch,)
    elif not (watching := watches()):
        return ()
    inner: FrameType | None
    try:
        inner = _getframe(3)
    except ValueError:  # a thread where no Python runs
        inner = None
    kind = LIBRARY
    while inner is not None and (kind := kinds[inner.f_code.co_filename]) == IN_FRONT:
        inner = inner.f_back
    # Addresses and numbers only: hashing a code object costs more than all of this. The thread
    # too: so nobody else adds to that count, and no lock is needed.
    key: tuple[Any, ...]
    user: FrameType | None
    if inner is not None and kind == USER:
        user, how = inner, 0
        key = (what, id(inner.f_code), inner.f_lasti, _ident())
    else:
        user, how = _led_to(inner, watching)
        key = (what, how, _at(inner), _at(user), _ident())
    known = watching[0].tally.counts.get(key)
    if known is not None and known.warned and len(watching) == 1:
        return (known,)
    found = []
    for watch in watching:
        count = watch.tally.counts.get(key)
        if count is None:
            names = _names(what, tensor)
            new = count_for(what[0], what[1], *names, how, user, inner)
            count = watch.tally.add(key, new)
        found.append(count)
        alarm = watch.alarm
        # One warning where watches are nested.
        if alarm is not None and not count.warned and (watch.strict or watch is watching[0]):
            alarm(count, tensor)
    return found


def _led_to(
    inner: FrameType | None, watching: Sequence[ActiveWatch]
) -> tuple[FrameType | None, int]:
    """Return the user's frame that called a library, or a thread where no Python runs."""
    user, how = locate(inner)
    if user is None:
        user = next(filter(None, (of_thread(watch.thread) for watch in watching)), None)
        how = ENGINE if inner is None else how
    return user, how


def _at(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame.f_code), frame.f_lasti)


def _names(what: What, tensor: Any) -> tuple[str, str]:
    kind = "mps" if tensor is not None and tensor.device.type == "mps" else "cuda"
    source, destination = ("cpu" if i == HOST else f"{kind}:{i}" for i in what[2:4])
    return source, destination


def count_for(
    copy: bool,
    operator: str,
    source: str,
    destination: str,
    how: int,
    user: FrameType | None,
    inner: FrameType | None,
) -> Count:
    """Return a new count for an operator that the innermost frame `inner` calls."""
    code, at = (None, 0) if user is None else in_cell(user)
    called_in = (None, 0) if inner is None else (inner.f_code, inner.f_lasti)
    place = (code, at) if inner is user else called_in
    if operator == "copy_" and destination != "cpu" and _subscripts(*place):
        operator = "index"
    implicit = is_implicit(operator, how, *place)
    module = module_of(inner.f_code.co_filename) if inner and not how else ""
    within = "" if module in _METHODS else module
    codes = tuple(None if frame is None else frame.f_code for frame in (user, inner))
    return Count(copy, operator, source, destination, how, code, at, implicit, within, codes)


def _subscripts(code: CodeType | None, at: int) -> bool:
    name = opcode(code, at)
    # Since Python 3.14 a subscript is the binary operator with number 26.
    binary = code is not None and name == "BINARY_OP" and code.co_code[at + 1] == 26
    return binary or name in ("BINARY_SUBSCR", "BINARY_SLICE")


def add(found: Sequence[Count], nbytes: int, seconds: float, blocking: bool) -> None:
    """Count one call that has succeeded."""
    for count in found:
        count.count += 1
        count.nbytes += nbytes
        count.seconds += seconds
        count.blocking += blocking
    if here.serial and here.counted != here.serial:
        for count in found:
            count.calls += 1
        here.counted = here.serial
