"""Compute when the next tick is due: on a grid of the period, without drift and without bursts."""

from __future__ import annotations

import math


class Pace:
    """All moments in seconds of one monotonic clock; ``ticked`` is the last tick's, on the grid."""

    def __init__(self) -> None:
        self.period_s = math.inf
        self.ticked = -math.inf
        self._due = -math.inf

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
