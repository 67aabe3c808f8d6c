"""Take snapshots for all who watch, as often as the most impatient asks, and none for nobody.

Two daemon threads, and only while somebody watches. One asks the driver, which may stall. The other
keeps the time and calls the subscribers, and never waits for the first: where a call is overdue
they get the last values with their age and a Problem, until it returns and all goes on.
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
from functools import partial

from gpumagic.telemetry.asker import Asker, Start, start_thread
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.history import History
from gpumagic.telemetry.pace import Pace
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.telemetry.source import Guarded, Source, stalled
from gpumagic.telemetry.subscription import Listener, Subscription

# A driver that has not answered for so long is said to stall.
_STALLED_S = 2.0
_JOIN_S, _KEEPER = 2.0, "gpumagic-sampler"
# At a slower pace than this, what is expensive is read in the tick itself and not after it.
_CHORES_UP_TO_S = 2.0
# How many times its interval a reading may be old in a tick that has chores after it, or none.
_PATIENCE, _NO_PATIENCE = 2.0, 0.9


@dataclass(frozen=True)
class _Waiting:
    """Somebody who waits for one snapshot that was read at this moment or later."""

    future: Future[Snapshot]
    processes: bool
    not_before: float


class Sampler:
    """Takes snapshots as often as the most impatient subscriber asks; ``history`` keeps them.

    After ``stalled_s`` seconds without an answer of the driver the subscribers are told.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        start: Start = start_thread,
        stalled_s: float = _STALLED_S,
    ) -> None:
        self._source = Guarded(source or Collector(), clock)
        self._clock = clock
        self._monotonic = monotonic
        self._start = start
        self._stalled_s = stalled_s
        self.history = History()
        self._snapshot: Snapshot | None = None
        self._read_at, self._has_processes = -math.inf, False
        self.closed = False
        self._begin()
        _live.add(self)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._keeping = False
        self._watching: list[Subscription] = []
        self._waiting: list[_Waiting] = []
        self._asker = Asker(self._changed, lambda: self._keeping, self._start)
        self._at = 0.0  # the moment that the last snapshot stands for
        self._new = self._stalled = self._chores_due = False
        self._pace = Pace()

    def subscribe(
        self, listener: Listener | None = None, *, period_s: float = 1.0, processes: bool = False
    ) -> Subscription:
        """Watch, until the subscription is closed.

        The listener is called with each snapshot, at most once per period, on a thread of the
        sampler: it must return at once. With ``processes`` the driver is asked who holds memory
        too, which costs it several milliseconds per GPU. Raises ValueError for a period that is out
        of ``PERIODS_S``.
        """
        made = Subscription(self._follow, listener, period_s, processes)
        with self._changed:
            made.closed = self.closed
            self._watching.append(made)
        self._follow()
        return made

    def latest(self) -> Snapshot | None:
        """The last snapshot, at once and from any thread; None before the first.

        Where the driver stalls, the GPUs carry their age, and the problems say so.
        """
        with self._changed:
            return self._known(self._monotonic())

    def fresh(self, *, processes: bool = True, max_age_s: float = 1.0) -> Future[Snapshot]:
        """A snapshot that is at most so many seconds old: the last one, or one that is taken now.

        The future does not fail: where the driver stalls, it has what :meth:`latest` has.
        """
        future: Future[Snapshot] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            waiting = _Waiting(future, processes, self._monotonic() - max_age_s)
            waits = not self.closed and not self._serves(waiting)
            if waits:
                self._waiting.append(waiting)
                self._wake()
        if not waits:
            future.set_result(self.latest() or Snapshot(self._clock()))
        return future

    def close(self) -> None:
        """End the threads; nobody is told anything more, and who waits gets what there is."""
        with self._changed:
            self.closed = True
            for subscription in self._watching:
                subscription.closed = True
            waiting, self._waiting = self._waiting, []
            self._wake()
        for one in waiting:
            one.future.set_result(self._snapshot or Snapshot(self._clock()))
        # A driver that stalls is not waited for; nor does a listener that closes wait for itself.
        if threading.current_thread().name != _KEEPER:
            with self._changed:
                self._changed.wait_for(
                    lambda: not self._keeping and (self._asker.busy or not self._asker.alive),
                    _JOIN_S,
                )

    def drive(self) -> None:
        """Do all that is due, here: for a sampler that starts no thread (``start=no_thread``)."""
        while True:
            self._deliver()
            with self._changed:
                self._hand_out()
            if not self._asker.make():
                return

    # Below, what needs the lock to be held says so. Listeners and the source never run under it.

    def _follow(self) -> None:
        """Somebody came, went, or asks for something else."""
        with self._changed:
            self._watching = [one for one in self._watching if not one.closed]
            period_s = min((one.period_s for one in self._watching), default=math.inf)
            self._pace.set_period(period_s, self._monotonic())
            self._wake()

    def _wake(self) -> None:
        """Lock held."""
        if not self._keeping and self._needed():
            self._keeping = self._start(_KEEPER, self._keep)
        self._changed.notify_all()

    def _needed(self) -> bool:
        return not self.closed and bool(self._watching or self._waiting)

    def _keep(self) -> None:
        """The thread that keeps the time."""
        while True:
            self._deliver()
            with self._changed:
                if not self._needed():
                    self._keeping = False
                    self._changed.notify_all()
                    return
                self._hand_out()
                if not self._new:
                    self._changed.wait(self._pause())

    def _deliver(self) -> None:
        """Deliver what is new, or that the driver stalls."""
        with self._changed:
            now = self._monotonic()
            new, self._new = self._new, False
            stalls = self._stalled_for(now) is not None
            # Whoever was told of a stall is told of its end.
            over, self._stalled = new and self._stalled and not stalls, stalls
            snapshot = self._known(now) if new or stalls else None
            if snapshot is None:
                return
            at = now if stalls else self._at
            turn = [one for one in self._watching if one.has_turn(at, always=over)]
            served = [one for one in self._waiting if stalls or self._serves(one)]
            self._waiting = [one for one in self._waiting if one not in served]
        if new:
            self.history.add(snapshot)
        for waiting in served:
            waiting.future.set_result(snapshot)
        for subscription in turn:
            subscription.deliver(snapshot)

    def _serves(self, one: _Waiting) -> bool:
        """Lock held; whether the last snapshot is what somebody waits for."""
        return self._read_at >= one.not_before and (self._has_processes or not one.processes)

    def _known(self, now: float) -> Snapshot | None:
        """Lock held; the last snapshot, with its age and a Problem if the driver stalls."""
        stalled_s = self._stalled_for(now)
        if stalled_s is None:
            return self._snapshot
        last = self._snapshot or Snapshot(self._clock())
        age = round(now - self._read_at, 1)
        gpus = tuple(replace(gpu, age=age) for gpu in last.gpus)
        return replace(last, gpus=gpus, problems=(*last.problems, stalled(stalled_s)))

    def _stalled_for(self, now: float) -> float | None:
        """Lock held; seconds, if a call is overdue."""
        waited = now - self._asker.began
        return waited if self._asker.busy and waited >= self._stalled_s else None

    def _hand_out(self) -> None:
        """Lock held; begin what is due."""
        if self._asker.busy or not self._needed():
            return
        now = self._monotonic()
        ticks = self._pace.tick(now)
        chores = self._pace.period_s <= _CHORES_UP_TO_S
        everyone: list[Subscription | _Waiting] = [*self._watching, *self._waiting]
        processes = any(one.processes for one in everyone)
        if ticks or self._waiting:
            self._at = self._pace.ticked if ticks else now
            patience = _PATIENCE if chores else _NO_PATIENCE
            self._asker.hand(partial(self._take, processes, patience), now)
        elif chores and self._chores_due:
            self._chores_due = False
            self._asker.hand(partial(self._chore, processes, self._pace.period_s / 2), now)

    def _pause(self) -> float | None:
        """Lock held."""
        now = self._monotonic()
        if not self._asker.busy:
            return self._pace.pause(now)
        left = self._asker.began + self._stalled_s - now
        return left if left > 0 else min(self._pace.period_s, self._stalled_s)

    def _take(self, processes: bool, patience: float) -> Callable[[], None]:
        snapshot = self._source.take(processes, patience)

        def end() -> None:
            self._snapshot, self._read_at = snapshot, self._asker.began
            self._has_processes = processes
            self._new = self._chores_due = True

        return end

    def _chore(self, processes: bool, seconds: float) -> Callable[[], None]:
        self._source.chore(processes, seconds)
        return lambda: None


_live: weakref.WeakSet[Sampler] = weakref.WeakSet()


def _after_fork() -> None:
    # The threads are the parent's, and its locks may be held for ever.
    for inherited in list(_live):
        inherited._begin()
        inherited.closed = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
