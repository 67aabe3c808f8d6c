"""Run one cell on a device for a framework beside torch: bring, place, count, report.

The same steps as torch's `Run`, and the same report.
"""

import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

from gpumagic import faults
from gpumagic.cell.report import Report, keep_last
from gpumagic.device import Device
from gpumagic.faults import first_line
from gpumagic.frameworks.bring_arrays import Home, Originals, bring_all, bring_home, remember
from gpumagic.frameworks.framework import Framework
from gpumagic.ledger.counts import Tally
from gpumagic.ledger.entry import Ledger
from gpumagic.ledger.memory_used import Memory
from gpumagic.moving.moved import Left, Moves
from gpumagic.usercode.variables import variables_read


class ArrayRun:
    """A cell in progress. `start` it, run the cell, then `finish` it, whatever happened."""

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
        """Bring, and place; or raise `GpuError`, and nothing was moved."""
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
        """Undo the placement and say what happened; None when `start` did not succeed."""
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
        places = {} if error else self._places()  # before what was brought goes home
        report = Report(
            device=self.device,
            seconds=seconds,
            moved=self._moves.moved,
            left=self._left + self._moves.left,
            move_seconds=self._moves.seconds,
            returned=self._returned() if self._back else None,
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
        """For `--back`: what was brought is where it was before."""
        originals, self._originals = self._originals, {}
        return bring_home(self.framework, self._namespace, self._origins, originals)

    def _memory(self) -> tuple[Memory, ...]:
        allocated, peak = self.framework.allocated(self.device)
        if peak is None or peak == self._allocated[1]:
            return ()  # the process's is an earlier cell's, and no other is known
        return (Memory(str(self.device), peak, allocated, self._allocated[0]),)

    def _places(self) -> dict[str, None]:
        """Where the arrays are that the cell has made."""
        made = [a for a in self._arrays() if self._before.get(id(a), lambda: None)() is not a]
        return dict.fromkeys(self.framework.where(array) for array in made)

    def _elsewhere(self, places: dict[str, None]) -> str:
        """What to say where none of those places is the cell's device."""
        if not places or any(str(self.device) in place.split(" + ") for place in places):
            return ""
        return f"all that it made is on {', '.join(places)}"
