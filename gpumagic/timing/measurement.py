"""Measure one target at one value, from copying its inputs to its `Timing`.

After an error or an interrupt `Measuring.timing` has what was measured by then, and nothing else is
left. An error is noted with the device and line where it happened.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from gpumagic import faults
from gpumagic.copies.trial import Trial
from gpumagic.device import CPU, Device
from gpumagic.errors import note
from gpumagic.faults import first_line
from gpumagic.frameworks.beside import Beside
from gpumagic.frameworks.needed import Needed
from gpumagic.isolation.settings import Growth, Randomness, deferred
from gpumagic.isolation.worker import Quiet
from gpumagic.ledger import ledger_view
from gpumagic.ledger.counts import Tally
from gpumagic.ledger.entry import Ledger, merged
from gpumagic.timing.agreement import Agreeing, outcome
from gpumagic.timing.repeats import Repeats, Reporter, Stage
from gpumagic.timing.runner import LEAST_S, Lap, Runner, Stopwatch, joules
from gpumagic.timing.timing import TimedDevices, Timing
from gpumagic.usercode.program import Program
from gpumagic.usercode.sweep import key
from gpumagic.usercode.values import comes_from, torch_here


class PeakMemory:
    """From `start` to `stop`, by torch's own counters and those of the frameworks beside it."""

    def __init__(self, devices: Sequence[Device], needed: Needed) -> None:
        self._devices, self._others = devices, needed.others
        self._before: dict[str, list[tuple[int, int | None]]] = {}

    def start(self) -> None:
        """Begin, on every device that has started."""
        if torch_here() is not None:
            from gpumagic.ledger.memory_meter import MemoryMeter

            self._meter = MemoryMeter()
            self._meter.start()
        self._before = {str(device): self._of_others(device) for device in self._devices}

    def stop(self) -> dict[str, int]:
        """Bytes by device; what is not known has no entry."""
        found: dict[str, int] = {}
        torch = torch_here()
        if torch is not None:
            # What the kernel held before is none of the code's doing.
            found = {m.device: m.peak - m.before for m in self._meter.stop().values()}
            for device in map(str, self._devices):
                # Where others work too, nothing of torch's is not nothing at all.
                if device.startswith("cuda") and torch.cuda.is_initialized() and not self._others:
                    found.setdefault(device, 0)
        for one in self._devices:
            if (peak := self._peak_of_others(one)) is not None:
                found[str(one)] = found.get(str(one), 0) + peak
        return dict(sorted(found.items()))

    def _of_others(self, device: Device) -> list[tuple[int, int | None]]:
        return [framework.allocated(device) for framework in self._others]

    def _peak_of_others(self, device: Device) -> int | None:
        """Theirs is of the whole process: it says something of the code only where it has grown."""
        known = [
            peak - held
            for (held, before), (_, peak) in zip(
                self._before.get(str(device), ()), self._of_others(device), strict=False
            )
            if peak is not None and before is not None and peak > before
        ]
        return sum(known) if known else None


_WATCHING = "watching the copies of a timed run"


class Transfers:
    """Counts within; a ledger that cannot be kept is no reason not to measure."""

    def __init__(self, stopwatch: Stopwatch, told: Callable[[str], object]) -> None:
        self._stopwatch = stopwatch
        self._told = told  # of what there was, once it is over
        self._tally = Tally()
        self._watch: Any = None
        self._counting = ExitStack()

    def __enter__(self) -> Transfers:
        with faults.kept(_WATCHING):
            if torch_here() is not None and self._stopwatch.devices.started():
                from gpumagic.ledger.watch import watch

                self._watch = watch(warn=False, beside=False).start()
        for framework in self._stopwatch.others:
            with faults.kept(_WATCHING):
                self._counting.enter_context(framework.count(self._tally, strict=False))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with faults.kept(_WATCHING):
            self._counting.close()
        with faults.kept(_WATCHING):
            ledgers = [self._tally.ledger()]
            if self._watch is not None:
                self._watch.stop()
                ledgers.append(self._watch.ledger)
            entries = merged(entry for ledger in ledgers for entry in ledger)
            self._told(ledger_view.line(Ledger(entries)))


_OUT_OF_MEMORY = ("torch.OutOfMemoryError", "tensorflow.errors.ResourceExhaustedError")
_DONATED = (
    "a run gives an operand away (donate_argnums), and the next one has none: assign what comes "
    "back to it, as in x = f(x)"
)
_SAYING = ("DefaultCPUAllocator", "RESOURCE_EXHAUSTED: Out of memory")
# What each run compiles is part of its time, and is told where it is more than this part of it.
_AGAIN = 0.1
_ANEW = "each run compiles anew, which is in its time: make what is compiled once, before"


@dataclass(frozen=True)
class Task:
    """What all measurements of a comparison have in common."""

    program: Program
    targets: tuple[TimedDevices, ...]  # all: each draws the same random numbers
    needed: Needed  # the frameworks that the code is run with
    namespace: dict[str, Any]
    in_place: bool
    max_time: float  # seconds of each measurement, its first run apart
    stopwatch: Stopwatch
    randomness: Randomness  # as it was before
    reporter: Reporter
    agreeing: Agreeing  # gets what each first run gave, before the timing
    items: Mapping[Any, float | None]  # what one run works through, by `sweep.key` of the values


class Measuring:
    """A measurement: `run` it, and whatever happens then, take its `timing`."""

    def __init__(self, task: Task, target: TimedDevices, values: Mapping[str, Any]) -> None:
        self._task, self._target, self._values = task, target, values
        self._timing = Timing(
            target.where,
            values=dict(values),
            items=task.items[key(values)],
            name=" + ".join(dict.fromkeys(d.name for d in target.parts if d.name)) or None,
            uuid=target.parts[0].uuid if len(target.parts) == 1 else None,
            virtual=any(device.virtual for device in target.parts),
            steady=False,
        )
        self.quiet = Quiet()  # drops what is printed after the first run
        self._repeats: Repeats | None = None
        self.failed = target.where  # the device that an exception was raised on
        self.notes: tuple[str, ...] = ()

    def timing(self, error: str | None = None) -> Timing:
        """What was measured; of what ended in an error, no times."""
        repeats = self._repeats
        if error is not None or repeats is None:
            return replace(self._timing, error=error, alone=(), energy=None)
        laps, number = repeats.laps, repeats.number
        devices = [lap.device / number for lap in laps if lap.device is not None]
        return replace(
            self._timing,
            seconds=repeats.seconds,
            host=tuple(lap.host / number for lap in laps),
            device=tuple(devices) if devices and len(devices) == len(laps) else None,
            number=number,
            steady=repeats.steady,
        )

    def _found(self, **found: Any) -> None:
        self._timing = replace(self._timing, **found)

    def run(self) -> None:
        """Copy, set up, run once, warm up, repeat. Everything is let go of at the end."""
        task = self._task
        trials: list[Trial] = []
        # The stack closes itself only if a second interrupt came in our way.
        with ExitStack() as stack, _closing(stack):
            task.stopwatch.wait()  # what earlier cells have queued is no part of the copying
            for device in self._target.parts:
                trial = Trial(
                    task.program,
                    task.needed.of_torch(device),
                    task.namespace,
                    self._values,
                    beside=Beside(device, task.needed.others),
                    in_place=task.in_place,
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
            with deferred():  # its threads are to be ended by somebody
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
                    after.append(Randomness())  # that the first run goes on from
                # What each run would add to: the search path, the handlers of a logger …
                growth = Growth()
                self._first(runner, after)
                self._repeat(runner, growth)
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
        with Transfers(task.stopwatch, lambda line: self._found(transfers=line)):
            for n in range(len(runner.trials)):
                randomness[n].restore()
                compiled, began = _compiled(task.needed), task.stopwatch.clock()
                with nullcontext() if prints and not n else self.quiet:
                    value = runner.first(n)
                # A GPU's model decides which numbers its generator gives.
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
            return  # there is nothing to compare it with
        for trial, (value, drawn) in zip(runner.trials, gave, strict=True):
            beside = Beside(CPU, self._task.needed.others)
            space, assigned = trial.copies.globals, self._task.program.assigned
            numbers = outcome(space, assigned, value, beside=beside)
            self._task.agreeing.add(self._target.where, self._values, numbers, drawn)

    def _repeat(self, runner: Runner, growth: Growth) -> None:
        task, clock = self._task, self._task.stopwatch.clock
        several = len(runner.trials) > 1
        max_time = task.max_time / 2 if several else task.max_time

        def repeated(lap: Callable[[int], Lap], **options: Any) -> Repeats:
            return Repeats(lap, max_time, clock=clock, between=growth.put_back, **options)

        def told(stage: Stage) -> None:
            if task.reporter.due:
                with self.quiet.lifted():
                    median = repeats.median() if repeats.laps else None
                    task.reporter.at(stage, len(repeats.laps), median)

        before, began = joules(self._target.parts), clock()
        compiled = _compiled(task.needed)
        least = {} if before is None else {"least": LEAST_S}
        repeats = self._repeats = repeated(runner.lap, told=told, **least)
        with self.quiet:
            repeats.run()
        if compiled is not None:
            again = ((_compiled(task.needed) or 0.0) - compiled) / max(repeats.runs, 1)
            if again > _AGAIN * repeats.median():
                self.notes += (_ANEW,)
        long = before is not None and clock() - began >= LEAST_S
        after = joules(self._target.parts) if long else None
        # A driver that was loaded anew counts from 0.
        if before is not None and after is not None and after >= before:
            self._found(energy=(after - before) / repeats.runs)
        if several:
            alone = repeated(runner.alone)
            with self.quiet:
                try:
                    alone.run()
                finally:
                    self._found(alone=alone.seconds)


def _compiled(needed: Needed) -> float | None:
    """How long the frameworks beside torch have compiled; None where none tells."""
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
    """Whether memory was short: that of a GPU, by the framework's own class, or the host's."""
    known = isinstance(error, MemoryError) or comes_from(type(error), *_OUT_OF_MEMORY)
    # The host's allocator, and JAX, raise a plain RuntimeError.
    return known or any(words in str(error) for words in _SAYING)


def _line_of(error: BaseException, filename: str, before: str) -> str:
    """The line of the user's own code that the error came through last, where that is known."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == filename]
    return f"{before}line {lines[-1]}" if lines else ""


def short(error: BaseException, filename: str) -> str:
    """``"ValueError at line 3: shapes differ"``."""
    name, text = type(error).__name__, first_line(error)
    at = _line_of(error, filename, " at ")
    return f"{name}{at}" if text == name else f"{name}{at}: {text}"


def say_where(error: BaseException, filename: str, where: str, values: Mapping[str, Any]) -> None:
    """Have the error's traceback say which device it was on, and at which line and value."""
    at = "".join(f", {name} = {value!r}" for name, value in values.items())
    note(error, f"timed on {where}{at}{_line_of(error, filename, ', ')}")
    if "deleted or donated" in str(error) or "Array has been deleted" in str(error):
        note(error, _DONATED)
