"""Run a program on one device in this thread, or on several at the same time in a thread each.

Each runs on copies of what the program reads, placed there. Guarantees: after `close` of all that
was made here nothing of it is left, on the devices or in the variables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import repeat
from typing import Any

from gpumagic.copies.trial import Trial
from gpumagic.isolation.settings import thread_modes
from gpumagic.isolation.worker import Worker, wait_for_all
from gpumagic.timing.measure.stopwatch import Lap, Stopwatch

_Job = Callable[[], Any]
# When it began, when Python went on, when all was done, and seconds by the device's own events.
_Times = tuple[float, float, float, float | None]


class Runner:
    """The same program on one device or on several, each on copies of its own."""

    def __init__(self, trials: Sequence[Trial], stopwatch: Stopwatch) -> None:
        self.trials = trials
        self._stopwatch = stopwatch
        self.failed: str | None = None  # the device whose exception was raised
        # One device needs no thread: in this one it can be interrupted at any step of Python.
        alone = len(trials) == 1
        self._workers = [] if alone else [Worker(trial.where) for trial in trials]

    def set_up(self, n: int) -> None:
        """Place the n-th thread on its device and run the set-up there."""
        modes, trial = thread_modes(), self.trials[n]

        def job() -> None:
            modes(trial.stack)
            trial.set_up()

        self._all({n: job})

    def first(self, n: int) -> Any:
        """The first run on the n-th device, alone; its value."""
        return self._all({n: self.trials[n].first})[0]

    def lap(self, number: int) -> Lap:
        """A block on all at the same time: from the first that began until the last was done."""
        if not self._workers:
            (trial,) = self.trials
            return self._stopwatch.lap(trial.loop, number, on=[trial.device])
        barrier = threading.Barrier(len(self.trials))
        jobs = {n: partial(self._run, n, number, barrier) for n in range(len(self.trials))}
        with self._stopwatch.undisturbed():
            began, went_on, done, device = zip(*self._all(jobs, barrier), strict=True)
        first = min(began)
        known = [seconds for seconds in device if seconds is not None]
        return Lap(max(done) - first, max(went_on) - first, max(known, default=None))

    def alone(self, number: int) -> Lap:
        """The same blocks one device after the other, in the same threads."""
        total = 0.0
        for n, trial in enumerate(self.trials):
            total += self._all({n: partial(self._stopwatch.lap, trial.loop, number)})[0].total
        return Lap(total, total)

    def close(self) -> None:
        """Take the threads off their devices and end them."""
        try:
            self._all({n: trial.stack.close for n, trial in enumerate(self.trials)})
        finally:
            for worker in self._workers:
                worker.close()

    def _run(self, n: int, number: int, barrier: threading.Barrier) -> _Times:
        trial, devices, clock = self.trials[n], self._stopwatch.devices, self._stopwatch.clock
        elsewhere = [other.device for other in self.trials if other is not trial]
        runs = repeat(None, number)
        start = self._stopwatch.record(trial.device)
        barrier.wait()
        began = clock()
        trial.loop(runs)
        went_on = clock()
        end = self._stopwatch.record(trial.device)
        # Its own, and what the code used besides.
        self._stopwatch.wait_for(d for d in devices.started() if d not in elsewhere)
        done = clock()
        if trial.device is None or start is None or end is None:
            return began, went_on, done, None
        return began, went_on, done, devices.elapsed(trial.device, start, end)

    def _all(self, jobs: Mapping[int, _Job], barrier: threading.Barrier | None = None) -> list[Any]:
        """Wait for each job on its thread; an interrupt here interrupts them, and waits again."""
        if not self._workers:
            return [job() for job in jobs.values()]
        given: dict[int, Future[Any]] = {}
        try:
            for n, job in jobs.items():
                given[n] = self._workers[n].submit(job)
            wait_for_all(given.values(), "FIRST_EXCEPTION")
            if barrier is not None:
                barrier.abort()  # for those that wait for one that failed
            wait_for_all(given.values())
        except BaseException:
            if barrier is not None:
                barrier.abort()
            for n, future in given.items():
                if not future.cancel():
                    self._workers[n].interrupt()
            wait_for_all(given.values())
            raise
        failed = [(n, error) for n, future in given.items() if (error := future.exception())]
        # What merely waited for another in vain comes last.
        failed.sort(key=lambda item: isinstance(item[1], threading.BrokenBarrierError))
        for n, error in failed:
            self.failed = self.trials[n].where
            raise error
        return [future.result() for future in given.values()]
