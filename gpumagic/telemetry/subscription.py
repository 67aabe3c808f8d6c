"""Hold what each one asks of the sampler, and compute when ticks are due."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.telemetry.snapshot import Snapshot

PERIODS_S = (0.25, 60.0)
"""The least and the greatest period that can be asked for, in seconds."""

# A tick that comes so much of a period early is one's own.
TOLERANCE = 0.1

Listener = Callable[[Snapshot], None]


class Subscription:
    """What :meth:`Sampler.subscribe` returns; closed at the end of a ``with`` block."""

    def __init__(
        self,
        follow: Callable[[], None],
        listener: Listener | None,
        period_s: float,
        processes: bool,
    ) -> None:
        self._follow = follow
        self._listener = listener
        self.period_s = checked(period_s)
        self.processes = processes
        self.closed = False
        self._delivered_at = -math.inf

    def close(self) -> None:
        """Watch no more. Any thread may, as often as it likes, also from within the listener."""
        if not self.closed:
            self.closed = True
            self._follow()

    def has_turn(self, at: float, always: bool) -> bool:
        """Whether its period is over at this moment, which then begins anew."""
        turn = always or at - self._delivered_at >= self.period_s * (1 - TOLERANCE)
        if turn:
            self._delivered_at = at
        return turn

    def deliver(self, snapshot: Snapshot) -> None:
        """Call the listener; one that fails must not cost the others theirs."""
        if self._listener is None or self.closed:
            return
        with faults.kept("calling a listener of the GPU monitor"):
            self._listener(snapshot)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def checked(period_s: Any) -> float:
    """The period in seconds, or GpuError where it is out of bounds."""
    least, greatest = PERIODS_S
    number = isinstance(period_s, int | float) and period_s == period_s
    if number and least <= period_s <= greatest:
        return float(period_s)
    fitting = min(max(period_s, least), greatest) if number else 1
    raise GpuError(
        f"a period of {period_s!r}: it must be from {least} to {greatest:g} s;"
        f" type gpumagic.monitor({fitting:g})"
    )


class Waiting(NamedTuple):
    """One who waits for a single snapshot, read at this moment or later."""

    future: Future[Snapshot]
    processes: bool
    not_before: float


class Pace:
    """When ticks are due: on a grid of the period, without drift and without bursts."""

    def __init__(self) -> None:
        self.period_s = math.inf
        # When the last tick was due, on the grid, and the next is: by one monotonic clock.
        self.ticked = self._due = -math.inf

    def set_period(self, period_s: float, now: float) -> None:
        """Go on at another period, counted from the last tick."""
        if period_s != self.period_s:
            self.period_s = period_s
            self._due = max(self.ticked + period_s, now)

    def tick(self, now: float) -> bool:
        """Whether a tick is due; it then counts as made, on the grid however late it comes."""
        if now < self._due or math.isinf(self.period_s):
            return False
        self.ticked = self._due + (now - self._due) // self.period_s * self.period_s
        self._due = self.ticked + self.period_s
        return True

    def pause(self, now: float) -> float | None:
        """Seconds until the next tick; None where none ever is."""
        return None if math.isinf(self.period_s) else max(self._due - now, 0.0)
