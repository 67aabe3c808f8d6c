"""Run one cell on a device: move the variables it reads, place new tensors, measure, report.

Whatever happens in between, the placement is undone, and a report says what happened.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from gpumagic import faults
from gpumagic.cell.autofix import AutoFix
from gpumagic.cell.report import Batches, Report, keep_last
from gpumagic.device import Device, cuda_state
from gpumagic.display.table import Shown
from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.ledger.entry import Ledger, Memory
from gpumagic.ledger.memory_meter import MemoryMeter
from gpumagic.ledger.watch import watch
from gpumagic.moving.find_tensors import DATASET_STAYS
from gpumagic.moving.move import (
    bring_home,
    move_all,
    optimizers_in,
    remember,
    tensors_in,
    wait_for,
)
from gpumagic.moving.moved import Left, Moves
from gpumagic.moving.plan import Origin
from gpumagic.placement.scope import Placement
from gpumagic.placement.swap import enter, leave
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.lines import innermost
from gpumagic.usercode.variables import variables_read


class Recorder(Protocol):
    """Define a recorder of one more fact about a cell, for its report."""

    def start(self) -> None: ...

    def stop(self) -> Shown | None: ...


def _whose(name: str) -> str:
    return f"{name}'" if name.endswith("s") else f"{name}'s"


class Run:
    """Run a cell: `start`, run the cell, then always `finish`."""

    def __init__(
        self,
        device: Device,
        namespace: dict[str, Any],
        names: Iterable[str],  # that the cell reads
        *,
        move: bool = True,
        strict: bool = False,
        fix: bool = False,
        table: bool = False,
        back: bool = False,
        first: bool = False,
        recorder: Recorder | None = None,
        left: tuple[Left, ...] = (),  # that nothing could bring
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self._target = as_torch(device)
        self._namespace = namespace
        self._names = list(names)
        self._move = move
        self._clock = clock
        self._moves = Moves()
        self._meter = MemoryMeter()
        self._watch = watch(strict=strict, warn=False, beside=False)  # the report says it
        self._fix = AutoFix(self._target) if fix else None
        self._back = back
        self._first = first
        self._recorder = recorder
        self._origins: list[tuple[Any, Origin]] = []
        self._table = table
        self._undo: ExitStack | None = None  # of all that `start` began, the placement last
        self._placement: Placement
        self._started = self._seconds = 0.0
        self._memory: dict[int, Memory] = {}
        self._peak: Any = None
        self._interrupted = False
        self._fault: str | None = None
        self._left = left
        self.left_out = 0.0  # seconds that are none of the cell's
        self._ledger_complete = True
        self._taken: tuple[str, ...] = ()  # GPUs that the moved objects named
        self._before: set[int] = set()  # ids of the variables' values before the cell

    def start(self, line: Callable[[], Any] | None = None) -> None:
        """Move and place; or raise `GpuError`, with nothing moved. A long move has a `line`."""
        read = [*variables_read(self._names, self._namespace)] if self._move else []
        try:
            if read:
                self._moves = move_all(
                    read,
                    self._target,
                    followers=optimizers_in(self._namespace),
                    namespace=self._namespace,
                    clock=self._clock,
                    origins=self._origins,
                    line=line,
                )
                named = {o.name: o.device for _, o in self._origins if o.named}
                gpus = ((name, d) for name, d in named.items() if d.type == "cuda")
                self._taken = tuple(f"{_whose(name)} {d}" for name, d in gpus)
            self._begin()
        except BaseException:
            self._remember()
            raise
        if not self._back:
            self._remember()

    def _begin(self) -> None:
        self._before = {*map(id, self._namespace.values())}
        self._started = self._clock()
        with ExitStack() as undo:
            self._placement = enter(self._target, batches=self._move, namespace=self._namespace)
            undo.callback(self._leave)
            self._meter.start()
            undo.callback(self._wait)
            # A ledger that cannot be kept is no reason to stop the cell.
            if self._fix is not None:
                undo.callback(self._guarded, "bringing operands together", self._fix.stop)
                self._guarded("bringing operands together", self._fix.start)
            undo.callback(self._guarded, "ending the ledger of a cell", self._watch.stop)
            self._guarded("starting the ledger of a cell", self._watch.start)
            if self._recorder is not None:
                undo.callback(self._guarded, "reading the peak of memory", self._read_peak)
                self._guarded("recording the peak of memory", self._recorder.start)
            self._undo = undo.pop_all()
        self._started = self._clock()

    def _remember(self) -> None:
        """Note the origins of the moved objects, for `%ongpu home`."""
        if self._origins:
            where = innermost()
            remember(self._origins, where.label if where else "")
            self._origins.clear()

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
            returned = self._bring_back() if self._origins else None
        except BaseException:
            self._remember()
            raise
        placement, memory, fault = self._placement, self._memory, self._fault
        if error is not None and cuda_state.death() is not None:
            fault = None  # it is reported under the error
        ledger = None
        if fault is None:
            ledger = self._guarded("reading the ledger of a cell", lambda: self._watch.ledger)
        came = DATASET_STAYS if placement.delivered else None
        left = self._left
        left += tuple(part for part in self._moves.left if part.reason != came)
        left += returned.left if returned else ()
        report = Report(
            device=self.device,
            seconds=self._seconds,
            moved=self._moves.moved,
            left=left,
            move_seconds=self._moves.seconds,
            returned=returned,
            results=tuple(self._new_there()) if self._back and self.device.kind != "cpu" else (),
            stays=self._first and not self._back,
            batches=Batches(len(placement.delivered), sum(map(sum, placement.delivered))),
            memory=tuple(memory.values()),
            peak=self._peak,
            ledger=Ledger() if ledger is None else ledger,
            ledger_complete=self._ledger_complete,
            fixed=self._fix.done if self._fix is not None else (),
            table=self._table,
            taken=(*self._taken, *(f"{_whose(library)} cuda:0" for library in placement.taken)),
            elsewhere="" if error or ledger is None else self._elsewhere(placement, memory, ledger),
            waited=not self._interrupted and fault is None,
            error=type(error).__name__ if error is not None else None,
            fault=fault,
        )
        keep_last(report)
        return report

    def _read_peak(self) -> None:
        if self._recorder is not None:
            self._peak = self._recorder.stop()

    def _wait(self) -> None:
        """Read the memory that the cell used, and wait for the devices that it used."""
        try:
            self._memory = self._meter.stop()
            # After an interrupt the user wants the prompt back, not the end of the queue.
            if not self._interrupted:
                others = (n for n in self._memory if n != self._target.index)
                for device in (self._target, *(torch.device("cuda", n) for n in others)):
                    wait_for(device)
        except (RuntimeError, AssertionError, AttributeError) as failed:
            # An error of the device itself surfaces at the wait; so does a device that is gone.
            self._fault = first_line(failed)

    def _leave(self) -> None:
        self._seconds = self._clock() - self._started - self.left_out
        leave(self._placement)

    def _bring_back(self) -> Moves:
        """Move variables back for `--back`; remember the origin of each that cannot go."""
        try:
            moves = bring_home(self._namespace, self._origins)
            self._origins.clear()
            return moves
        except (GpuError, RuntimeError) as error:  # no room; a device that failed
            names = ", ".join(dict.fromkeys(origin.name for _, origin in self._origins))
            self._remember()
            return Moves(left=(Left(names, first_line(error)),))

    def _new_there(self) -> Iterator[str]:
        """Return the variables that the cell made on its device."""
        for name, tensor in tensors_in(self._namespace):
            if id(tensor) not in self._before and tensor.device == self._target:
                yield name

    def _elsewhere(self, place: Placement, memory: dict[int, Memory], ledger: Ledger) -> str:
        """Return where most of the cell's work was, as far as known, if not on its device."""
        if self.device.kind != "cuda":
            return ""
        made = {m.device: m.allocations for m in memory.values()}
        here = made.pop(str(self._target), 0) - sum(map(len, place.delivered))
        others = sum(made.values())
        if here > 0:
            share = round(100 * others / (here + others))
            return f"{share} % of it ran on {', '.join(made)}" if others > here else ""
        if others:
            return f"all work was on {', '.join(made)}"
        new = (t for _, t in tensors_in(self._namespace) if id(t) not in self._before)
        on_cpu = [tensor.nbytes for tensor in new if tensor.device.type == "cpu"]
        home = all(e.source == str(self._target) and e.destination == "cpu" for e in ledger.copies)
        if home and sum(on_cpu) in (0, ledger.nbytes):  # the copies, if any, are all that it made
            return "all work was on cpu" if self._moves.left else ""
        return "all work was on cpu" if on_cpu or ledger.transfers else ""
