"""Begin the run of a cell: for torch, and for each other framework that the cell needs.

JAX, TensorFlow and CuPy take the same steps as torch's `Run`; one report covers all of them.
"""

import ast
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from typing import Any, Protocol

from gpumagic import faults
from gpumagic.cell.report import Report, keep_last
from gpumagic.device import Device, cuda_state
from gpumagic.errors import GpuError, torch_needed
from gpumagic.faults import first_line
from gpumagic.frameworks.bring_arrays import (
    Home,
    Originals,
    bring_all,
    bring_home,
    left_alone,
    remember,
)
from gpumagic.frameworks.framework import Framework
from gpumagic.frameworks.known import Needed, imported
from gpumagic.ledger.entry import Ledger, Memory, Tally, merged
from gpumagic.moving.moved import Left, Moves, all_of
from gpumagic.usercode.values import defined_in, is_tensor, torch_here
from gpumagic.usercode.variables import variables_read


class ArrayRun:
    """Run a cell for one framework: `start`, run the cell, then always `finish`."""

    def __init__(
        self,
        framework: Framework,
        device: Device,
        namespace: dict[str, Any],
        names: Iterable[str],  # that the cell reads
        *,
        move: bool = True,
        strict: bool = False,
        table: bool = False,
        back: bool = False,
        first: bool = False,
        left: tuple[Left, ...] = (),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.framework = framework
        self.device = device
        self._namespace = namespace
        self._names = list(names)
        self._move = move
        self._strict = strict
        self._table = table
        self._back = back
        self._first = first
        self._left = left
        self._clock = clock
        self._moves = Moves()
        self._origins: dict[str, Home] = {}
        self._originals: Originals = {}  # for `--back`
        self._stack: ExitStack | None = None
        self._tally = Tally(virtual=device.virtual)
        self._counted = True
        self._before: dict[int, Any] = {}  # arrays that were variables, weakly, by id
        self._allocated: tuple[int, int | None] = 0, None
        self._started = 0.0
        self.left_out = 0.0  # seconds that are none of the cell's

    def start(self, line: Callable[[], Any] | None = None) -> None:
        """Move and place; or raise `GpuError`, with nothing moved."""
        with ExitStack() as stack:
            stack.enter_context(self.framework.place(self.device))
            if self._move:
                variables = variables_read(self._names, self._namespace)
                self._moves = bring_all(
                    self.framework,
                    variables,
                    self.device,
                    self._namespace,
                    self._origins,
                    self._originals if self._back else None,
                )
                if not self._back:
                    remember(self.framework, self._origins)
            self._before = {id(array): weakref.ref(array) for array in self._arrays()}
            self._allocated = self.framework.allocated(self.device)
            # A ledger that cannot be kept is no reason to stop the cell.
            self._counted = False
            with faults.kept("starting the ledger of a cell"):
                stack.enter_context(self.framework.count(self._tally, self._strict))
                self._counted = True
            self._stack = stack.pop_all()
        self._started = self._clock()

    def _arrays(self) -> list[Any]:
        values = list(self._namespace.values())
        return [value for value in values if self.framework.is_array(value)]

    def finish(self, error: BaseException | None = None) -> Report | None:
        """Undo the placement and report what happened; None if `start` did not succeed."""
        if self._stack is None:
            return None
        stack, self._stack = self._stack, None
        interrupted, fault = isinstance(error, KeyboardInterrupt), None
        try:
            # After an interrupt the user wants the prompt back, not the end of the queue.
            if not interrupted:
                self.framework.wait()
        except Exception as failed:  # noqa: BLE001  the framework's own, told in the report
            fault = first_line(failed)
        finally:
            seconds = self._clock() - self._started - self.left_out
            stack.close()
        ledger = Ledger()
        with faults.kept("reading the ledger of a cell"):
            ledger = self._tally.ledger()
        made = self._made()  # before variables go back
        places = {} if error else dict.fromkeys(made.values())
        returned = self._returned() if self._back else None
        there = (n for n in made if self.framework.where(self._namespace[n]) != "cpu")
        report = Report(
            device=self.device,
            seconds=seconds,
            moved=self._moves.moved,
            left=self._left + self._moves.left,
            move_seconds=self._moves.seconds,
            returned=returned,
            results=tuple(n for n in there if n[0] != "_") if self._back else (),
            stays=self._first and not self._back,
            memory=self._memory(),
            ledger=ledger,
            ledger_complete=self._counted,
            table=self._table,
            made=bool(places),
            elsewhere=self._elsewhere(places),
            waited=not interrupted and fault is None,
            error=type(error).__name__ if error is not None else None,
            fault=fault,
        )
        keep_last(report)
        return report

    def _returned(self) -> Moves:
        """Move everything back to where it was before, for `--back`."""
        originals, self._originals = self._originals, {}
        return bring_home(self.framework, self._namespace, self._origins, originals)

    def _memory(self) -> tuple[Memory, ...]:
        allocated, peak = self.framework.allocated(self.device)
        if peak is None or peak == self._allocated[1]:
            return ()  # the process's is an earlier cell's, and no other is known
        return (Memory(str(self.device), peak, allocated, self._allocated[0]),)

    def _made(self) -> dict[str, str]:
        """Return the devices of the variables that are arrays which the cell has made."""
        return {
            name: self.framework.where(value)
            for name, value in list(self._namespace.items())
            if self.framework.is_array(value)
            and self._before.get(id(value), lambda: None)() is not value
        }

    def _elsewhere(self, places: dict[str, None]) -> str:
        """Return a sentence if none of those places is the cell's device; else empty."""
        if not places or any(str(self.device) in place.split(" + ") for place in places):
            return ""
        return f"all that it made is on {', '.join(places)}"


class OneRun(Protocol):
    """Define the run of a cell for one framework."""

    device: Device
    left_out: float

    def start(self, line: Callable[[], Any] | None = None) -> None: ...

    def finish(self, error: BaseException | None = None) -> Report | None: ...


class Runs:
    """Combine the runs of one cell, one for each framework."""

    def __init__(self, runs: Sequence[OneRun]) -> None:
        self._runs = list(runs)
        self.device = self._runs[0].device

    @property
    def left_out(self) -> float:
        """Seconds that are none of the cell's."""
        return self._runs[0].left_out

    @left_out.setter
    def left_out(self, seconds: float) -> None:
        for run in self._runs:
            run.left_out = seconds

    def start(self, line: Callable[[], Any] | None = None) -> None:
        """Start all runs; if one raises, none runs."""
        for n, run in enumerate(self._runs):
            try:
                run.start(line)
            except BaseException:
                for begun in reversed(self._runs[:n]):
                    begun.finish(None)
                raise

    def finish(self, error: BaseException | None = None) -> Report | None:
        """Finish all runs in the opposite order, and return one report."""
        reports = [report for run in reversed(self._runs) if (report := run.finish(error))]
        if not reports:
            return None
        report = in_one(reports[::-1])
        keep_last(report)
        return report


def in_one(reports: Sequence[Report]) -> Report:
    """Merge several reports on the same cell into one."""
    first = reports[0]
    if len(reports) == 1:
        return first
    entries = merged(entry for report in reports for entry in report.ledger)
    worked = [report for report in reports if report.touched or report.elsewhere]
    returned = [report.returned for report in reports if report.returned is not None]
    faults = [report.fault for report in reports if report.fault]
    return replace(
        first,
        seconds=max(report.seconds for report in reports),
        moved=tuple(moved for report in reports for moved in report.moved),
        left=tuple(left for report in reports for left in report.left),
        move_seconds=sum(report.move_seconds for report in reports),
        returned=all_of(returned) if returned else None,
        results=tuple(name for report in reports for name in report.results),
        stays=any(report.stays for report in reports),
        memory=tuple(memory for report in reports for memory in report.memory),
        ledger=Ledger(entries, any(report.ledger.virtual for report in reports)),
        ledger_complete=all(report.ledger_complete for report in reports),
        elsewhere=worked[0].elsewhere if worked and all(r.elsewhere for r in worked) else "",
        waited=all(report.waited for report in reports),
        fault=faults[0] if faults else None,
    )


class CellNeeds(Needed):
    """Find the frameworks and the device of a cell, and make its run."""

    def __init__(self, tree: ast.AST | None, namespace: dict[str, Any]) -> None:
        super().__init__(tree, namespace)
        self._namespace = namespace

    def find(self, where: object) -> Device:
        """Return the device of a WHERE, or raise `GpuError`, also if there is no framework."""
        if not self.torch and not self.others:
            with torch_needed("a placed cell (of none of JAX, TensorFlow, CuPy)"):
                import_module("torch")
        return super().find(where)

    def run(
        self,
        device: Device,
        names: Iterable[str],
        *,
        fix: bool = False,
        recorder: Callable[[], Any] | None = None,
        **options: Any,
    ) -> OneRun:
        """Return the run of a cell that reads `names`, with the options of its line.

        `recorder` makes what records the peak of torch's memory.
        """
        names, namespace = list(names), self._namespace
        runs: list[OneRun] = []
        foreign = [name for name in names if _is_foreign(type(namespace.get(name)))]
        left = tuple(left_alone(foreign, namespace, device)) if foreign else ()
        if self.torch:
            from gpumagic.cell.run import Run

            made = recorder() if recorder is not None else None
            runs.append(Run(device, namespace, names, fix=fix, recorder=made, left=left, **options))
        elif fix or recorder is not None:
            used = " and ".join(other.name for other in self.others)
            given = "--fix" if fix else "--memory"
            raise GpuError(f"{given} is for torch; this cell uses {used}; leave it out")
        if self.unusable:
            tensors = (name for name in names if is_tensor(namespace.get(name)))
            left += tuple(Left(name, self.unusable) for name in tensors)
        for other in self.others:  # the first run tells
            told = () if runs else left
            runs.append(ArrayRun(other, device, namespace, names, left=told, **options))
        return runs[0] if len(runs) == 1 else Runs(runs)


def _is_foreign(kind: type) -> bool:
    """Whether a class may be of arrays that neither torch nor the notebook has defined."""
    return str(defined_in(kind)).partition(".")[0] not in ("torch", "builtins", "__main__")


def bring_all_home(namespace: dict[str, Any]) -> tuple[Moves, list[str]]:
    """Move back everything that cells moved; return that, and the names of variables on a GPU."""
    cuda_state.check()
    found: list[Moves] = []
    made: list[str] = []
    if torch_here() is not None:
        from gpumagic.moving import move

        found.append(move.bring_home(namespace))
        made += [n for n, tensor in move.tensors_in(namespace) if tensor.device.type != "cpu"]
    for framework in imported():
        from gpumagic.frameworks import bring_arrays

        every = bring_arrays.homes
        ours = {name: home for (of, name), home in every.items() if of == framework.name}
        found.append(bring_arrays.bring_home(framework, namespace, ours))
        made += bring_arrays.still_there(framework, namespace)
        for name in ours:
            del every[framework.name, name]
    return all_of(found), made
