"""Several devices at the same time: a thread each, begun at a barrier, all of them waited for."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from itertools import repeat
from queue import SimpleQueue
from typing import Any

from gpumagic.isolation.output import THREADS, Quiet
from gpumagic.isolation.settings import thread_modes
from gpumagic.timing.measure.stopwatch import Lap, Stopwatch
from gpumagic.timing.measure.trial import Trial

_Job = Callable[[], Any]
# How often Ctrl-C is looked for.
_LOOK_S = 0.5
# When it began, when Python went on, when the device was done, and by the device's own events.
_Times = tuple[float, float, float, float | None]


class Worker:
    """A thread that does what it is given, until `close`."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], _Job] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._busy = self._interrupted = False
        # A daemon: code that cannot be interrupted must not keep Python from ending.
        self._thread = threading.Thread(target=self._work, name=f"{THREADS} {name}", daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> Future[Any]:
        """Have it done after what it was given before."""
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the job that it does now, once, at its next step of Python."""
        with self._lock:
            if self._busy and not self._interrupted:
                self._interrupted = True
                self._raise(ctypes.py_object(KeyboardInterrupt))

    def close(self) -> None:
        """End it after what it was given."""
        self._jobs.put(None)

    def join(self, timeout: float) -> None:
        """Wait for its end, so many seconds at most."""
        self._thread.join(timeout)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            future, job = given
            try:
                self._do(future, job)
            except KeyboardInterrupt as error:  # it came between two steps of ours
                self._settle()
                if not future.done():
                    future.set_exception(error)
            # What it raised refers to this frame.
            del given, future, job

    def _do(self, future: Future[Any], job: _Job) -> None:
        self._busy = True
        if not future.set_running_or_notify_cancel():
            self._settle()
            return
        failure: BaseException | None = None
        done: Any = None
        try:
            done = job()
        except BaseException as error:  # noqa: BLE001  it is raised by who waits for it
            failure = error
        self._settle()
        if failure is None:
            future.set_result(done)
        else:
            future.set_exception(failure)
        del failure

    def _settle(self) -> None:
        """No interrupt comes from here on, nor one that was sent too late."""
        with self._lock:
            if self._interrupted:
                self._raise(None)
            self._busy = self._interrupted = False

    def _raise(self, kind: ctypes.py_object[type[BaseException]] | None) -> None:
        if self._thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread.ident), kind)


class Together:
    """The same program on several devices, each in a world of its own.

    Parameters
    ----------
    trials : sequence of Trial
    stopwatch : Stopwatch
    quiet : Quiet

    Attributes
    ----------
    failed : str or None
        The device whose exception was raised.
    """

    def __init__(self, trials: Sequence[Trial], stopwatch: Stopwatch, quiet: Quiet) -> None:
        self.trials = trials
        self._stopwatch, self._quiet = stopwatch, quiet
        self.failed: str | None = None
        self._workers = [Worker(str(trial.device)) for trial in trials]
        self._stacks = [ExitStack() for _ in trials]

    def set_up(self, n: int) -> None:
        """Place the n-th thread on its device and run the set-up there."""
        self._do(n, self._set_up, thread_modes(), self.trials[n], self._stacks[n])

    def first(self, n: int) -> Any:
        """The first run on the n-th device, alone; its value."""
        return self._do(n, self.trials[n].first)

    def lap(self, number: int) -> Lap:
        """A block on all at the same time: from the first that began until the last was done."""
        barrier = threading.Barrier(len(self.trials))
        jobs = [self._job(n, number, barrier) for n in range(len(self.trials))]
        return self._timed(lambda: self._all(jobs, barrier))

    def alone(self, number: int) -> Lap:
        """The same blocks one device after the other, in the same threads."""

        def one_by_one() -> list[_Times]:
            found: list[_Times] = []
            for n in range(len(self.trials)):
                began, went_on, done, device = self._do(n, self._job(n, number, None))
                # As if each had begun when the one before was done.
                late = found[-1][2] - began if found else 0.0
                found.append((began + late, went_on + late, done + late, device))
            return found

        return self._timed(one_by_one)

    def close(self) -> None:
        """Take the threads off their devices and end them."""
        try:
            self._all([stack.close for stack in self._stacks])
        finally:
            for worker in self._workers:
                worker.close()
            for worker in self._workers:
                worker.join(1.0)  # longer only for code that cannot be interrupted

    @staticmethod
    def _set_up(modes: Callable[[ExitStack], None], trial: Trial, stack: ExitStack) -> None:
        modes(stack)
        stack.enter_context(trial.placed())
        trial.set_up()

    def _job(self, n: int, number: int, barrier: threading.Barrier | None) -> _Job:
        trial, devices, clock = self.trials[n], self._stopwatch.devices, self._stopwatch.clock
        runs = repeat(None, number)

        def run() -> _Times:
            device = trial.device
            start = devices.record(device)
            if barrier is not None:
                barrier.wait()
            began = clock()
            trial.run(runs)
            went_on = clock()
            end = devices.record(device)
            devices.wait(device)
            done = clock()
            known = start is not None and end is not None
            return began, went_on, done, devices.elapsed(device, start, end) if known else None

        return run

    def _timed(self, run: Callable[[], list[_Times]]) -> Lap:
        collects = gc.isenabled()
        gc.disable()
        try:
            self._stopwatch.wait()
            with self._quiet:
                times = run()
            # Devices that the code used besides its own.
            own = [trial.device for trial in self.trials]
            late = [d for d in self._stopwatch.devices.started() if d not in own]
            for device in late:
                self._stopwatch.devices.wait(device)
            ended = self._stopwatch.clock() if late else 0.0
        finally:
            if collects:
                gc.enable()
        began = min(t[0] for t in times)
        return Lap(
            max(ended, *(t[2] for t in times)) - began,
            max(t[1] for t in times) - began,
            max((t[3] for t in times if t[3] is not None), default=None),
        )

    def _do(self, n: int, job: Callable[..., Any], *given: Any) -> Any:
        jobs: list[_Job | None] = [None] * len(self.trials)
        jobs[n] = lambda: job(*given)
        return self._all(jobs)[0]

    def _all(self, jobs: Sequence[_Job | None], barrier: threading.Barrier | None = None) -> Any:
        """Wait for each job on its thread; an interrupt here interrupts them, and waits again.

        The first exception by order of the devices is raised, and its device is in `failed`; one
        that merely waited for another in vain comes last.
        """
        given: list[tuple[int, Future[Any]]] = []
        try:
            for n, job in enumerate(jobs):
                if job is not None:
                    given.append((n, self._workers[n].submit(job)))
            _wait([future for _, future in given], "FIRST_EXCEPTION")
            if barrier is not None:
                barrier.abort()  # for those that wait for one that failed
            _wait([future for _, future in given])
        except BaseException:
            if barrier is not None:
                barrier.abort()
            for n, future in given:
                if not future.cancel():
                    self._workers[n].interrupt()
            _wait([future for _, future in given])
            raise
        failed = [(n, error) for n, future in given if (error := future.exception()) is not None]
        failed.sort(key=lambda item: isinstance(item[1], threading.BrokenBarrierError))
        for n, error in failed:
            self.failed = str(self.trials[n].device)
            raise error
        return [future.result() for _, future in given]


def _wait(futures: Sequence[Future[Any]], until: str = "ALL_COMPLETED") -> None:
    # Python sees a signal that comes just before it waits for a lock only when that is over.
    left: Collection[Future[Any]] = futures
    while left:
        done, left = wait(futures, _LOOK_S, until)
        if until == "FIRST_EXCEPTION" and any(future.exception() for future in done):
            return
