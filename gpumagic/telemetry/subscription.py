"""Hold what one subscriber asks of the sampler: how often, and whether it wants processes."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpumagic.telemetry.report_once import report_once
from gpumagic.telemetry.snapshot import Snapshot

PERIODS_S = (0.25, 60.0)
"""The least and the greatest period that can be asked for, in seconds."""

# A tick that comes so much of a period early is one's own.
_TOLERANCE = 0.1

Listener = Callable[[Snapshot], None]


class Subscription:
    """What :meth:`Sampler.subscribe` returns; closed at the end of a ``with`` block.

    ``follow`` is called when it has changed.
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
        self._delivered_at = -math.inf

    def change(self, *, period_s: float | None = None, processes: bool | None = None) -> None:
        """Ask for another period, or for processes, from now on; ValueError if out of bounds."""
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

    def has_turn(self, at: float, always: bool) -> bool:
        """Whether its period is over at this moment, which then begins anew."""
        turn = always or at - self._delivered_at >= self.period_s * (1 - _TOLERANCE)
        if turn:
            self._delivered_at = at
        return turn

    def deliver(self, snapshot: Snapshot) -> None:
        """Call the listener; one that fails must not cost the others theirs."""
        if self.listener is None or self.closed:
            return
        try:
            self.listener(snapshot)
        except Exception as error:  # noqa: BLE001  kept, and logged once
            report_once("calling a listener of the GPU monitor", error)

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def checked(period_s: float) -> float:
    """The period, if it is within bounds."""
    least, greatest = PERIODS_S
    if not least <= period_s <= greatest:
        raise ValueError(f"a period of {period_s} s; from {least} to {greatest} s is possible")
    return float(period_s)
