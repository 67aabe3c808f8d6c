"""Take snapshots at the rate of the fastest subscriber; without subscribers, take none.

If the driver stalls, a timer sends the subscribers the last values, their age, and a Problem.
"""

import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from gpumagic import faults
from gpumagic.errors import GpuError, Problem
from gpumagic.telemetry.collect import Collector
from gpumagic.telemetry.history import History
from gpumagic.telemetry.snapshot import Snapshot

PERIODS_S = (0.25, 60.0)  # the shortest and the longest period of a subscription, in seconds

Listener = Callable[[Snapshot], None]


@dataclass(eq=False)
class Subscription(AbstractContextManager["Subscription"]):
    """A subscription to a :class:`Sampler`; the end of a ``with`` block closes it."""

    follow: Callable[[], None]  # called when the subscription is closed
    listener: Listener | None
    period_s: float  # infinite for a request for one snapshot
    processes: bool
    not_before: float = -math.inf  # snapshots from before this time are not delivered
    closed: bool = False
    delivered_at: float = -math.inf

    @property
    def once(self) -> bool:
        """Whether this is a request for a single snapshot."""
        return math.isinf(self.period_s)

    def close(self) -> None:
        """Unsubscribe. Any thread may call this method, even repeatedly or from the listener."""
        if not self.closed:
            self.closed = True
            self.follow()

    def deliver(self, snapshot: Snapshot) -> None:
        """Call the listener. Record its errors, so that other listeners still get the snapshot."""
        with faults.kept("calling a listener of the GPU monitor"):
            if self.listener is not None and not self.closed:
                self.listener(snapshot)

    def __exit__(self, *error: object) -> None:
        self.close()


def checked(period_s: Any) -> float:
    """Return the period in seconds; raise GpuError if the period is out of bounds."""
    least, greatest = PERIODS_S
    if isinstance(period_s, int | float) and least <= period_s <= greatest:
        return float(period_s)
    raise GpuError(f"a period of {period_s!r}: it must be from {least} to {greatest:g} s; type 1")


def stalled(seconds: float) -> Problem:
    """Return the Problem for a driver that has not answered for `seconds`."""
    cause = f"a GPU's driver has not answered for {seconds:.0f} s; the values shown are old"
    awake = "sudo nvidia-smi -pm 1 keeps NVIDIA's GPUs awake"
    lasts = "if the stall lasts, see dmesg, and restart the machine"
    cure = f"wait: waking an idle GPU takes seconds ({awake}); {lasts}"
    return Problem("stalled", cause, cure)


_FAILED = Problem("snapshot-failed", "gpumagic could not take a snapshot", "run %gpus --doctor")


class Sampler:
    """Takes snapshots for its subscribers, on a thread."""

    def __init__(self, source: Collector | None = None, *, stalled_s: float = 2.0) -> None:
        self._source = source or Collector()
        self._stalled_s = stalled_s  # a driver without an answer for this long counts as stalled
        self.history = History()
        self._snapshot: Snapshot | None = None
        self._read_at, self._has_processes = -math.inf, False
        self._begin()
        _live.add(self)

    def _begin(self, closed: bool = False) -> None:
        self.closed = closed
        self._changed = threading.Condition()
        self._delivering = threading.RLock()
        self._asking = False  # whether the thread that takes snapshots is running
        self._watching: list[Subscription] = []
        self._called_at: float | None = None  # when the current call of the driver began
        self._stalled = False
        # `_period_s` is the fastest subscriber's period. The last period began at `_ticked`.
        self._period_s, self._ticked = math.inf, -math.inf

    def subscribe(
        self, listener: Listener | None = None, *, period_s: float = 1.0, processes: bool = False
    ) -> Subscription:
        """Return an open subscription; raise GpuError for an invalid period. The sampler's threads
        call the listener at most once per period, and after a stall. A listener must not block."""
        return self._add(Subscription(self._follow, listener, checked(period_s), processes))

    def latest(self) -> Snapshot | None:
        """Return the last snapshot at once. During a stall, add the data's age and a Problem."""
        with self._changed:
            return self._known(time.monotonic())[0]

    def fresh(self, *, processes: bool = True, max_age_s: float = 1.0) -> Future[Snapshot]:
        """Return a future for a snapshot at most ``max_age_s`` seconds old; take one if necessary.
        The future never fails. If the driver stalls, the future gets the result of `latest`."""
        future: Future[Snapshot] = Future()
        future.set_running_or_notify_cancel()
        since = time.monotonic() - max_age_s
        one = Subscription(self._follow, future.set_result, math.inf, processes, since)
        with self._changed:
            if not self.closed and not self._serves(one):
                self._add(one)
                return future
        future.set_result(self.latest() or Snapshot(time.time()))
        return future

    def close(self) -> None:
        """End the threads without waiting for them; open futures get the last snapshot."""
        with self._changed:
            self.closed = True
            ended, self._watching = self._watching, []
            self._changed.notify_all()
        for one in ended:
            if one.once:
                one.deliver(self._snapshot or Snapshot(time.time()))
            one.closed = True

    # "Needs `x`" means that the caller must hold the lock `x`. Listeners run without `_changed`.

    def _add(self, made: Subscription) -> Subscription:
        with self._changed:
            made.closed = self.closed
            self._watching.append(made)
            self._follow()
        return made

    def _follow(self) -> None:
        """Adjust the period to the subscribers; start the thread if it does not run."""
        with self._changed:
            self._watching = [one for one in self._watching if not one.closed]
            self._period_s = min((one.period_s for one in self._watching), default=math.inf)
            if self._watching and not self._asking:
                self._asking = True
                # Use no executor: at exit, Python would wait for the executor's thread in a stall.
                threading.Thread(target=self._ask, name="gpumagic-asker", daemon=True).start()
            self._changed.notify_all()

    def _pause(self) -> float:
        """Return the seconds to wait before the next snapshot. Needs `_changed`."""
        once = any(one.once for one in self._watching)
        return 0.0 if once else max(self._ticked + self._period_s - time.monotonic(), 0.0)

    def _ask(self) -> None:
        """Take a snapshot in each period, until no subscriber is left; runs on the thread."""
        while True:
            with self._changed:
                if not self._watching:
                    self._asking = False
                    return
                if pause := self._pause():
                    self._changed.wait(pause)
                    continue
            self._take()

    def _stall(self) -> None:
        """Deliver a Problem while the driver stalls, also to subscribers added meanwhile."""
        while True:
            with self._delivering:
                with self._changed:
                    now = time.monotonic()
                    snapshot, self._stalled = self._known(now)
                if snapshot is None or not self._stalled or self.closed:
                    return
                self._deliver(snapshot, now, stalls=True)
            with self._changed:
                self._changed.wait(min(self._period_s, self._stalled_s))

    def _take(self) -> None:
        with self._changed:
            now = self._called_at = time.monotonic()
            if now >= self._ticked + self._period_s:
                self._ticked = now
            processes = any(one.processes for one in self._watching)
        watch = threading.Timer(self._stalled_s, self._stall)
        watch.name, watch.daemon = "gpumagic-sampler", True
        watch.start()
        try:
            # `max_age` is in refresh intervals. It is below 1, because a snapshot may be early.
            snapshot = self._source.take(processes=processes, max_age=0.9)
        except Exception as error:  # noqa: BLE001  recorded and shown; the thread must go on
            faults.keep("taking a snapshot of the GPUs", error)
            snapshot = Snapshot(time.time(), problems=(_FAILED,))
        watch.cancel()
        with self._delivering:
            with self._changed:
                self._snapshot, self._read_at = snapshot, now
                self._has_processes, self._called_at = processes, None
                # After a stall, all subscribers get this snapshot, whatever their periods.
                over, self._stalled = self._stalled, False
                self._changed.notify_all()
            self.history.add(snapshot)
            self._deliver(snapshot, now, always=over)

    def _deliver(
        self, snapshot: Snapshot, at: float, *, always: bool = False, stalls: bool = False
    ) -> None:
        """Deliver a snapshot to subscribers whose period is over. Needs `_delivering`."""
        with self._changed:
            served = [one for one in self._watching if stalls or self._serves(one)]
            # A snapshot may be a bit early, so 90 % of a period is enough.
            turn = [one for one in served if always or at - one.delivered_at >= 0.9 * one.period_s]
            for one in turn:
                one.delivered_at = at
            self._watching = [one for one in self._watching if not (one.once and one in turn)]
        for one in turn:
            one.deliver(snapshot)

    def _serves(self, one: Subscription) -> bool:
        """Whether the last snapshot is new and complete enough for `one`. Needs `_changed`."""
        return self._read_at >= one.not_before and (self._has_processes or not one.processes)

    def _known(self, now: float) -> tuple[Snapshot | None, bool]:
        """Return the result of `latest`, and whether the driver stalls. Needs `_changed`."""
        waited = 0.0 if self._called_at is None else now - self._called_at
        if waited < self._stalled_s:
            return self._snapshot, False
        last = self._snapshot or Snapshot(time.time())
        gpus = tuple(replace(gpu, age=round(now - self._read_at, 1)) for gpu in last.gpus)
        return replace(last, gpus=gpus, problems=(*last.problems, stalled(waited))), True


_live: weakref.WeakSet[Sampler] = weakref.WeakSet()


@cache
def shared_sampler() -> Sampler:
    """Return this process's sampler; a forked child makes a new sampler."""
    return Sampler()


def _after_fork() -> None:
    shared_sampler.cache_clear()
    # The child has no copy of the threads, and a copied lock may stay locked forever.
    for inherited in list(_live):
        inherited._begin(closed=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
