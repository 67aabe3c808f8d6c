"""Run a program on one device, or on several at the same time, and time blocks of runs.

A GPU may still work when a call has returned, so all devices are synchronized around each block.
"""

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

from gpumagic.copies.trial import Trial
from gpumagic.device.cuda_state import no_collections
from gpumagic.frameworks.framework import Framework
from gpumagic.isolation.settings import thread_modes
from gpumagic.isolation.worker import Worker, wait_for_all
from gpumagic.timing.comparison import interval

_Loop = Callable[[Iterable[None]], object]
_Times = tuple[float, float, float]


@dataclass(frozen=True)
class Lap:
    """Total seconds of a block of runs."""

    total: float  # until all devices had finished
    host: float  # until the last call had returned; a GPU may still have been working


@dataclass
class Stopwatch:
    """Time blocks of runs with a monotonic clock, and wait for the devices of `frameworks`."""

    frameworks: Sequence[Framework] = ()
    clock: Callable[[], float] = time.perf_counter

    def wait(self) -> None:
        for framework in self.frameworks:
            framework.wait()

    def times(self, run: _Loop, number: int) -> _Times:
        """Run the code. Return when it began, when it returned, and when all devices were done."""
        runs = repeat(None, number)
        began = self.clock()
        run(runs)
        returned = self.clock()
        self.wait()  # waits also for devices that the code has just initialized
        return began, returned, self.clock()

    def lap(self, run: _Loop, number: int) -> Lap:
        """Time `number` runs, without garbage collection, like `timeit`."""
        with no_collections():
            self.wait()
            began, returned, ended = self.times(run, number)
        return Lap(ended - began, returned - began)


class Runner:
    """Run a program on one or several devices. Each device has copies of the variables."""

    def __init__(self, trials: Sequence[Trial], stopwatch: Stopwatch) -> None:
        self.trials = trials
        self._stopwatch = stopwatch
        # With one device the program runs in this thread, so that Ctrl-C can end the program.
        self._workers = [] if len(trials) == 1 else [Worker(trial.where) for trial in trials]

    def set_up(self, n: int) -> None:
        """Run the set-up in the n-th thread, with the n-th device as that thread's default."""
        modes, trial = thread_modes(), self.trials[n]

        def job() -> None:
            modes(trial.stack)
            trial.set_up()

        self._all({n: job})

    def first(self, n: int) -> Any:
        """Run once on the n-th device only; return the value of the last expression."""
        return self._all({n: self.trials[n].first})[0]

    def lap(self, number: int) -> Lap:
        """Time a block on all devices together, from the earliest start to the latest end."""
        if not self._workers:
            (trial,) = self.trials
            return self._stopwatch.lap(trial.loop, number)
        barrier = threading.Barrier(len(self.trials))

        def job(trial: Trial) -> _Times:
            barrier.wait()
            return self._stopwatch.times(trial.loop, number)

        jobs = {n: partial(job, trial) for n, trial in enumerate(self.trials)}
        with no_collections():
            self._stopwatch.wait()
            began, returned, done = zip(*self._all(jobs, barrier), strict=True)
        return Lap(max(done) - min(began), max(returned) - min(began))

    def alone(self, number: int) -> Lap:
        """Time a block on each device, one after the other, in the same threads as `lap`."""
        total = 0.0
        for n, trial in enumerate(self.trials):
            total += self._all({n: partial(self._stopwatch.lap, trial.loop, number)})[0].total
        return Lap(total, total)

    def close(self) -> None:
        """Restore each thread's default device, and end the threads."""
        try:
            self._all({n: trial.stack.close for n, trial in enumerate(self.trials)})
        finally:
            for worker in self._workers:
                worker.close()

    def _all(
        self, jobs: Mapping[int, Callable[[], Any]], barrier: threading.Barrier | None = None
    ) -> list[Any]:
        """Run jobs in their devices' threads; return the results. An interrupt stops all jobs."""
        if not self._workers:
            return [job() for job in jobs.values()]
        given: dict[int, Future[Any]] = {}
        try:
            for n, job in jobs.items():
                given[n] = self._workers[n].submit(job)
            wait_for_all(given.values())
        except BaseException:
            if barrier is not None:
                barrier.abort()
            for n, future in given.items():
                if not future.cancel():
                    self._workers[n].interrupt()
            wait_for_all(given.values())
            raise
        return [future.result() for future in given.values()]


_NARROW = 0.01  # stop if the 95 % confidence interval is at most this fraction of the median
_NEGLIGIBLE = 1e-3  # maximum share of a block's time that the loop itself takes
_LEAST_BLOCK_S = 1e-3  # minimum seconds of a block; short, so that few blocks are disturbed
# Times are steady if the coefficient of variation of five blocks is at most 2 % (Georges et al.,
# Statistically rigorous Java performance evaluation, OOPSLA 2007, 4.2). The warm-up takes at least
# 0.1 s, in which a GPU raises its clock.
_WINDOW, _STEADY, _LEAST_WARM_S = 5, 0.02, 0.1
_WARM_SHARE = 0.2  # maximum share of `max_time` to warm up, because some machines are never steady
_LEAST_TIMED_S = 0.2  # minimum sum of laps, as in torch's Timer: evens out other programs' load
_LEAST, _MOST = 10, 10_000  # after `_LEAST` repeats, check the precision; after `_MOST`, stop


class Repeats:
    """Warm up, then call `lap` at least once. The maximum duration is about `max_time`."""

    def __init__(
        self,
        lap: Callable[[int], Lap],
        max_time: float,
        *,
        clock: Callable[[], float],
        told: Callable[[str], object] = lambda stage: None,
    ) -> None:
        self.laps: list[Lap] = []  # filled during `run`, so that laps survive an interrupt
        self.number = 1  # runs in each lap
        self._lap, self._told, self._clock = lap, told, clock
        self._max_time, self._least = max_time, min(_LEAST_TIMED_S, max_time / 2)
        self._timed_s = 0.0
        self._look_at = _LEAST  # number of repeats at the next check of the precision

    @property
    def seconds(self) -> tuple[float, ...]:
        return tuple(lap.total / self.number for lap in self.laps)

    def median(self) -> float:
        return statistics.median(self.seconds)

    def run(self) -> None:
        began = self._clock()
        share = _WARM_SHARE * self._max_time
        self._told("warm up")
        lap = self._lap(1)
        if lap.total >= share:
            # A long run needs no warm-up other than the first run, which the caller has made.
            self._keep(lap)
            if self._enough(self._clock() - began):
                return
            lap = self._lap(1)
        if lap.total < share:
            self.laps.clear()  # the earlier, longer run did other work, such as compiling
            self._timed_s = 0.0
            began = self._clock() - lap.total
            self._warm_up(lap.total, began, share)
        else:
            self._keep(lap)
        self._told("timing")
        while not self._enough(self._clock() - began):
            self._keep(self._lap(self.number))

    def _warm_up(self, each: float, began: float, share: float) -> None:
        """Run until times are steady, at most `share` s, and set `number`. A run takes `each` s."""
        empty = statistics.median(self._lap(0).total for _ in range(5))
        block = min(max(empty / _NEGLIGIBLE, _LEAST_BLOCK_S), self._max_time / 2 / _LEAST)
        window: deque[float] = deque(maxlen=_WINDOW)
        while True:
            number = min(math.ceil(block / max(each, 1e-9)), 10 * self.number)
            if number > 1.5 * self.number:  # a smaller increase is not worth clearing the window
                self.number = number
                window.clear()
            spent = self._clock() - began
            warm = len(window) == _WINDOW and spent >= min(_LEAST_WARM_S, share)
            if warm and statistics.stdev(window) <= _STEADY * statistics.fmean(window):
                return
            if spent + self.number * each >= share:
                return
            lap = self._lap(self.number)
            window.append(lap.total)
            # Use the minimum, so that a run slowed by other programs does not shorten the blocks.
            each = min(each, lap.total / self.number)
            self._told("warm up")

    def _keep(self, lap: Lap) -> None:
        self.laps.append(lap)
        self._timed_s += lap.total
        self._told("timing")

    def _enough(self, spent: float) -> bool:
        if not (count := len(self.laps)):
            return False
        if self._timed_s >= self._least and count >= self._look_at:
            self._look_at = max(count + 1, int(1.05 * count))
            low, high = interval(self.seconds)
            if high - low <= _NARROW * self.median():
                return True
        return count >= _MOST or spent + self.laps[-1].total > self._max_time
