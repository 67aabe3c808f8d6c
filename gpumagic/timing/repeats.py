"""Repeat code until its median is known well enough, and show the progress.

The first run is made by the caller and counts as warm-up.
"""

import math
import statistics
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpumagic import faults
from gpumagic.display.units import age, duration
from gpumagic.timing.runner import Lap
from gpumagic.timing.timing import interval

Stage = Literal["copy", "warm up", "timing", "done"]
_PERIOD_S = 0.1


@dataclass(frozen=True)
class Progress:
    """How far a comparison is."""

    title: str  # the first line of the code
    where: str  # the device that is measured now
    values: Mapping[str, Any] = field(default_factory=dict)  # of the sweep's variables there
    stage: Stage = "copy"
    repeat: int = 0  # that were timed; 0 in the other stages
    done: int = 0  # measurements, each of one device at one value
    total: int = 1
    elapsed: float = 0.0  # seconds
    remaining: float | None = None  # seconds, by those that are done; None while there are none
    # Of each device: where, its median at this value so far, and `"waiting"`, a stage, `"done"`, or
    # why there is none.
    bars: tuple[tuple[str, float | None, str], ...] = ()

    def __str__(self) -> str:
        """``"cuda:0 · n = 256 · repeat 12 · 2 of 3 devices · about 4 s left"``."""
        parts = [self.where, *(f"{name} = {value}" for name, value in self.values.items())]
        if self.stage == "timing":
            parts.append(f"repeat {self.repeat}" if self.repeat else "first run")
        else:
            parts.append("inputs and first run" if self.stage == "copy" else self.stage)
        if self.total > 1:
            kind = "" if self.values else " devices"
            parts.append(f"{min(self.done + 1, self.total)} of {self.total}{kind}")
        # At 0 an estimate is over, and what it was of may not be.
        if self.remaining:
            parts.append(f"about {age(max(self.remaining, 1))} left")
        return " · ".join(part for part in parts if part)

    @property
    def share(self) -> float | None:
        """How much of its time is over; None while there is no estimate of the rest."""
        if self.remaining is None:
            return None
        return self.elapsed / ((self.elapsed + self.remaining) or 1.0)

    def posted(self) -> dict[str, Any]:
        """As JSON, for the monitor: its line, and a bar for each device, out of the slowest."""
        spelled = {"copy": "copying"}
        slowest = max((seconds for _, seconds, _ in self.bars if seconds), default=0.0)
        bars = [
            {
                "where": where,
                "share": seconds / slowest if seconds else 0.0,
                "text": duration(seconds) if seconds is not None else spelled.get(state, state),
            }
            for where, seconds, state in self.bars
        ]
        return {"line": f"{self.title} · {self}", "bars": bars}


class Reporter:
    """Calls `call` at most ten times a second; what it raises does not end the comparison."""

    def __init__(
        self,
        call: Callable[[Progress], object],
        title: str,
        wheres: Sequence[str],
        total: int,
        clock: Callable[[], float],
    ) -> None:
        self._call, self._clock = call, clock
        self._now = Progress(title, wheres[0], total=total)
        self._bars: dict[str, tuple[float | None, str]] = dict.fromkeys(wheres, (None, "waiting"))
        self._began = self._begun = clock()
        self._told = -math.inf

    @property
    def due(self) -> bool:
        """Whether it is time to tell again."""
        return self._clock() - self._told >= _PERIOD_S

    def begin(self, where: str, values: Mapping[str, Any]) -> None:
        """The measurement of a device at a value begins."""
        if values != self._now.values:
            self._bars = dict.fromkeys(self._bars, (None, "waiting"))
        self._now = replace(self._now, where=where, values=dict(values))
        self._begun = self._clock()
        self.at("copy")

    def at(self, stage: Stage, repeat: int = 0, median: float | None = None) -> None:
        """It is at a stage, with this median so far."""
        self._now = replace(self._now, stage=stage, repeat=repeat)
        self._bars[self._now.where] = median, stage
        self._tell()

    def end(self, median: float | None, state: str = "done") -> None:
        """The measurement has ended."""
        self._now = replace(self._now, done=self._now.done + 1)
        self._bars[self._now.where] = median, state
        self._tell()

    def close(self) -> None:
        """All is done."""
        self._now = replace(self._now, stage="done")
        self._told = -math.inf
        self._tell()

    def _tell(self) -> None:
        if not self.due:
            return
        now = self._told = self._clock()
        bars = tuple((where, *bar) for where, bar in self._bars.items())
        with faults.kept("showing how far a comparison is"):
            elapsed, remaining = now - self._began, self._remaining(now)
            self._call(replace(self._now, elapsed=elapsed, remaining=remaining, bars=bars))

    def _remaining(self, now: float) -> float | None:
        done = self._now.done
        if self._now.stage == "done":
            return 0.0
        if not done:
            return None
        each = (self._begun - self._began) / done
        rest = max(self._now.total - done - 1, 0) * each
        # This one may take longer than those before, and says nothing of those that follow.
        return rest + max(each - (now - self._begun), 0.0)


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
