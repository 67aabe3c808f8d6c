"""Run a program on one device or several at the same time, and measure a block of runs.

A device works on after the call that gave it the work has returned. So every device that torch has
started in this process is synchronized before and after a block, with all its streams, and so is
each other framework that the code needs.

A program runs on copies of the variables that it reads. Guarantees: after `close` nothing made here
is left, on the devices or in the variables.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from gpumagic import nvml
from gpumagic.copies.trial import Trial
from gpumagic.device import Device, cuda_state
from gpumagic.frameworks.framework import Framework
from gpumagic.isolation.settings import thread_modes
from gpumagic.isolation.worker import Worker, wait_for_all
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch


LEAST_S = 1.0
"""A stretch shorter than this has no energy: the counter follows a power reading that is renewed
every 100 ms or so (Z. Yang, K. Adamek, W. Armour, Part-time power measurements: nvidia-smi's lack
of attention, SC24, arXiv:2312.02741), so that of ten of them a tenth is not certain."""


class TorchDevices:
    """The GPUs of this process, as torch has them; virtual ones too."""

    def started(self) -> Sequence[torch.device]:
        """Return the GPUs with a context; synchronizing another would create one of 0.5 GiB."""
        torch = torch_here()
        if torch is None:
            return []
        if torch.cuda.is_initialized():
            return [torch.device("cuda", index) for index in cuda_state.started()]
        if torch.xpu.is_initialized():
            return [torch.device("xpu", index) for index in range(torch.xpu.device_count())]
        return [torch.device("mps", 0)] if torch.backends.mps.is_available() else []

    def wait(self, device: torch.device) -> None:
        """Wait until the device has finished all its streams."""
        from gpumagic.moving.move import wait_for  # it imports torch, which may not be installed

        wait_for(device)

    def record(self, device: torch.device) -> Any:
        """Record an event on the current stream; None if the device has no events."""
        torch = torch_here()
        if device.type == "cuda":
            event = cuda_state.take_event(device.index)
            event.record(torch.cuda.current_stream(device))
            return event
        if device.type == "mps":
            mark = torch.mps.event.Event(enable_timing=True)
            mark.record()
            return mark
        return None

    def elapsed(self, device: torch.device, start: Any, end: Any) -> float:
        """Return seconds between two completed events; torch gives milliseconds."""
        seconds = float(start.elapsed_time(end)) * 1e-3
        if device.type == "cuda":
            cuda_state.give_events(device.index, start, end)
        return seconds


@dataclass(frozen=True)
class Lap:
    """Seconds of a block of runs, in total."""

    total: float  # until every device was done
    host: float  # until Python continued
    # Between the device's events; the slowest of several devices.
    device: float | None = None


class Stopwatch:
    """Time blocks of runs by a monotonic clock."""

    def __init__(
        self,
        devices: TorchDevices | None = None,
        clock: Callable[[], float] = time.perf_counter,
        others: Sequence[Framework] = (),  # other frameworks than torch to wait for
    ) -> None:
        self.devices = devices or TorchDevices()
        self.clock = clock
        self.others = others

    def wait(self) -> Sequence[torch.device]:
        """Synchronize every initialized device and return torch's."""
        started = self.devices.started()
        self.wait_for(started)
        return started

    def wait_for(self, devices: Iterable[torch.device]) -> None:
        """Synchronize these devices of torch and the other frameworks."""
        for device in devices:
            self.devices.wait(device)
        for framework in self.others:
            framework.wait()

    def record(self, device: torch.device | None) -> Any:
        """Record an event of a GPU; None if other frameworks use it too."""
        return None if device is None or self.others else self.devices.record(device)

    @contextmanager
    def undisturbed(self) -> Iterator[Sequence[torch.device]]:
        """Synchronize first; collect no garbage within, as `timeit` does."""
        collects = gc.isenabled()
        gc.disable()
        try:
            yield self.wait()
        finally:
            if collects:
                gc.enable()

    def lap(
        self,
        run: Callable[[Iterable[None]], object],
        number: int,
        on: Iterable[torch.device | None] = (),
    ) -> Lap:
        """Time `number` runs; for the GPUs in `on`, also by their own events."""
        clock, devices = self.clock, self.devices
        timed = [device for device in on if device is not None and device.type != "cpu"]
        runs = repeat(None, number)
        with self.undisturbed() as started:
            starts = [self.record(device) for device in timed]
            began = clock()
            run(runs)
            went_on = ended = clock()
            ends = [self.record(device) for device in timed]
            if started or self.others:
                self.wait_for(started)
                ended = clock()
            # The code may have initialized more devices.
            late = [device for device in devices.started() if device not in started]
            if late:
                for device in late:
                    devices.wait(device)
                ended = clock()
        passed = [
            devices.elapsed(device, start, end)
            for device, start, end in zip(timed, starts, ends, strict=True)
            if start is not None and end is not None
        ]
        return Lap(ended - began, went_on - began, max(passed, default=None))


def joules(devices: Sequence[Device], door: nvml.Nvml | None = None) -> float | None:
    """Return joules of whole boards since the driver was loaded; None if one has no counter."""
    if not all(d.kind == "cuda" and d.uuid and not d.virtual for d in devices):
        return None
    door = door or nvml.door()
    question = {"energy": ("nvmlDeviceGetTotalEnergyConsumption",)}
    gpus = {gpu.uuid: gpu for gpu in door.gpus()}
    known = [gpus[device.uuid] for device in devices if device.uuid in gpus]
    counters = [door.ask(gpu, question, alive=True)["energy"] for gpu in known]
    if None in counters or len(counters) < len(devices):
        return None
    return float(sum(counters)) * 1e-3  # from millijoules


_Job = Callable[[], Any]
# Begin, when Python continued, when all was done, and seconds by the device's events.
_Times = tuple[float, float, float, float | None]


class Runner:
    """One program on one or several devices, each with its own copies."""

    def __init__(self, trials: Sequence[Trial], stopwatch: Stopwatch) -> None:
        self.trials = trials
        self._stopwatch = stopwatch
        self.failed: str | None = None  # the device whose exception was raised
        # One device runs in this thread, where it can be interrupted anywhere.
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
        """Return the value of the first run on the n-th device, alone."""
        return self._all({n: self.trials[n].first})[0]

    def lap(self, number: int) -> Lap:
        """Time a block on all devices at once: from the first begin to the last end."""
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
        """Time the same blocks one device after the other, in the same threads."""
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
        # Its own device, and others that the code used.
        self._stopwatch.wait_for(d for d in devices.started() if d not in elsewhere)
        done = clock()
        if trial.device is None or start is None or end is None:
            return began, went_on, done, None
        return began, went_on, done, devices.elapsed(trial.device, start, end)

    def _all(self, jobs: Mapping[int, _Job], barrier: threading.Barrier | None = None) -> list[Any]:
        """Wait for the jobs of all threads; an interrupt interrupts them, then waits again."""
        if not self._workers:
            return [job() for job in jobs.values()]
        given: dict[int, Future[Any]] = {}
        try:
            for n, job in jobs.items():
                given[n] = self._workers[n].submit(job)
            wait_for_all(given.values(), "FIRST_EXCEPTION")
            if barrier is not None:
                barrier.abort()  # for threads that wait for a failed one
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
        # Errors of threads that only waited come last.
        failed.sort(key=lambda item: isinstance(item[1], threading.BrokenBarrierError))
        for n, error in failed:
            self.failed = self.trials[n].where
            raise error
        return [future.result() for future in given.values()]
