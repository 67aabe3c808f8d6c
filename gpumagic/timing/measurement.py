"""Measure one target at one value, from copying its inputs to its `Timing`.

After an error or an interrupt `Measuring.timing` has what was measured by then, and nothing else is
left. An error is noted with the device and line where it happened.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from gpumagic import faults
from gpumagic.copies.trial import Trial
from gpumagic.device import CPU, Device
from gpumagic.errors import note
from gpumagic.faults import first_line
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.frameworks.known import Needed, torch_itself
from gpumagic.frameworks.watching import watch
from gpumagic.isolation.settings import Randomness, deferred
from gpumagic.isolation.worker import Quiet
from gpumagic.ledger import ledger_view
from gpumagic.ledger.entry import Ledger, Memory
from gpumagic.timing.agreement import Agreeing, outcome
from gpumagic.timing.runner import Lap, Repeats, Runner, Stopwatch
from gpumagic.timing.timing import Reporter, Stage, TimedDevices, Timing
from gpumagic.usercode.program import Program
from gpumagic.usercode.sweep import key
from gpumagic.usercode.values import comes_from, torch_here


class PeakMemory:
    """The peak memory from `start` to `stop`, by the counters of torch and the other frameworks."""

    def __init__(self, devices: Sequence[Device], needed: Needed) -> None:
        self._devices, self._others = devices, needed.others
        self._stops: list[Callable[[], Iterable[Memory]]] = []

    def start(self) -> None:
        """Begin on every initialized device."""
        torchs = [] if torch_here() is None else [torch_itself().peak(self._devices[0])]
        others = [each.peak(device) for each in self._others for device in self._devices]
        self._stops = torchs + others

    def stop(self) -> dict[str, int]:
        """Return bytes by device, without those held before; unknown ones have no entry."""
        found: dict[str, int] = {}
        for memory in (memory for stop in self._stops for memory in stop()):
            found[memory.device] = found.get(memory.device, 0) + memory.peak - memory.before
        torch = torch_here()
        # If other frameworks work too, 0 from torch is not the whole peak.
        if torch is not None and torch.cuda.is_initialized() and not self._others:
            for device in map(str, self._devices):
                if device.startswith("cuda"):
                    found.setdefault(device, 0)
        return dict(sorted(found.items()))


_WATCHING = "watching the copies of a timed run"


@contextmanager
def _transfers(stopwatch: Stopwatch, tell: Callable[[str], object]) -> Iterator[None]:
    """Count copies and waits, and tell their summary; measuring goes on if the ledger fails."""
    on_gpus = torch_here() is not None and stopwatch.devices.started()
    counted = [*([torch_itself()] if on_gpus else ()), *stopwatch.others]
    ledger = watch(warn=False, frameworks=counted)
    with faults.kept(_WATCHING):
        ledger.start()
    try:
        yield
    finally:
        with faults.kept(_WATCHING):
            ledger.stop()
        with faults.kept(_WATCHING):
            tell(ledger_view.line(Ledger(ledger.entries)))


_OUT_OF_MEMORY = ("torch.OutOfMemoryError", "tensorflow.errors.ResourceExhaustedError")
_DONATED = (
    "a run donates an operand (donate_argnums), so the next one has none: assign the "
    "result to it, as in x = f(x)"
)
_SAYING = ("DefaultCPUAllocator", "RESOURCE_EXHAUSTED: Out of memory")
# Report compiling in each run if it takes more than this part of the time.
_AGAIN = 0.1
_COMPILES = "each run compiles again, which is part of its time: compile once, in the set-up"


@dataclass(frozen=True)
class Task:
    """The settings that all measurements of a comparison share."""

    program: Program
    targets: tuple[TimedDevices, ...]  # the same random numbers for each device
    needed: Needed  # the frameworks that the code uses
    namespace: dict[str, Any]
    max_time: float  # seconds of each measurement, without its first run
    stopwatch: Stopwatch
    randomness: Randomness  # as it was before
    reporter: Reporter
    agreeing: Agreeing  # gets the result of each first run, before the timing
    items: Mapping[Any, float | None]  # items in one run, by `sweep.key` of the values


class Measuring:
    """One measurement: call `run`; whatever it raises, `timing` has the result."""

    def __init__(self, task: Task, target: TimedDevices, values: Mapping[str, Any]) -> None:
        self._task, self._target, self._values = task, target, values
        self._timing = Timing(
            target.where,
            values=dict(values),
            items=task.items[key(values)],
            name=" + ".join(dict.fromkeys(d.name for d in target.parts if d.name)) or None,
            virtual=any(device.virtual for device in target.parts),
            steady=False,
        )
        self.quiet = Quiet()  # drops what is printed after the first run
        self._repeats: Repeats | None = None
        self.failed = target.where  # the device that an exception was raised on
        self.notes: tuple[str, ...] = ()

    def timing(self, error: str | None = None) -> Timing:
        """The result; without times after an error."""
        repeats = self._repeats
        if error is not None or repeats is None:
            return replace(self._timing, error=error, alone=())
        laps, number = repeats.laps, repeats.number
        return replace(
            self._timing,
            seconds=repeats.seconds,
            host=tuple(lap.host / number for lap in laps),
            number=number,
            steady=repeats.steady,
        )

    def _found(self, **found: Any) -> None:
        self._timing = replace(self._timing, **found)

    def run(self) -> None:
        """Copy, set up, run once, warm up, repeat. Everything is freed at the end."""
        task = self._task
        trials: list[Trial] = []
        # Needed only if a second interrupt came before.
        with ExitStack() as stack, _closing(stack):
            task.stopwatch.wait()  # work queued by earlier cells does not count as copying
            for device in self._target.parts:
                trial = Trial(
                    task.program,
                    task.needed.of_torch(device),
                    task.namespace,
                    self._values,
                    others=FrameworksOn(device, task.needed.others),
                    clock=task.stopwatch.clock,
                )
                stack.callback(trial.close)
                trials.append(trial)
            copies = [trial.copies for trial in trials]
            self._found(
                copied=sum(each.nbytes for each in copies),
                copy_seconds=sum(each.seconds for each in copies),
            )
            self.notes = tuple(note for each in copies for note in each.notes)
            with deferred():  # so that its threads are ended
                runner = Runner(trials, task.stopwatch)
                stack.callback(runner.close)
            peak = PeakMemory(self._target.parts, task.needed)
            stack.callback(lambda: self._found(peak=peak.stop()))
            peak.start()
            try:
                after = []
                for n in range(len(trials)):
                    self._randomly()
                    runner.set_up(n)
                    after.append(Randomness())  # the first run continues from there
                self._first(runner, after)
                self._repeat(runner)
            finally:
                self.failed = runner.failed or self.failed

    def _randomly(self) -> None:
        task = self._task
        every = [task.needed.of_torch(part) for target in task.targets for part in target.parts]
        gpus = [device for device in every if device is not None and device.type == "cuda"]
        if gpus:
            self._task.randomness.same_start(gpus)
        else:
            self._task.randomness.restore()
        self._task.randomness.seed_tensorflow()

    def _first(self, runner: Runner, randomness: list[Randomness]) -> None:
        prints = self._target is self._task.targets[0]
        gave: list[tuple[Any, frozenset[str]]] = []
        task = self._task
        with _transfers(task.stopwatch, lambda line: self._found(transfers=line)):
            for n in range(len(runner.trials)):
                randomness[n].restore()
                compiled, began = _compiled(task.needed), task.stopwatch.clock()
                with nullcontext() if prints and not n else self.quiet:
                    value = runner.first(n)
                # Random numbers depend on the GPU's model.
                drawn = frozenset(
                    torch_here().cuda.get_device_name(name) if name.startswith("cuda") else name
                    for name in task.randomness.drawn()
                )
                task.stopwatch.wait()
                if compiled is not None:
                    took = (_compiled(task.needed) or 0.0) - compiled
                    self._found(compiled=(self._timing.compiled or 0.0) + took)
                elif task.needed.others:
                    took = task.stopwatch.clock() - began
                    self._found(first=max(self._timing.first or 0.0, took))
                gave.append((value, drawn))
        if len(self._task.targets) * len(runner.trials) == 1:
            return  # nothing to compare with
        for trial, (value, drawn) in zip(runner.trials, gave, strict=True):
            others = FrameworksOn(CPU, self._task.needed.others)
            space, assigned = trial.copies.globals, self._task.program.assigned
            numbers = outcome(space, assigned, value, others=others)
            self._task.agreeing.add(self._target.where, self._values, numbers, drawn)

    def _repeat(self, runner: Runner) -> None:
        task, clock = self._task, self._task.stopwatch.clock
        several = len(runner.trials) > 1
        max_time = task.max_time / 2 if several else task.max_time

        def repeated(lap: Callable[[int], Lap], **options: Any) -> Repeats:
            return Repeats(lap, max_time, clock=clock, **options)

        def told(stage: Stage) -> None:
            if task.reporter.due:
                with self.quiet.lifted():
                    median = repeats.median() if repeats.laps else None
                    task.reporter.at(stage, len(repeats.laps), median)

        compiled = _compiled(task.needed)
        repeats = self._repeats = repeated(runner.lap, told=told)
        with self.quiet:
            repeats.run()
        if compiled is not None:
            again = ((_compiled(task.needed) or 0.0) - compiled) / max(repeats.runs, 1)
            if again > _AGAIN * repeats.median():
                self.notes += (_COMPILES,)
        if several:
            alone = repeated(runner.alone)
            with self.quiet:
                try:
                    alone.run()
                finally:
                    self._found(alone=alone.seconds)


def _compiled(needed: Needed) -> float | None:
    """Return seconds that other frameworks have spent compiling; None if unknown."""
    known = [framework.compile_seconds() for framework in needed.others]
    told = [seconds for seconds in known if seconds is not None]
    return sum(told) if told else None


@contextmanager
def _closing(stack: ExitStack) -> Iterator[None]:
    try:
        yield
    finally:
        with deferred():
            stack.close()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the GPU's or the host's memory ran out."""
    known = isinstance(error, MemoryError) or comes_from(type(error), *_OUT_OF_MEMORY)
    # The host's allocator, and JAX, raise a plain RuntimeError.
    return known or any(words in str(error) for words in _SAYING)


def _line_of(error: BaseException, filename: str, before: str) -> str:
    """Return the last line of the user's code in the traceback; empty if unknown."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == filename]
    return f"{before}line {lines[-1]}" if lines else ""


def short(error: BaseException, filename: str) -> str:
    """Return ``"ValueError at line 3: shapes differ"``."""
    name, text = type(error).__name__, first_line(error)
    at = _line_of(error, filename, " at ")
    return f"{name}{at}" if text == name else f"{name}{at}: {text}"


def say_where(error: BaseException, filename: str, where: str, values: Mapping[str, Any]) -> None:
    """Add a note with the device, line and value to the error."""
    at = "".join(f", {name} = {value!r}" for name, value in values.items())
    note(error, f"timed on {where}{at}{_line_of(error, filename, ', ')}")
    if "deleted or donated" in str(error) or "Array has been deleted" in str(error):
        note(error, _DONATED)
