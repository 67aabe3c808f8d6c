"""Time a program on one device, or on several at the same time, for one value of a sweep."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from gpumagic import faults
from gpumagic.copies.trial import Trial
from gpumagic.device import CPU, Device
from gpumagic.display.units import both
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.frameworks.known import Needed, torch_itself
from gpumagic.frameworks.watching import watch
from gpumagic.isolation.settings import Randomness, deferred
from gpumagic.isolation.worker import Quiet
from gpumagic.ledger import ledger_view
from gpumagic.ledger.entry import Ledger
from gpumagic.timing.agreement import AgreementCollector, outcome
from gpumagic.timing.comparison import Timing
from gpumagic.timing.runner import Repeats, Runner, Stopwatch
from gpumagic.usercode.program import Program
from gpumagic.usercode.sweep import key
from gpumagic.usercode.values import torch_here

Target = tuple[Device, ...]  # one device, or several devices that run at the same time


def where_of(target: Target) -> str:
    """Return a target's name: ``"cuda:1"``, or ``"cuda:0+cuda:1"``."""
    return "+".join(map(str, target))


@dataclass(kw_only=True)
class Task:
    """The settings that all measurements of a comparison share."""

    program: Program
    targets: tuple[Target, ...]
    needed: Needed  # the frameworks that the code uses
    namespace: dict[str, Any]
    max_time: float  # maximum seconds of each measurement, without the first run
    stopwatch: Stopwatch
    items: Mapping[Any, float | None]  # items that one run processes, by `sweep.key` of the values
    randomness: Randomness = field(default_factory=Randomness)  # the state at each set-up's start
    agreeing: AgreementCollector = field(default_factory=AgreementCollector)


class Measuring:
    """Measure one target at one value of the sweep: call `run`, then `timing`."""

    def __init__(
        self,
        task: Task,
        target: Target,
        values: Mapping[str, Any],
        tell: Callable[[str, Repeats | None], object],
    ) -> None:
        self._task, self._target, self._values, self._tell = task, target, values, tell
        self._timing = Timing(
            where_of(target),
            values=dict(values),
            items=task.items[key(values)],
            name=" + ".join(dict.fromkeys(d.name for d in target if d.name)) or None,
            virtual=any(device.virtual for device in target),
        )
        self.quiet = Quiet()  # drops all output, except that of the first device's first run
        self._repeats: Repeats | None = None
        self.notes: tuple[str, ...] = ()

    def timing(self, error: str | None = None) -> Timing:
        """Return the result so far, without `seconds` if an `error` is given."""
        repeats = self._repeats
        if error is not None or repeats is None:
            return replace(self._timing, error=error, alone=())
        host = tuple(lap.host / repeats.number for lap in repeats.laps)
        return replace(self._timing, seconds=repeats.seconds, host=host, number=repeats.number)

    def _set(self, **found: Any) -> None:
        self._timing = replace(self._timing, **found)

    def run(self) -> None:
        """Copy the inputs, run the set-up, run once, warm up, and repeat. Then free the copies."""
        with ExitStack() as stack:  # closes `stack` even if an interrupt prevents the close below
            try:
                self._run(stack)
            finally:
                with deferred():
                    stack.close()

    def _run(self, stack: ExitStack) -> None:
        task, trials = self._task, list[Trial]()
        task.stopwatch.wait()  # so that the time of copying excludes the work of earlier cells
        for device in self._target:
            trial = Trial(
                task.program,
                task.needed.of_torch(device),
                task.namespace,
                self._values,
                others=FrameworksOn(device, task.needed.others),
            )
            stack.callback(trial.close)
            trials.append(trial)
        copies = [trial.copies for trial in trials]
        self._set(
            copied=sum(each.storages.nbytes for each in copies),
            copy_seconds=sum(each.seconds for each in copies),
            left=tuple(copies[0].left),
        )
        self.notes = tuple(note for each in copies for note in each.notes)
        there = {trial.where for trial in trials if trial.has_copies_there()}
        with deferred():  # an interrupt here would leave the runner's threads running
            runner = Runner(trials, task.stopwatch)
            stack.callback(runner.close)
        stop = _peak_memory(self._target, task.needed, there)
        stack.callback(lambda: self._set(**stop()))
        after = []
        every = [task.needed.of_torch(device) for target in task.targets for device in target]
        for n in range(len(trials)):
            task.randomness.same_start(filter(None, every))
            runner.set_up(n)
            after.append(Randomness())  # the first run starts from this random state
        self._first(runner, after)
        self._repeat(runner)

    def _first(self, runner: Runner, randomness: list[Randomness]) -> None:
        task = self._task
        results: list[tuple[Any, frozenset[str]]] = []
        with self._transfers():
            for n in range(len(runner.trials)):
                randomness[n].restore()
                began = task.stopwatch.clock()
                with nullcontext() if self._target is task.targets[0] and not n else self.quiet:
                    value = runner.first(n)
                drawn = frozenset(  # by model, because GPUs of one model draw the same numbers
                    torch_here().cuda.get_device_name(name) if name.startswith("cuda") else name
                    for name in task.randomness.drawn()
                )
                task.stopwatch.wait()
                self._set(first=max(self._timing.first or 0.0, task.stopwatch.clock() - began))
                results.append((value, drawn))
        if len(task.targets) * len(runner.trials) == 1:
            return  # nothing to compare with
        others = FrameworksOn(CPU, task.needed.others)
        for trial, (value, drawn) in zip(runner.trials, results, strict=True):
            found = outcome(trial.copies.globals, task.program.assigned, value, others=others)
            task.agreeing.add(where_of(self._target), self._values, found, drawn)

    @contextmanager
    def _transfers(self) -> Iterator[None]:
        """Count copies and waits inside the `with` block. If counting fails, the run continues."""
        ledger = watch(warn=False, frameworks=self._task.needed.frameworks).start()
        try:
            yield
        finally:
            with faults.kept("watching the copies of a timed run"):
                ledger.stop()
                self._set(transfers=ledger_view.line(Ledger(ledger.ledger.entries)))

    def _repeat(self, runner: Runner) -> None:
        task, several = self._task, len(runner.trials) > 1
        max_time = task.max_time / 2 if several else task.max_time

        def told(stage: str) -> None:
            with self.quiet.lifted():
                self._tell(stage, self._repeats)

        clock = task.stopwatch.clock
        repeats = self._repeats = Repeats(runner.lap, max_time, clock=clock, told=told)
        alone = Repeats(runner.alone, max_time, clock=clock)
        with self.quiet:
            repeats.run()
            try:
                if several:
                    alone.run()
            finally:
                self._set(alone=alone.seconds)


def _peak_memory(target: Target, needed: Needed, there: set[str]) -> Callable[[], dict[str, Any]]:
    """Start measuring memory. Return a function that stops measuring and returns the fields `peak`
    and `unused` of `Timing`. Devices in `there` have copies of tensors, and count as used."""
    torch = torch_here()
    stops = [] if torch is None else [torch_itself().peak(target[0])]
    stops += [each.peak(device) for each in needed.others for device in target]

    def stop() -> dict[str, Any]:
        found = Counter[str]()
        for memory in (memory for stop in stops for memory in stop()):
            found[memory.device] += memory.peak - memory.before
        # If only torch is in use, a GPU without a reported peak has allocated 0 bytes.
        known = torch is not None and not needed.others
        idle = [str(d) for d in target if known and d.kind == "cuda" and str(d) not in found]
        found.update(dict.fromkeys(idle, 0) if torch and torch.cuda.is_initialized() else {})
        return {"peak": dict(found), "unused": both(each for each in idle if each not in there)}

    return stop
