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
    """The progress of a comparison."""

    title: str  # the first line of the code
    where: str  # the device being measured
    values: Mapping[str, Any] = field(default_factory=dict)  # of the sweep's variable
    stage: Stage = "copy"
    repeat: int = 0  # that were timed; 0 in the other stages
    done: int = 0  # measurements, each of one device at one value
    total: int = 1
    elapsed: float = 0.0  # seconds
    remaining: float | None = (
        None  # seconds, estimated from finished measurements; None before the first
    )
    # For each device: where, its median so far, and `"waiting"`, a stage, `"done"`, or an error.
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
        # 0 means that the estimate was too short.
        if self.remaining:
            parts.append(f"about {age(max(self.remaining, 1))} left")
        return " · ".join(part for part in parts if part)

    @property
    def share(self) -> float | None:
        """The finished part of the time; None while the rest is unknown."""
        if self.remaining is None:
            return None
        return self.elapsed / ((self.elapsed + self.remaining) or 1.0)

    def posted(self) -> dict[str, Any]:
        """Return JSON for the monitor: a line, and a bar for each device."""
        return {"line": f"{self.title} · {self}", "bars": bars(self.bars)}


def bars(medians: Sequence[tuple[str, float | None, str]]) -> list[dict[str, Any]]:
    """Return each device's share of the slowest median; its state if it has no median."""
    spelled = {"copy": "copying"}
    slowest = max((seconds for _, seconds, _ in medians if seconds), default=0.0)
    return [
        {
            "where": where,
            "share": seconds / slowest if seconds else 0.0,
            "text": duration(seconds) if seconds is not None else spelled.get(state, state),
        }
        for where, seconds, state in medians
    ]


class Reporter:
    """Call `call` at most ten times a second; its errors do not end the comparison."""

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
        """Whether the next report is due."""
        return self._clock() - self._told >= _PERIOD_S

    def begin(self, where: str, values: Mapping[str, Any]) -> None:
        """Report that the measurement of a device at a value begins."""
        if values != self._now.values:
            self._bars = dict.fromkeys(self._bars, (None, "waiting"))
        self._now = replace(self._now, where=where, values=dict(values))
        self._begun = self._clock()
        self.at("copy")

    def at(self, stage: Stage, repeat: int = 0, median: float | None = None) -> None:
        """Report the stage and the median so far."""
        self._now = replace(self._now, stage=stage, repeat=repeat)
        self._bars[self._now.where] = median, stage
        self._tell()

    def end(self, median: float | None, state: str = "done") -> None:
        """Report that the measurement has ended."""
        self._now = replace(self._now, done=self._now.done + 1)
        self._bars[self._now.where] = median, state
        self._tell()

    def close(self) -> None:
        """Report that everything is done."""
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
        # A first run may take longer and says nothing about the following runs.
        return rest + max(each - (now - self._begun), 0.0)


NARROW = 0.01
"""The median is known when its 95 % interval is narrower than this part of it."""

# A block is long enough that its overhead is about a thousandth. Not longer: other programs
# disturb some short blocks and not others, and the median is that of the undisturbed ones. Long
# blocks would all be disturbed.
_NEGLIGIBLE = 1e-3
_LEAST_BLOCK_S = 1e-3
# Steady: the last five blocks have a coefficient of variation under 2 % (A. Georges, D. Buytaert,
# L. Eeckhout, Statistically rigorous Java performance evaluation, OOPSLA 2007, section 4.2), after
# a tenth of a second, in which a GPU raises its clock.
_WINDOW, _STEADY, _LEAST_WARM_S = 5, 0.02, 0.1
# Warm up for at most a fifth of the time, since some machines are never steady.
_WARM_SHARE = 0.2
# As torch.utils.benchmark.Timer.blocked_autorange: other programs work in bursts.
_LEAST_TIMED_S = 0.2
_LEAST, _MOST = 10, 10_000


class Repeats:
    """Repeats of code, timed by `lap`: at least one, for `least` seconds within `max_time`."""

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
        self.laps: list[Lap] = []  # filled while it runs, so that an interrupt keeps them
        self.number, self.runs = 1, 0  # runs in each, and in total with warm-up
        self.steady = False  # whether the median's interval is narrow enough
        self._timed, self._told, self._clock, self._between = lap, told, clock, between
        self._max_time, self._least = max_time, min(least, max_time / 2)
        self._ordered: list[float] = []
        # The interval is next computed at this many repeats, not at each of thousands.
        self._look_at = _LEAST

    @property
    def seconds(self) -> tuple[float, ...]:
        """Seconds of one run, for each repeat."""
        return tuple(lap.total / self.number for lap in self.laps)

    def median(self) -> float:
        """The median of `seconds` so far."""
        return statistics.median(self._ordered)

    def run(self) -> None:
        """Warm up and repeat."""
        began = self._clock()
        share = _WARM_SHARE * self._max_time
        self._told("warm up")
        lap = self._lap(1)
        if lap.total >= share:
            # The first run was the warm-up; a long run gets no other.
            self._keep(lap)
            if self._enough(self._clock() - began):
                return
            lap = self._lap(1)
        if lap.total < share:
            # If a run before was quick, this one was different: something was compiled.
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
        """Run until it is steady, and choose the runs in a block; `each` is the time of one."""
        empty = statistics.median(self._lap(0).total for _ in range(5))
        block = min(max(empty / _NEGLIGIBLE, _LEAST_BLOCK_S), self._max_time / 2 / _LEAST)
        window: deque[float] = deque(maxlen=_WINDOW)
        while True:
            number = min(math.ceil(block / max(each, 1e-9)), 10 * self.number)
            # Not for every small increase, or it would never be steady.
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
            # The minimum: time lost to other programs must not make the blocks too short.
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
