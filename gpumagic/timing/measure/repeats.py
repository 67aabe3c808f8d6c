"""Repeat a piece of code: warm-up until steady, then until the median is known well enough.

The first run is not here: it is made before, and counts as warm-up of what is run for long.
"""

import math
import statistics
from bisect import insort
from collections import deque
from collections.abc import Callable

from gpumagic.timing.measure.stopwatch import Lap
from gpumagic.timing.progress import Stage
from gpumagic.timing.result.timing import interval

NARROW = 0.01
"""The median is known when its 95 % interval is narrower than this part of it."""

# A block is so long that what a block costs without a run in it is a thousandth of it or so. No
# longer: while other programs run, a short block is either left alone or not, and the median is
# that of those left alone; each long one would be a mixture.
_NEGLIGIBLE = 1e-3
_LEAST_BLOCK_S = 1e-3
# Steady: the last five blocks have a coefficient of variation under 2 % (A. Georges, D. Buytaert,
# L. Eeckhout, Statistically rigorous Java performance evaluation, OOPSLA 2007, section 4.2), after
# a tenth of a second, in which a GPU raises its clock.
_WINDOW, _STEADY, _LEAST_WARM_S = 5, 0.02, 0.1
# A fifth of the time at most is for warm-up, on a machine that is never steady.
_WARM_SHARE = 0.2
# As torch.utils.benchmark.Timer.blocked_autorange: what other programs do comes in bursts.
_LEAST_TIMED_S = 0.2
_LEAST, _MOST = 10, 10_000


class Repeats:
    """Repeats of code that `lap` times: one at least, and for `least` seconds within `max_time`."""

    def __init__(
        self,
        lap: Callable[[int], Lap],
        max_time: float,
        *,
        clock: Callable[[], float],
        told: Callable[[Stage], object] = lambda stage: None,
        between: Callable[[], object] = lambda: None,
        least: float = _LEAST_TIMED_S,
    ) -> None:
        self.laps: list[Lap] = []  # filled while it runs, so that an interrupt leaves them
        self.number, self.runs = 1, 0  # runs in each, and in all, warm-up included
        self.steady = False  # whether the median's interval was narrow in the end
        self._timed, self._told, self._clock, self._between = lap, told, clock, between
        self._max_time, self._least = max_time, min(least, max_time / 2)
        self._ordered: list[float] = []
        # Repeats at which the interval is computed next: not at each of thousands.
        self._look_at = _LEAST

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of one run, one for each repeat."""
        return tuple(lap.total / self.number for lap in self.laps)

    def median(self) -> float:
        """Of `seconds`, so far."""
        return statistics.median(self._ordered)

    def run(self) -> None:
        """Warm up and repeat."""
        began = self._clock()
        share = _WARM_SHARE * self._max_time
        self._told("warm up")
        lap = self._lap(1)
        if lap.total >= share:
            # The first run was its warm-up, and there is no time to waste.
            self._keep(lap)
            if self._enough(self._clock() - began):
                return
            lap = self._lap(1)
        if lap.total < share:
            # Where one run before was not, it was no run like the others: something was compiled.
            self.laps.clear()
            self._ordered.clear()
            began = self._clock() - lap.total
            self._warm_up(lap.total, began, share)
        else:
            self._keep(lap)
        self._told("timing")
        while not self._enough(self._clock() - began):
            self._keep(self._lap(self.number))

    def _lap(self, number: int) -> Lap:
        self.runs += number
        lap = self._timed(number)
        self._between()
        return lap

    def _warm_up(self, each: float, began: float, share: float) -> None:
        """Run until it is steady, and find out how many runs make a block; `each` is of one."""
        empty = statistics.median(self._lap(0).total for _ in range(5))
        block = min(max(empty / _NEGLIGIBLE, _LEAST_BLOCK_S), self._max_time / 2 / _LEAST)
        window: deque[float] = deque(maxlen=_WINDOW)
        while True:
            number = min(math.ceil(block / max(each, 1e-9)), 10 * self.number)
            # Not again and again for a few runs more: then it would never be steady.
            if number > 1.5 * self.number:
                self.number = number
                window.clear()
            spent = self._clock() - began
            if len(window) == _WINDOW and spent >= min(_LEAST_WARM_S, share) and _steady(window):
                return
            if spent + self.number * each >= share:
                return
            lap = self._lap(self.number)
            window.append(lap.total)
            # The least: what other programs take meanwhile must not make the blocks too short.
            each = min(each, lap.total / self.number)
            self._told("warm up")

    def _keep(self, lap: Lap) -> None:
        self.laps.append(lap)
        insort(self._ordered, lap.total / self.number)
        self._told("timing")

    def _enough(self, spent: float) -> bool:
        count = len(self.laps)
        if not count:
            return False
        timed = sum(self._ordered) * self.number
        if timed >= self._least and count >= self._look_at:
            self._look_at = max(count + 1, int(1.05 * count))
            low, high = interval(self._ordered)
            if high - low <= NARROW * self.median():
                self.steady = True
                return True
        return count >= _MOST or spent + self.laps[-1].total > self._max_time


def _steady(window: deque[float]) -> bool:
    return statistics.stdev(window) <= _STEADY * statistics.fmean(window)
