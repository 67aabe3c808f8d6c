"""When what is due: ticks on a grid of the fastest asked period, and chores where there is room."""

from __future__ import annotations

import math

# At a slower pace than this, what is dear is read in the tick itself and not between ticks.
_CHORES_UP_TO_S = 2.5


# How much later than meant a tick reads what a chore was to read; and when no chores are done.
_PATIENCE, _NO_PATIENCE, _HELPED_S = 1.5, 0.9, 3.0


def patience(helped_at: float, now: float) -> float:
    """How many times its interval a reading may be old before the tick itself makes it.

    Who takes snapshots so seldom that there are no chores between has all of it read in the tick.
    """
    return _PATIENCE if now - helped_at < _HELPED_S else _NO_PATIENCE


class Pace:
    """All moments in seconds of one monotonic clock.

    Attributes
    ----------
    period_s : float
        Of the ticks; infinite where nobody asks for any.
    ticked : float
        The place on the grid of the last tick.
    """

    def __init__(self) -> None:
        self.period_s = math.inf
        self.ticked = -math.inf
        self._due = -math.inf
        self._chore_at = -math.inf
        self._chore_s = 0.0

    def set_period(self, period_s: float, now: float) -> None:
        """Go on at another period, counted from the last tick."""
        if period_s != self.period_s:
            self.period_s = period_s
            self._due = max(self.ticked + period_s, now)

    def tick(self, now: float) -> bool:
        """Whether a tick is due; it then counts as made.

        It is on the grid, however late it comes: there is no drift, and no burst after a long one.
        """
        if now < self._due or math.isinf(self.period_s):
            return False
        self.ticked = self._due + (now - self._due) // self.period_s * self.period_s
        self._due = self.ticked + self.period_s
        # The pace may have changed, and a chore that took long is no reason to leave all for ever.
        self._chore_at = -math.inf
        self._chore_s /= 2
        return True

    def chore(self, now: float) -> bool:
        """Whether a chore is due, and would be done before the next tick."""
        return now >= self._chore_at and self._fits(now)

    def chore_done(self, began: float, now: float, next_s: float) -> None:
        """A chore was done; the next one is due in ``next_s``."""
        self._chore_s = max(self._chore_s, now - began)
        self._chore_at = now + next_s

    def pause(self, now: float) -> float | None:
        """Seconds until something is due; None where nothing ever is."""
        if math.isinf(self.period_s):
            return None
        chore_at = max(self._chore_at, now)
        return max((chore_at if self._fits(chore_at) else self._due) - now, 0.0)

    def _fits(self, at: float) -> bool:
        return self.period_s <= _CHORES_UP_TO_S and at + self._chore_s < self._due
