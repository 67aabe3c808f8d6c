"""One sampler for all who watch: the fastest asked interval wins, and with nobody nothing is asked.

Two threads, and only while somebody watches. One asks the driver, which may stall. The other
keeps the time and tells the subscribers, and never waits for the first: where a call is overdue
they get the last values with their age and a Problem, until it returns and all goes on.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future

from gpumagic.telemetry.asker import Asker, Start, start_thread
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.history import History
from gpumagic.telemetry.latest import Latest, Wish
from gpumagic.telemetry.pace import Pace
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.telemetry.source import Guarded, Source
from gpumagic.telemetry.subscription import PERIODS_S, Listener, Subscription, Subscriptions

__all__ = ["PERIODS_S", "Sampler", "Source", "Subscription", "sampler"]

STALLED_S = 2.0
"""A driver that has not answered for so long is said to stall."""

_JOIN_S, _KEEPER = 2.0, "gpumagic-sampler"


class Sampler:
    """Takes snapshots as often as the most impatient subscriber asks.

    Parameters
    ----------
    source : Source, optional
        What is asked; this machine if None.
    clock, monotonic : callable
        Seconds of Unix time; seconds that only grow.
    start : callable
        Starts a thread, given its name and what it runs.
    history : History, optional
    stalled_s : float
        After how many seconds without an answer the subscribers are told.

    Attributes
    ----------
    history : History
        What was read in the last minutes, also before a pause.
    """

    def __init__(
        self,
        source: Source | None = None,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        start: Start = start_thread,
        history: History | None = None,
        stalled_s: float = STALLED_S,
    ) -> None:
        self._source = Guarded(source or Collector(), clock)
        self._monotonic = monotonic
        self._start = start
        self.history = history or History()
        self._stalled_s = stalled_s
        self._latest = Latest(clock)
        self._closed = False
        self._begin()
        _live.add(self)

    def _begin(self) -> None:
        """With no thread and nobody who watches."""
        self._changed = threading.Condition()
        self._asker = Asker(self._changed, lambda: self._keeper is not None, self._start)
        # What marks the keeper that is meant to run; another one, or None, ends the one before.
        self._keeper: object | None = None
        self._keeping = 0
        self._woken = False
        self._watching = Subscriptions()
        self._latest.wishes = []
        self._began = self._at = 0.0
        self._new = self._stalled = False
        self._pace = Pace()

    def subscribe(
        self, listener: Listener | None = None, *, period_s: float = 1.0, processes: bool = False
    ) -> Subscription:
        """Watch, until the subscription is closed.

        Parameters
        ----------
        listener : callable, optional
            Called with each snapshot, at most once per period, on a thread of the sampler: it must
            return at once. :meth:`latest` has the same.
        period_s : float
            Seconds, within ``PERIODS_S``.
        processes : bool
            Ask who holds memory too, which costs the driver several milliseconds per GPU.

        Raises
        ------
        ValueError
            The period is out of bounds.
        """
        made = Subscription(self._follow, listener, period_s, processes)
        with self._changed:
            if self._closed:
                made.closed = True
            else:
                self._watching.add(made)
        self._follow()
        return made

    def latest(self) -> Snapshot | None:
        """The last snapshot, at once and from any thread; None before the first.

        Where the driver stalls, the GPUs carry their age, and the problems say so.
        """
        with self._changed:
            now = self._monotonic()
            return self._latest.get(now, self._stalled_for(now))

    def fresh(self, *, processes: bool = True, max_age_s: float = 1.0) -> Future[Snapshot]:
        """A snapshot that is at most so many seconds old: the last one, or one that is taken now.

        The future does not fail: where the driver stalls, it has what :meth:`latest` has.
        """
        future: Future[Snapshot] = Future()
        future.set_running_or_notify_cancel()
        with self._changed:
            wish = Wish(future, processes, self._monotonic() - max_age_s)
            waits = not self._closed and not self._latest.grants(wish)
            if waits:
                self._latest.wishes.append(wish)
                self._wake()
        if not waits:
            future.set_result(self.latest() or self._latest.empty())
        return future

    def close(self) -> None:
        """End the threads; nobody is told anything more, and who waits gets what there is."""
        with self._changed:
            self._closed = True
            self._watching.clear()
            waiting = self._latest.granted(every=True)
            self._keeper = None
            self._changed.notify_all()
        for wish in waiting:
            wish.future.set_result(self._latest.empty())
        # A listener that closes its sampler does not wait for itself.
        with self._changed:
            if threading.current_thread().name != _KEEPER:
                self._changed.wait_for(self._ended, _JOIN_S)

    def drive(self) -> None:
        """Do all that is due, here: for a sampler that starts no thread (``start=no_thread``)."""
        self._step()
        while self._asker.make():
            self._step()

    # Below, what needs the lock to be held says so. Listeners and the source never run under it.

    def _ended(self) -> bool:
        """Lock held. A driver that stalls is not waited for: its thread ends when it answers."""
        return not self._keeping and (self._asker.busy or not self._asker.alive)

    def _follow(self) -> None:
        """Somebody came, went, or changed its mind."""
        with self._changed:
            self._pace.set_period(self._watching.period_s(), self._monotonic())
            self._wake()

    def _wake(self) -> None:
        """Lock held."""
        self._woken = True
        if self._keeper is None and self._needed():
            self._keeper = object()
            keeper = self._keeper
            self._keeping += bool(self._start(_KEEPER, lambda: self._keep(keeper)))
        self._changed.notify_all()

    def _needed(self) -> bool:
        return bool(self._watching or self._latest.wishes) and not self._closed

    def _keep(self, keeper: object) -> None:
        while True:
            pause = self._step()
            with self._changed:
                if self._keeper is keeper and not self._needed():
                    self._keeper = None
                if self._keeper is not keeper:
                    self._keeping -= 1
                    self._changed.notify_all()
                    return
                if not self._woken:
                    self._changed.wait(pause)

    def _step(self) -> float | None:
        """Tell what is new, begin what is due; returns the seconds until there is more to do."""
        with self._changed:
            self._woken = False
            now = self._monotonic()
            new, self._new = self._new, False
            stalled_s = self._stalled_for(now)
            stalls = stalled_s is not None
            snapshot = self._latest.get(now, stalled_s) if new or stalls else None
            # Whoever was told of a stall is told of its end.
            over, self._stalled = new and self._stalled and not stalls, stalls
            turn = self._watching.turn(now if stalls else self._at, over) if snapshot else []
            granted = self._latest.granted(every=stalls) if snapshot else []
        if snapshot is not None:
            if new:
                self.history.add(snapshot)
            for wish in granted:
                wish.future.set_result(snapshot)
            for subscription in turn:
                subscription.tell(snapshot)
        with self._changed:
            self._hand_out()
            return self._pause()

    def _stalled_for(self, now: float) -> float | None:
        """Seconds, if a call is overdue; lock held."""
        waited = now - self._began
        return waited if self._asker.busy and waited >= self._stalled_s else None

    def _hand_out(self) -> None:
        """Begin what is due; lock held."""
        if self._asker.busy or not self._needed():
            return
        now = self._monotonic()
        wishes, processes = self._latest.wishes, self._watching.processes()
        ticks = self._pace.tick(now)
        if ticks or wishes:
            self._at = self._pace.ticked if ticks else now
            processes = processes or any(wish.processes for wish in wishes)
            self._asker.hand(lambda: self._tick(processes))
        elif self._pace.chore(now):
            self._asker.hand(lambda: self._chore(processes))
        else:
            return
        self._began = now

    def _pause(self) -> float | None:
        """Lock held."""
        now = self._monotonic()
        if not self._asker.busy:
            return self._pace.pause(now)
        left = self._began + self._stalled_s - now
        return left if left > 0 else min(self._pace.period_s, self._stalled_s)

    def _tick(self, processes: bool) -> Callable[[], None]:
        snapshot = self._source.take(processes)

        def end() -> None:
            self._latest.put(snapshot, self._began, processes)
            self._new = self._woken = True

        return end

    def _chore(self, processes: bool) -> Callable[[], None]:
        next_s = self._source.chore(processes)

        def end() -> None:
            self._pace.chore_done(self._began, self._monotonic(), next_s)
            self._woken = True

        return end


_live: weakref.WeakSet[Sampler] = weakref.WeakSet()
_sampler: Sampler | None = None
_sampler_lock = threading.Lock()


def sampler() -> Sampler:
    """This process's one."""
    global _sampler
    with _sampler_lock:
        if _sampler is None or _sampler._closed:
            _sampler = Sampler()
        return _sampler


def _after_fork() -> None:
    # The threads are the parent's, and its locks may be held for ever.
    global _sampler, _sampler_lock
    _sampler, _sampler_lock = None, threading.Lock()
    for inherited in list(_live):
        inherited._begin()
        inherited._closed = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
