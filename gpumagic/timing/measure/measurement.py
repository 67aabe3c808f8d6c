"""Measure one target at one value, from the copying of its inputs to its `Timing`.

Whatever happens meanwhile, `Measuring.timing` is what there is by then, and nothing else is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic import faults
from gpumagic.cell.run import MemoryMeter
from gpumagic.isolation.output import Quiet
from gpumagic.isolation.random_state import Randomness
from gpumagic.isolation.settings import Growth, deferred
from gpumagic.ledger import ledger_view as view
from gpumagic.ledger.watch import watch
from gpumagic.timing.ask.targets import TimedDevices
from gpumagic.timing.measure.at_once import Together
from gpumagic.timing.measure.energy import LEAST_S, EnergyMeter
from gpumagic.timing.measure.program import Program
from gpumagic.timing.measure.repeats import Repeats
from gpumagic.timing.measure.stopwatch import Lap, Stopwatch
from gpumagic.timing.measure.trial import Alone, Trial
from gpumagic.timing.progress import Reporter, Stage
from gpumagic.timing.result.agreement import Agreeing
from gpumagic.timing.result.timing import Timing


@dataclass(frozen=True)
class Task:
    """What all measurements of a comparison have in common."""

    program: Program
    targets: tuple[TimedDevices, ...]  # all: each draws the same random numbers
    namespace: dict[str, Any]
    in_place: bool
    max_time: float  # seconds of each measurement, its first run apart
    stopwatch: Stopwatch
    randomness: Randomness  # as it was before
    reporter: Reporter


class Measuring:
    """A measurement: `run` it. What the first run gave goes to `agreeing`, before the timing."""

    def __init__(
        self, task: Task, target: TimedDevices, values: Mapping[str, Any], agreeing: Agreeing
    ) -> None:
        self._task, self._target, self._values = task, target, values
        self._agreeing = agreeing
        self._quiet = Quiet()
        self._runner: Alone | Together | None = None
        self._repeats: Repeats | None = None
        self._alone: Repeats | None = None
        self._energy: float | None = None
        self._peak: dict[str, int] = {}
        self._transfers = ""
        self._copied, self._copy_seconds = 0, 0.0
        self.notes: tuple[str, ...] = ()

    @property
    def dropped(self) -> bool:
        """Whether some of what the code printed was not shown."""
        return self._quiet.dropped

    @property
    def measured(self) -> bool:
        """Whether a repeat was timed."""
        return self._repeats is not None and bool(self._repeats.laps)

    @property
    def failed(self) -> str:
        """The device that an exception was raised on."""
        return (self._runner and self._runner.failed) or self._target.where

    def run(self) -> None:
        """Copy, set up, run once, warm up, repeat. Everything is let go of at the end."""
        task = self._task
        self._randomly()
        trials: list[Trial] = []
        # The stack closes itself only if a second interrupt came in our way.
        with ExitStack() as stack, _closing(stack):
            task.stopwatch.wait()  # what earlier cells have queued is no part of the copying
            for device in self._target.torch_devices:
                trial = Trial(
                    task.program,
                    device,
                    task.namespace,
                    self._values,
                    in_place=task.in_place,
                    clock=task.stopwatch.clock,
                )
                stack.callback(trial.close)
                trials.append(trial)
            self._copied = sum(trial.copied for trial in trials)
            self._copy_seconds = sum(trial.copy_seconds for trial in trials)
            self.notes = tuple(note for trial in trials for note in trial.notes)
            kind = Alone if len(trials) == 1 else Together
            with deferred():  # its threads are to be ended by somebody
                self._runner = runner = kind(trials, task.stopwatch)
                stack.callback(runner.close)
            meter = MemoryMeter()
            stack.callback(self._measure_memory, meter)
            meter.start()
            after = self._set_up(runner)
            # What each run would add to: the search path, the handlers of a logger …
            growth = Growth()
            self._first(runner, after)
            self._repeat(runner, growth)

    def timing(self, error: str | None = None) -> Timing:
        """What was measured."""
        target, repeats = self._target, self._repeats
        laps, number = (repeats.laps, repeats.number) if repeats is not None else ([], 1)
        devices = [lap.device / number for lap in laps if lap.device is not None]
        return Timing(
            where=target.where,
            seconds=tuple(lap.total / number for lap in laps),
            host=tuple(lap.host / number for lap in laps),
            device=tuple(devices) if devices and len(devices) == len(laps) else None,
            number=number,
            values=dict(self._values),
            name=target.name,
            uuid=target.parts[0].uuid if len(target.parts) == 1 else None,
            virtual=target.virtual,
            copied=self._copied,
            copy_seconds=self._copy_seconds,
            peak=self._peak,
            transfers=self._transfers,
            energy=self._energy,
            alone=self._alone.seconds if self._alone is not None else (),
            error=error,
            steady=repeats is not None and repeats.steady,
        )

    def _randomly(self) -> None:
        every = [device for target in self._task.targets for device in target.torch_devices]
        self._task.randomness.restore()
        if any(device.type == "cuda" for device in every):
            self._task.randomness.same_start(every)

    def _set_up(self, runner: Alone | Together) -> list[Randomness]:
        """Set each device up with the same random numbers; the state that each goes on from."""
        after = []
        for n in range(len(runner.trials)):
            if n:
                self._randomly()
            runner.set_up(n)
            after.append(Randomness())
        return after

    def _first(self, runner: Alone | Together, randomness: list[Randomness]) -> None:
        prints = self._target is self._task.targets[0]
        gave: list[tuple[Any, frozenset[str]]] = []
        with self._transfers_watched():
            for n in range(len(runner.trials)):
                if len(randomness) > 1:
                    randomness[n].restore()
                with nullcontext() if prints and not n else self._quiet:
                    value = runner.first(n)
                drawn = frozenset(_drawing(d) for d in self._task.randomness.drawn())
                self._task.stopwatch.wait()
                gave.append((value, drawn))
        if len(self._task.targets) * len(runner.trials) == 1:
            return  # there is nothing to compare it with
        for trial, (value, drawn) in zip(runner.trials, gave, strict=True):
            self._agreeing.add(self._target.where, self._values, trial.numbers(value), drawn)

    @contextmanager
    def _transfers_watched(self) -> Iterator[None]:
        if not self._task.stopwatch.devices.started():
            yield
            return
        # A ledger that cannot be kept is no reason not to measure.
        watched: watch | None = None
        with faults.kept("watching the copies of a timed run"):
            watched = watch(warn=False).start()
        try:
            yield
        finally:
            if watched is not None:
                with faults.kept("watching the copies of a timed run"):
                    watched.stop()
                    self._transfers = view.line(watched.ledger) or ""

    def _repeat(self, runner: Alone | Together, growth: Growth) -> None:
        task = self._task
        energy = EnergyMeter(self._target.parts)
        several = isinstance(runner, Together)
        max_time = task.max_time / 2 if several else task.max_time
        least = {"least": LEAST_S} if energy.supported else {}
        clock = task.stopwatch.clock

        def repeated(lap: Callable[[int], Lap], **options: Any) -> Repeats:
            return Repeats(lap, max_time, clock=clock, between=growth.put_back, **options)

        def told(stage: Stage) -> None:
            with self._quiet.lifted():
                median = repeats.median() if repeats.laps else None
                task.reporter.at(stage, len(repeats.laps), median)

        repeats = self._repeats = repeated(runner.lap, told=told, **least)
        energy.start()
        began = clock()
        with self._quiet:
            repeats.run()
        if clock() - began >= LEAST_S and (joules := energy.joules()) is not None:
            self._energy = joules / repeats.runs
        if isinstance(runner, Together):
            self._alone = repeated(runner.alone)
            with self._quiet:
                self._alone.run()

    def _measure_memory(self, meter: MemoryMeter) -> None:
        found = {f"cuda:{index}": memory.peak for index, memory in meter.stop().items()}
        for device in self._target.torch_devices:
            if device.type == "cuda" and str(device) not in found and torch.cuda.is_initialized():
                # It needed no more than its inputs.
                with suppress(RuntimeError, AssertionError):
                    found[str(device)] = torch.cuda.memory_allocated(device)
        self._peak = dict(sorted(found.items()))


@contextmanager
def _closing(stack: ExitStack) -> Iterator[None]:
    try:
        yield
    finally:
        with deferred():
            stack.close()


def _drawing(device: str) -> str:
    """What decides which numbers a generator gives: their order is the model's of a GPU."""
    if not device.startswith("cuda"):
        return device
    with suppress(RuntimeError, AssertionError):
        return f"cuda {torch.cuda.get_device_name(device)}"
    return "cuda"
