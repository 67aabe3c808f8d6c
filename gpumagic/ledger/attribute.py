"""Who counts a copy or a wait, and where: the watches that run, and the line it came from."""

import sys
import threading
from collections.abc import Sequence
from contextvars import ContextVar
from types import FrameType
from typing import Any, Protocol

from gpumagic.errors import CrossDeviceWarning
from gpumagic.ledger.counts import Count, Tally
from gpumagic.ledger.via import ENGINE, PRINT, USER, kinds, locate, of_thread
from gpumagic.usercode.files import is_ours
from gpumagic.usercode.timed_code import in_cell

_getframe, _ident = sys._getframe, threading.get_ident
HOST = -1
"""What `Tensor.get_device` says of the CPU."""


class Alarm(Protocol):
    """What is asked before a call: see `alarm`."""

    strict: bool

    def __call__(self, count: Count, tensor: Any) -> None: ...


class Target:
    """What a running watch is to the operators: where to count, and what to do at an alarm.

    Attributes
    ----------
    tally : Tally
    outer : Target or None
        The watch around this one, which counts the same.
    live : bool
        False once it ended; a task or a thread that outlives it must not count.
    thread : int
        The thread that began it.
    alarm : Alarm or None
        Called with the count before each call that is implicit, or that may be one of many; may
        raise `CrossDeviceWarning`.
    """

    __slots__ = ("alarm", "alone", "live", "outer", "tally", "thread")

    def __init__(self, tally: Tally, alarm: "Alarm | None", outer: "Target | None") -> None:
        self.tally, self.alarm, self.outer = tally, alarm, outer
        self.live = True
        self.alone = (self,)
        self.thread = _ident()


current: ContextVar[Target | None] = ContextVar("gpumagic_watch", default=None)
_current = current.get
running: tuple[Target, ...] = ()
"""All that run, in any thread. Replaced, never changed."""


class _Here(threading.local):
    copies = 0  # counted on this thread
    waiting = False  # within an operator that waits
    serial = 0  # of the printing of a tensor that goes on
    counted = 0  # the last of them that was counted


here = _Here()


def targets() -> "tuple[Target, ...]":
    """The watches that count what this thread does now."""
    target, found = _current(), []
    while target is not None:
        if target.live:
            found.append(target)
        target = target.outer
    if not found and running:
        # A thread that the watched code started, or one of autograd's.
        me = _ident()
        found = [t for t in running if t.thread != me]
    return tuple(found)


def counts(
    copy: bool,
    operator: str,
    source: int,
    destination: int,
    option: bool,
    tensor: Any,
    above: int = 2,
) -> Sequence[Count]:
    """Where one call is to be counted, after every alarm was given.

    Parameters
    ----------
    source, destination : int
        GPUs, or `HOST`.
    option : bool
        `non_blocking`.
    tensor : torch.Tensor or None
        What is copied or waited for.
    above : int
        How many frames of ours lie below the caller's.

    Raises
    ------
    CrossDeviceWarning
        Where an alarm is an error; nothing else, whatever fails in here.
    """
    __tracebackhide__ = True
    try:
        target = _current()
        # The usual case first, spelled out: it is the cost of each copy and wait.
        watching: tuple[Target, ...]
        if target is not None and target.outer is None and target.live:
            watching = target.alone
        elif not (watching := targets()):
            return []
        inner: FrameType | None
        user: FrameType | None
        try:
            inner = _getframe(above)
        except ValueError:
            inner = None
        if inner is not None and kinds[inner.f_code.co_filename] == USER:
            code, at = inner.f_code, inner.f_lasti
            # Addresses and numbers only: hashing a code object costs more than all of this. The
            # thread too: so nobody else adds to that count, and no lock is needed.
            key: tuple[Any, ...] = (operator, source, destination, option, id(code), at, _ident())
            if len(watching) == 1:
                known = watching[0].tally.get(key)
                if known is not None and known.warned:
                    return known.alone
            user, how = inner, 0
        else:
            if (
                operator == "synchronize"
                and inner is not None
                and is_ours(inner.f_code.co_filename)
            ):
                return []
            user, how = locate(inner)
            if user is None:
                user = next(filter(None, (of_thread(t.thread) for t in watching)), None)
                how = ENGINE if inner is None else how
            place = _at(inner), _at(user)
            key = (operator, source, destination, option, how, copy, place, _ident())
        found = []
        for target in watching:
            count = target.tally.get(key)
            if count is None:
                new = _new(copy, operator, source, destination, how, user, inner, tensor)
                count = target.tally.add(key, new)
            found.append(count)
            alarm = target.alarm
            if alarm is None or count.warned:
                continue
            if alarm.strict or target is watching[0]:  # one warning where watches are nested
                alarm(count, tensor)
        return found
    except CrossDeviceWarning:
        raise
    except Exception:  # noqa: BLE001  a failure of ours is not the user's
        return []


def _at(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame.f_code), frame.f_lasti)


def synchronising(index: int) -> Sequence[Count]:
    """Where a call that only waits for GPU `index` is to be counted."""
    return counts(False, "synchronize", index, HOST, False, None, above=4)


def _new(
    copy: bool,
    operator: str,
    source: int,
    destination: int,
    how: int,
    user: Any,
    inner: Any,
    tensor: Any,
) -> Count:
    kind = "mps" if tensor is not None and tensor.device.type == "mps" else "cuda"
    from_, to = ("cpu" if i == HOST else f"{kind}:{i}" for i in (source, destination))
    codes = tuple(None if frame is None else frame.f_code for frame in (user, inner))
    place = (None, 0) if user is None else in_cell(user)
    called_in = (None, 0) if inner is None else (inner.f_code, inner.f_lasti)
    return Count(
        copy,
        operator,
        from_,
        to,
        how,
        place,
        place if inner is user else called_in,
        kept=codes,
    )


def add(found: Sequence[Count], nbytes: int, seconds: float, blocking: bool) -> None:
    """Count one call that has succeeded."""
    for count in found:
        count.count += 1
        count.nbytes += nbytes
        count.seconds += seconds
        count.blocking += blocking
        if count.how == PRINT and here.counted != here.serial:
            count.calls += 1
    here.counted = here.serial
