"""One who watches: how often it wants to know, and whether it wants processes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from types import TracebackType

from gpumagic.telemetry.snapshot import Snapshot

PERIODS_S = (0.25, 60.0)
"""The least and the greatest period that can be asked for, in seconds."""

_log = logging.getLogger(__name__)
# A tick that comes so much of a period early is one's own.
_TOLERANCE = 0.1

Listener = Callable[[Snapshot], None]


class Subscription:
    """What :meth:`Sampler.subscribe` returns; closed at the end of a ``with`` block.

    Parameters
    ----------
    follow : callable
        Tells the sampler that this one has changed.
    listener : callable, optional
    period_s : float
        Seconds.
    processes : bool
    """

    def __init__(
        self,
        follow: Callable[[], None],
        listener: Listener | None,
        period_s: float,
        processes: bool,
    ) -> None:
        self._follow = follow
        self.listener = listener
        self.period_s = checked(period_s)
        self.processes = processes
        self.closed = False
        self.told_at = -math.inf
        self._failed = False

    def change(self, *, period_s: float | None = None, processes: bool | None = None) -> None:
        """Ask for another period, or for processes, from now on.

        Raises
        ------
        ValueError
            The period is out of bounds.
        """
        if period_s is not None:
            self.period_s = checked(period_s)
        if processes is not None:
            self.processes = processes
        self._follow()

    def close(self) -> None:
        """Watch no more. Any thread may, as often as it likes, also from within the listener."""
        if not self.closed:
            self.closed = True
            self._follow()

    def tell(self, snapshot: Snapshot) -> None:
        """Call the listener. One that fails is logged once, for it would fill the log."""
        if self.listener is None or self.closed:
            return
        try:
            self.listener(snapshot)
        except Exception as error:  # noqa: BLE001  one who fails must not cost the others theirs
            if not self._failed:
                _log.warning("a listener of the GPU monitor failed: %r", error)
            self._failed = True

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Subscriptions:
    """All who watch; whoever calls this holds the lock."""

    def __init__(self) -> None:
        self._all: list[Subscription] = []

    def __bool__(self) -> bool:
        return any(not one.closed for one in self._all)

    def add(self, subscription: Subscription) -> None:
        self._all.append(subscription)

    def clear(self) -> None:
        """Close them all."""
        for subscription in self._all:
            subscription.closed = True
        self._all = []

    def period_s(self) -> float:
        """What the most impatient one asks for; infinite where there is none."""
        self._all = [one for one in self._all if not one.closed]
        return min((one.period_s for one in self._all), default=math.inf)

    def processes(self) -> bool:
        """Whether one of them wants to know who holds memory."""
        return any(one.processes for one in self._all if not one.closed)

    def turn(self, at: float, every: bool = False) -> list[Subscription]:
        """Those whose period is over at this moment, which is noted; or every one of them."""
        turn = [
            one for one in self._all if every or at - one.told_at >= one.period_s * (1 - _TOLERANCE)
        ]
        for one in turn:
            one.told_at = at
        return turn


def checked(period_s: float) -> float:
    """The period, if it is within bounds."""
    least, greatest = PERIODS_S
    if not least <= period_s <= greatest:
        raise ValueError(f"a period of {period_s} s; from {least} to {greatest} s is possible")
    return float(period_s)
