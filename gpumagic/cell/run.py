"""Run one cell on a device: move the variables it reads, place new arrays, measure, report.

Whatever ends the cell, its placement is left first, and a report says what happened.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from gpumagic import faults
from gpumagic.cell.report import FOR_GOOD, Batches, Report, keep_last
from gpumagic.device import Device, cuda_state
from gpumagic.device.discover import LEAST_S, joules
from gpumagic.display.table import Shown
from gpumagic.display.units import size
from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.frameworks.framework import Framework, device_of, library_of, nbytes_of
from gpumagic.frameworks.known import in_use, torch_itself
from gpumagic.frameworks.watching import watch
from gpumagic.ledger.entry import Ledger, Memory
from gpumagic.moving.moved import DATASET_STAYS, Left, Moves, Origin, all_of
from gpumagic.usercode.lines import innermost
from gpumagic.usercode.values import defined_in, is_tensor
from gpumagic.usercode.variables import variables_read


class Recorder(Protocol):
    """Define a recorder of one more fact about a cell, for its report."""

    def start(self) -> None: ...

    def stop(self) -> Shown | None: ...


class Profiler(Protocol):
    """Define a profiler of a cell, which runs until the device has finished."""

    stopping: float  # seconds that are none of the cell's

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def result(self, ledger: Ledger | None) -> Shown | None: ...


def _whose(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


class _Share:
    """One framework's part in a cell."""

    def __init__(self, framework: Framework) -> None:
        self.framework = framework
        self.moves = Moves()
        self.origins: list[tuple[Any, Origin]] = []  # of moved objects, until they are remembered
        self.placed: Any = None  # the value of its placement's context
        self.named: list[str] = []  # GPUs that moved objects named: "trainer's cuda:0"
        self.memory: list[Memory] = []
        self.made: dict[str, Any] = {}  # new arrays, by the variable's name

    @property
    def batches(self) -> list[list[int]]:
        """Return the bytes of each tensor of each batch that loaders have brought."""
        return getattr(self.placed, "delivered", [])

    @property
    def taken(self) -> list[str]:
        """Return the GPUs that were taken as the cell's: ``"accelerate's cuda:0"``."""
        libraries = getattr(self.placed, "taken", ())
        return [*self.named, *(f"{_whose(library)} cuda:0" for library in libraries)]

    @property
    def uncounted(self) -> bool:
        """Whether the cell made arrays whose memory may not be known."""
        return bool(self.made) and not self.framework.counts_allocations

    def remember(self) -> None:
        """Keep the origins of the moved objects, for `%ongpu home`."""
        if self.origins:
            where = innermost()
            self.framework.remember(self.origins, where.label if where else "")
            self.origins.clear()

    def bring_back(self, namespace: dict[str, Any]) -> Moves:
        """Move variables back for `--back`; remember the origins of the others."""
        try:
            moves = self.framework.home(namespace, self.origins)
        except (GpuError, RuntimeError) as error:  # no room; a device that failed
            names = ", ".join(dict.fromkeys(origin.name for _, origin in self.origins))
            self.remember()
            return Moves(left=(Left(names, first_line(error)),))
        self.origins.clear()
        return moves


class Run:
    """Run a cell for the frameworks that it uses: `start`, run the cell, then always `finish`."""

    def __init__(
        self,
        device: Device,
        namespace: dict[str, Any],
        names: Iterable[str],  # that the cell reads
        *,
        frameworks: Sequence[Framework] | None = None,  # by default torch
        unusable: str = "",  # why torch's tensors stay, if they do
        move: bool = True,
        strict: bool = False,
        fix: bool = False,
        table: bool = False,
        back: bool = False,
        said: frozenset[str] = frozenset((FOR_GOOD,)),  # by the notebook's earlier reports
        recorder: Recorder | None = None,
        checks: Any = None,
        profiler: Profiler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self._where = device, str(device)
        frameworks = [torch_itself()] if frameworks is None else frameworks
        self._shares = [_Share(framework) for framework in frameworks]
        self._torch = any(framework.name == "torch" for framework in frameworks)
        self._namespace = namespace
        self._names = list(names)
        self._left = tuple(left_alone(self._names, namespace, device, unusable))
        self._move, self._back, self._said, self._table = move, back, said, table
        self._clock = clock
        self._watch = watch(strict=strict, warn=False, frameworks=frameworks)  # the report says it
        self._fix = _fixer(device) if fix else None
        self._recorder, self._profiler, self._watch.checks = recorder, profiler, checks
        self._placed = ExitStack()
        self._undo: ExitStack | None = None  # of all that `start` began
        self._started = self._seconds = 0.0
        self._peak: Any = None
        self._joules: float | None = None  # of the device, at the start
        self._interrupted = False
        self._fault: str | None = None
        self.left_out = 0.0  # seconds that are none of the cell's
        self._ledger_complete = True
        self._before: dict[int, Any] = {}  # arrays that were variables, weakly, by id

    def start(self, line: Callable[[], Any] | None = None) -> None:
        """Move and place; or raise `GpuError`, with nothing moved. A long move has a `line`."""
        for share in self._shares:
            share.framework.own(self.device)  # a device that one cannot use moves nothing
        read = [*variables_read(self._names, self._namespace)] if self._move else []
        try:
            for share in self._shares if read else ():
                share.moves = share.framework.move(
                    read, self.device, self._namespace, share.origins, back=self._back, line=line
                )
                named = {o.name: str(o.device) for _, o in share.origins if o.named}
                gpus = ((name, gpu) for name, gpu in named.items() if gpu != "cpu")
                share.named = [f"{_whose(name)} {gpu}" for name, gpu in gpus]
            self._begin()
        except BaseException:
            self._remember()
            raise
        if not self._back:
            self._remember()

    def _begin(self) -> None:
        arrays = (array for s in self._shares for _, array in s.framework.arrays(self._namespace))
        self._before = {id(array): weakref.ref(array) for array in arrays}
        if not self.device.virtual:
            with faults.kept("reading the energy of a cell's device"):
                self._joules = joules(self.device)
        with ExitStack() as undo:
            undo.callback(self._wait)
            self._stops = [share.framework.peak(self.device) for share in self._shares]
            # A ledger that cannot be kept is no reason to stop the cell.
            if self._fix is not None:
                undo.callback(self._guarded, "bringing operands together", self._fix.stop)
                self._guarded("bringing operands together", self._fix.start)
            undo.callback(self._guarded, "ending the ledger of a cell", self._watch.stop)
            self._guarded("starting the ledger of a cell", self._watch.start)
            if self._recorder is not None:
                undo.callback(self._guarded, "reading the peak of memory", self._read_peak)
                self._guarded("recording the peak of memory", self._recorder.start)
            undo.callback(self._leave)
            for share in self._shares:
                placed = share.framework.place(
                    self.device, batches=self._move, namespace=self._namespace
                )
                share.placed = self._placed.enter_context(placed)
            if self._profiler is not None:
                undo.callback(self._guarded, "stopping the profiler", self._stop_profiler)
                self._guarded("starting the profiler", self._profiler.start)
            self._undo = undo.pop_all()
        self._started = self._clock()

    def _remember(self) -> None:
        for share in self._shares:
            share.remember()

    def _guarded(self, doing: str, step: Callable[[], Any]) -> Any:
        try:
            return step()
        except Exception as error:  # noqa: BLE001  kept, and said under the cell
            faults.keep(doing, error)
            self._ledger_complete = False

    def finish(self, error: BaseException | None = None) -> Report | None:
        """Undo the placement and report what happened; None if `start` did not succeed.

        Ctrl-C meanwhile leaves nothing in force: the rest is undone before it goes on.
        """
        if self._undo is None:
            return None
        undo, self._undo = self._undo, None
        self._interrupted = isinstance(error, KeyboardInterrupt)
        try:
            undo.close()
            self._find_made()  # before variables go back
            there = [*self._made_there()] if self._back else []
            backs = [s.bring_back(self._namespace) for s in self._shares if s.origins]
        except BaseException:
            self._remember()
            raise
        returned = all_of(backs) if backs else None
        fault, ledger = self._fault, None
        if error is not None and cuda_state.death() is not None:
            fault = None  # it is reported under the error
        if self._fault is None or not self._torch:
            ledger = self._guarded("reading the ledger of a cell", lambda: self._watch.ledger)
        moves = [share.moves for share in self._shares]
        batches = [batch for share in self._shares for batch in share.batches]
        came = DATASET_STAYS if batches else None
        left = [part for each in moves for part in each.left if part.reason != came]
        report = Report(
            device=self.device,
            seconds=self._seconds,
            moved=tuple(moved for each in moves for moved in each.moved),
            left=(*self._left, *left, *(returned.left if returned else ())),
            move_seconds=sum(each.seconds for each in moves),
            returned=returned,
            results=tuple(there),
            said=self._said,
            batches=Batches(len(batches), sum(map(sum, batches))),
            memory=tuple(memory for share in self._shares for memory in share.memory),
            peak=self._peak,
            profile=self._profile(ledger),
            energy=self._energy(),
            ledger=Ledger() if ledger is None else ledger,
            ledger_complete=self._ledger_complete and self._watch.complete,
            fixed=self._fix.done if self._fix is not None else (),
            table=self._table,
            taken=tuple(name for share in self._shares for name in share.taken),
            made=error is None and any(share.uncounted for share in self._shares),
            elsewhere="" if error or ledger is None else self._elsewhere(ledger),
            waited=not self._interrupted and self._fault is None,
            error=type(error).__name__ if error is not None else None,
            fault=fault,
        )
        keep_last(report)
        return report

    def _read_peak(self) -> None:
        if self._recorder is not None:
            self._peak = self._recorder.stop()

    def _stop_profiler(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self.left_out += self._profiler.stopping

    def _profile(self, ledger: Ledger | None) -> Shown | None:
        profile = None
        if self._profiler is not None:
            with faults.kept("reading the profile of a cell"):
                profile = self._profiler.result(ledger)
        return profile

    def _energy(self) -> float | None:
        """Return the joules of the cell; None if unknown, or too short for the counter."""
        if self._joules is None or self._seconds < LEAST_S:
            return None
        with faults.kept("reading the energy of a cell's device"):
            after = joules(self.device)
            # A reloaded driver counts from 0.
            if after is not None and after >= self._joules:
                return after - self._joules
        return None

    def _leave(self) -> None:
        began = self._clock()
        self._placed.close()
        self.left_out += self._clock() - began

    def _wait(self) -> None:
        """Read the memory that the cell used, and wait for the devices that it used."""
        try:
            for share, stop in zip(self._shares, self._stops, strict=True):
                share.memory = [*stop()]
                # After an interrupt the user wants the prompt back, not the end of the queue.
                if not self._interrupted:
                    touched = (memory.device for memory in share.memory)
                    share.framework.wait(*dict.fromkeys((self._where, *touched)))
        except Exception as failed:  # noqa: BLE001
            # An error of the device itself surfaces at the wait; so does a device that is gone.
            self._fault = first_line(failed)
        finally:
            self._seconds = self._clock() - self._started - self.left_out

    def _find_made(self) -> None:
        for share in self._shares:
            for name, array in share.framework.arrays(self._namespace):
                if self._before.get(id(array), lambda: None)() is not array:
                    share.made[name] = array

    def _made_there(self) -> Iterator[str]:
        """Yield the variables that the cell made on its device, if that is not the CPU."""
        for share in self._shares if self.device.kind != "cpu" else ():
            there = {self._where, str(share.framework.own(self.device))}  # "mps", "mps:0"
            for name, array in share.made.items():
                where = share.framework.where(array).split(" + ")
                if not name.startswith("_") and not there.isdisjoint(where):
                    yield name

    def _elsewhere(self, ledger: Ledger) -> str:
        """Return where most of the cell's work was, as far as known, if not on its device."""
        said = []
        for share in self._shares:
            name = "" if share.framework.name == "torch" else share.framework.name
            entries = tuple(entry for entry in ledger.entries if entry.framework == name)
            counts = share.framework.counts_allocations
            by = self._by_allocations if counts else self._by_arrays
            sentence = by(share, Ledger(entries, ledger.virtual))
            used = share.moves.moved or share.moves.left or entries or share.memory
            if sentence or used or share.uncounted:
                said.append(sentence)
        return said[0] if all(said) and said else ""

    def _by_arrays(self, share: _Share, ledger: Ledger) -> str:
        places = dict.fromkeys(map(share.framework.where, share.made.values()))
        if not places or any(self._where in place.split(" + ") for place in places):
            return ""
        return f"all that it made is on {', '.join(places)}"

    def _by_allocations(self, share: _Share, ledger: Ledger) -> str:
        if self.device.kind != "cuda":
            return ""
        made = {memory.device: memory.allocations for memory in share.memory}
        here = made.pop(self._where, 0) - sum(map(len, share.batches))
        others = sum(made.values())
        if here > 0:
            part = round(100 * others / (here + others))
            return f"{part} % of it ran on {', '.join(made)}" if others > here else ""
        if others:
            return f"all work was on {', '.join(made)}"
        of = share.framework
        on_cpu = [of.nbytes(array) for array in share.made.values() if of.where(array) == "cpu"]
        home = all(e.source == self._where and e.destination == "cpu" for e in ledger.copies)
        if home and sum(on_cpu) in (0, ledger.nbytes):  # the copies, if any, are all that it made
            return "all work was on cpu" if share.moves.left else ""
        return "all work was on cpu" if on_cpu or ledger.transfers else ""


def _fixer(device: Device) -> Any:
    from gpumagic.cell.autofix import AutoFix  # it imports torch

    return AutoFix(torch_itself().own(device))


def left_alone(
    names: Iterable[str], namespace: Mapping[str, Any], device: Device, unusable: str = ""
) -> Iterator[Left]:
    """Yield the variables that nothing moves: ``a: CuPy, on cuda:0, 1.2 GiB``.

    Arrays of other libraries on another GPU; torch's tensors too, if torch is `unusable`.
    """
    for name in names:
        value = namespace.get(name)
        if unusable and is_tensor(value):
            yield Left(name, unusable)
        elif _is_foreign(type(value)) and not any(each.is_array(value) for each in in_use()):
            with faults.kept("asking another library's array where it is"):
                where = device_of(value)
                # What NumPy has is for the host, and stays there.
                if where not in (None, "cpu", str(device)):
                    nbytes = nbytes_of(value) or None
                    yield Left(name, f"{library_of(value)}, on {where}, {size(nbytes)}")


def _is_foreign(kind: type) -> bool:
    """Whether a class may be of arrays that neither torch nor the notebook has defined."""
    return str(defined_in(kind)).partition(".")[0] not in ("torch", "builtins", "__main__")
