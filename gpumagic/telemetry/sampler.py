"""Take snapshots for all subscribers, at the rate of the fastest; none without subscribers.

There are two daemon threads, and only while somebody subscribes. One asks the driver, which may
stall, and calls the subscribers. The other watches it: if a call is overdue, subscribers get the
last values with their age and a Problem.
"""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.history import History
from gpumagic.telemetry.snapshot import Problem, Snapshot

PERIODS_S = (0.25, 60.0)
"""The least and the greatest period that can be asked for, in seconds."""

# A tick counts even if it is early by this part of a period.
TOLERANCE = 0.1

Listener = Callable[[Snapshot], None]


@dataclass(eq=False)
class Subscription:
    """A subscription to a :class:`Sampler`; a context manager that closes it."""

    follow: Callable[[], None]
    listener: Listener | None
    period_s: float
    processes: bool
    closed: bool = False
    delivered_at: float = -math.inf

    def close(self) -> None:
        """Unsubscribe. Any thread may call it, repeatedly, also the listener."""
        if not self.closed:
            self.closed = True
            self.follow()

    def has_turn(self, at: float, always: bool) -> bool:
        """Whether its period is over at this moment; if so, the next one begins."""
        turn = always or at - self.delivered_at >= self.period_s * (1 - TOLERANCE)
        self.delivered_at = at if turn else self.delivered_at
        return turn

    def deliver(self, snapshot: Snapshot) -> None:
        """Call the listener; its error must not affect the others."""
        with faults.kept("calling a listener of the GPU monitor"):
            if self.listener is not None and not self.closed:
                self.listener(snapshot)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def checked(period_s: Any) -> float:
    """Return the period in seconds; raise GpuError if it is out of bounds."""
    least, greatest = PERIODS_S
    number = isinstance(period_s, int | float) and period_s == period_s
    if number and least <= period_s <= greatest:
        return float(period_s)
    fitting = min(max(period_s, least), greatest) if number else 1
    raise GpuError(
        f"a period of {period_s!r}: it must be from {least} to {greatest:g} s; type {fitting:g}"
    )


class Waiting(NamedTuple):
    """A request for one snapshot, read at this moment or later."""

    future: Future[Snapshot]
    processes: bool
    not_before: float


def stalled(seconds: float) -> Problem:
    """Return the problem of a driver that has not answered for so long."""
    cause = f"a GPU's driver has not answered for {seconds:.0f} s; the values are older"
    cure = (
        "wait: waking an idle GPU takes seconds (sudo nvidia-smi -pm 1 keeps NVIDIA's awake); "
        "if it goes on, see dmesg, and restart the machine"
    )
    return Problem("stalled", cause, cure)


# A driver that has not answered for this long stalls.
_STALLED_S = 2.0
_JOIN_S = 2.0
_ASKER, _WATCHER = "gpumagic-asker", "gpumagic-sampler"
# With a longer period, expensive values are read in the tick itself, not ahead of the next.
_AHEAD_UP_TO_S = 2.0
# The greatest age of a reading in intervals, with and without reading ahead after the tick.
_MAX_AGE_AHEAD, _MAX_AGE = 2.0, 0.9


class Sampler:
    """Takes snapshots for its subscribers, with a Problem if the driver has not answered for
    ``stalled_s`` seconds. Without ``threads`` it works only in calls of ``drive``."""

    def __init__(
        self,
        source: Collector | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        stalled_s: float = _STALLED_S,
        threads: bool = True,
    ) -> None:
        self._source = source or Collector()
        self._clock = clock
        self._monotonic = monotonic
        self._stalled_s = stalled_s
        self._threads = threads
        self.history = History()
        self._snapshot: Snapshot | None = None
        self._read_at, self._has_processes = -math.inf, False
        self.closed = False
        self._begin()
        _live.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._delivering = threading.RLock()
        self._alive: set[str] = set()  # the names of the threads
        self._watching: list[Subscription] = []
        self._waiting: list[Waiting] = []
        self._called_at: float | None = None  # the begin of the driver's current call
        self._stalled = False
        # The fastest subscriber's period, and the last tick on its grid.
        self._period_s, self._ticked = math.inf, -math.inf

    def subscribe(
        self, listener: Listener | None = None, *, period_s: float = 1.0, processes: bool = False
    ) -> Subscription:
        """Subscribe until the subscription is closed; GpuError for a period out of ``PERIODS_S``.
        The listener is called at most once per period, on a thread that it must not block."""
        made = Subscription(self._follow, listener, checked(period_s), processes)
        with self._changed:
            made.closed = self.closed
            self._watching.append(made)
        self._follow()
        return made

    def latest(self) -> Snapshot | None:
        """Return the last snapshot at once; if the driver stalls, with its age and a Problem."""
        with self._changed:
            return self._known(self._monotonic())[0]

    def fresh(self, *, processes: bool = True, max_age_s: float = 1.0) -> Future[Snapshot]:
        """Return a future of a snapshot that is at most ``max_age_s`` seconds old, taken now if
        necessary. The future does not fail: if the driver stalls, it has :meth:`latest`."""
        future: Future[Snapshot] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            waiting = Waiting(future, processes, self._monotonic() - max_age_s)
            if not self.closed and not self._serves(waiting):
                self._waiting.append(waiting)
                self._wake()
                return future
        future.set_result(self.latest() or Snapshot(self._clock()))
        return future

    def close(self) -> None:
        """End the threads; waiting requests get the last snapshot."""
        with self._changed:
            self.closed = True
            for subscription in self._watching:
                subscription.closed = True
            waiting, self._waiting = self._waiting, []
            self._wake()
        for one in waiting:
            one.future.set_result(self._snapshot or Snapshot(self._clock()))
        # Do not wait for a stalled driver, nor for this thread if a listener closes the sampler.
        if threading.current_thread().name not in (_ASKER, _WATCHER):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._alive <= ({_ASKER} if self._called_at is not None else set()),
                    _JOIN_S,
                )

    def drive(self) -> None:
        """Do everything that is due, for a sampler without threads."""
        while self._needed() and self._pause() == 0:
            self._take()

    # Methods below that need the lock say so. Listeners and the source never run under it.

    def _follow(self) -> None:
        """Adjust to the subscribers."""
        with self._changed:
            self._watching = [one for one in self._watching if not one.closed]
            self._period_s = min((one.period_s for one in self._watching), default=math.inf)
            self._wake()

    def _wake(self) -> None:
        """Lock held; start missing threads."""
        for name, run in ((_ASKER, self._ask), (_WATCHER, self._watch)):
            if self._threads and self._needed() and name not in self._alive:
                self._alive.add(name)
                # Not an executor's: a driver that never answers would keep the process alive.
                threading.Thread(target=run, name=name, daemon=True).start()
        self._changed.notify_all()

    def _needed(self) -> bool:
        return not self.closed and bool(self._watching or self._waiting)

    def _ended(self, name: str) -> bool:
        """Lock held; whether a thread is to end, which then counts as ended."""
        if not self._needed():
            self._alive.discard(name)
            self._changed.notify_all()
        return not self._needed()

    def _pause(self) -> float | None:
        """Return the seconds until the driver is to be asked; None if that is unknown."""
        if self._waiting:
            return 0.0
        due = self._ticked + self._period_s
        return None if math.isinf(self._period_s) else max(due - self._monotonic(), 0.0)

    def _ask(self) -> None:
        """Run the thread that asks the driver and calls the subscribers."""
        while True:
            with self._changed:
                if self._ended(_ASKER):
                    return
                pause = self._pause()
                if pause != 0:
                    self._changed.wait(pause)
                    continue
            self._take()

    def _watch(self) -> None:
        """Run the thread that delivers a Problem while the driver stalls."""
        while True:
            with self._changed:
                if self._ended(_WATCHER):
                    return
                at = self._called_at
                left = None if at is None else at + self._stalled_s - self._monotonic()
                if left is None or left > 0:
                    self._changed.wait(left)
                    continue
            with self._delivering:
                with self._changed:
                    now = self._monotonic()
                    snapshot, self._stalled = self._known(now)
                if snapshot is not None and self._stalled:
                    self._deliver(snapshot, now, stalls=True)
            with self._changed:
                if self._stalled:
                    self._changed.wait(min(self._period_s, self._stalled_s))

    def _take(self) -> None:
        """Take a snapshot and deliver it, then read expensive values ahead."""
        with self._changed:
            at = now = self._monotonic()
            due = self._ticked + self._period_s
            if now >= due:
                # Without drift, and without a burst after a late one.
                at = self._ticked = due if now < due + self._period_s else now
            wants: list[Subscription | Waiting] = [*self._watching, *self._waiting]
            processes = any(one.processes for one in wants)
            is_fast = self._period_s <= _AHEAD_UP_TO_S
        self._calls(now)
        snapshot = self._asked(processes, _MAX_AGE_AHEAD if is_fast else _MAX_AGE)
        with self._delivering:
            with self._changed:
                self._snapshot, self._read_at = snapshot, now
                self._has_processes, self._called_at = processes, None
                # After a stall, its end is delivered too.
                over, self._stalled = self._stalled, False
            self.history.add(snapshot)
            self._deliver(snapshot, at, always=over)
        if is_fast:
            self._calls(self._monotonic())
            with faults.kept("reading the GPUs ahead"):
                self._source.read_ahead(processes=processes, seconds=self._period_s / 2)
        self._calls(None)

    def _calls(self, at: float | None) -> None:
        """Record when a call of the driver began, or that it has ended."""
        with self._changed:
            self._called_at = at
            self._changed.notify_all()

    def _asked(self, processes: bool, max_age: float) -> Snapshot:
        """Ask the source; an error is a Problem."""
        try:
            return self._source.take(processes=processes, max_age=max_age)
        except Exception as error:  # noqa: BLE001  recorded and shown; the next may succeed
            faults.keep("taking a snapshot of the GPUs", error)
            cause = f"gpumagic could not take a snapshot ({faults.in_words(error)})"
            cure = "report it to gpumagic with this line; it tries again by itself"
            problem = Problem("snapshot-failed", cause, cure)
            return Snapshot(self._clock(), problems=(problem,))

    def _deliver(
        self, snapshot: Snapshot, at: float, *, always: bool = False, stalls: bool = False
    ) -> None:
        """Deliver a snapshot to the requests that it serves, and the subscribers whose turn it is;
        the lock of deliveries is held."""
        with self._changed:
            turn = [one for one in self._watching if one.has_turn(at, always)]
            served = [one for one in self._waiting if stalls or self._serves(one)]
            self._waiting = [one for one in self._waiting if one not in served]
        for waiting in served:
            waiting.future.set_result(snapshot)
        for subscription in turn:
            subscription.deliver(snapshot)

    def _serves(self, one: Waiting) -> bool:
        """Lock held; whether the last snapshot serves a request."""
        return self._read_at >= one.not_before and (self._has_processes or not one.processes)

    def _known(self, now: float) -> tuple[Snapshot | None, bool]:
        """Lock held; the last snapshot, with its age and a Problem if the driver stalls."""
        waited = 0.0 if self._called_at is None else now - self._called_at
        if waited < self._stalled_s:
            return self._snapshot, False
        last = self._snapshot or Snapshot(self._clock())
        age = round(now - self._read_at, 1)
        gpus = tuple(replace(gpu, age=age) for gpu in last.gpus)
        return replace(last, gpus=gpus, problems=(*last.problems, stalled(waited))), True


_live: weakref.WeakSet[Sampler] = weakref.WeakSet()


@cache
def shared_sampler() -> Sampler:
    """This process's sampler; the child of a fork makes its own."""
    return Sampler()


def _after_fork() -> None:
    shared_sampler.cache_clear()
    # The threads belong to the parent, and its locks may stay held.
    for inherited in list(_live):
        inherited._begin()
        inherited.closed = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
