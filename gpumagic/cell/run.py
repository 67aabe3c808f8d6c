"""One cell on one device: bring what it reads, place what it makes, measure, report."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from gpumagic.cell.autofix import AutoFix
from gpumagic.cell.peak_memory import MemoryMeter
from gpumagic.cell.report import Batches, Memory, Report
from gpumagic.device import Device
from gpumagic.ledger.entry import Ledger
from gpumagic.ledger.watch import watch
from gpumagic.moving.find_tensors import optimizers_in
from gpumagic.moving.move import Moves, move_all, wait_for
from gpumagic.placement.on import enter, leave
from gpumagic.placement.scope import Placement
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.variables import variables_read

# IPython's own names for what it keeps: every output of the notebook is no variable of the cell.
_NOT_VARIABLES = {"In", "Out", "_ih", "_oh", "_dh", "get_ipython", "exit", "quit"}


class Run:
    """A cell in progress. `start` it, run the cell, then `finish` it, whatever happened.

    Parameters
    ----------
    device : Device
    namespace : dict
        The user's variables.
    names : iterable of str
        The names that the cell reads.
    move : bool
        Bring the variables that the cell reads, and the batches of loaders.
    strict : bool
        Raise at the first copy or wait that is implicit.
    fix : bool
        Bring operands on several devices together.
    table : bool
        Let the report show the ledger's table.
    clock : callable
        Seconds.
    """

    def __init__(
        self,
        device: Device,
        namespace: dict[str, Any],
        names: Iterable[str],
        *,
        move: bool = True,
        strict: bool = False,
        fix: bool = False,
        table: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device = device
        self._namespace = namespace
        self._names = [n for n in names if n not in _NOT_VARIABLES]
        self._move = move
        self._clock = clock
        self._moves = Moves()
        self._meter = MemoryMeter()
        self._watch = watch(strict=strict)
        self._fix = AutoFix() if fix else None
        self._table = table
        self._place: Placement | None = None
        self._started = 0.0

    def start(self) -> None:
        """Move and place.

        Raises
        ------
        GpuError
            The device has not enough memory for what the cell reads. Nothing was moved.
        """
        target = as_torch(self.device)
        if self._move:
            self._moves = move_all(
                variables_read(self._names, self._namespace),
                target,
                followers=optimizers_in(self._namespace),
                bystanders=_tensors(self._namespace),
                clock=self._clock,
            )
        self._started = self._clock()
        self._place = enter(target, batches=self._move, namespace=self._namespace)
        self._meter.start()
        # A ledger that cannot be kept is no reason to stop the cell.
        with suppress(Exception):
            if self._fix is not None:
                self._fix.start()
            self._watch.start()
        self._started = self._clock()

    def finish(self, error: BaseException | None = None) -> Report | None:
        """Undo the placement and say what happened; None when `start` did not succeed.

        Parameters
        ----------
        error : BaseException, optional
            What the cell raised.
        """
        if self._place is None:
            return None
        place, self._place = self._place, None
        target = as_torch(self.device)
        fault = None
        # First: what follows is no doing of the cell.
        with suppress(Exception):
            self._watch.stop()
            if self._fix is not None:
                self._fix.stop()
        try:
            # After an interrupt the user wants the prompt back, not the end of the queue.
            if not isinstance(error, KeyboardInterrupt):
                wait_for(target)
                for index in self._meter.touched():
                    wait_for(torch.device("cuda", index))
        except (RuntimeError, AssertionError, AttributeError) as failed:
            # An error of the device itself surfaces at the wait; so does a device that is gone.
            fault = str(failed).strip().splitlines()[0]
        finally:
            seconds = self._clock() - self._started
            try:
                memory = self._meter.stop()
            finally:
                leave(place)
        report = Report(
            device=self.device,
            seconds=seconds,
            moved=self._moves.moved,
            left=self._moves.left,
            move_seconds=self._moves.seconds,
            batches=Batches(len(place.delivered), sum(place.delivered)),
            memory=tuple(
                Memory(f"cuda:{index}", m.peak, m.allocated, m.before)
                for index, m in sorted(memory.items())
            ),
            ledger=_ledger(self._watch) if fault is None else Ledger(),
            fixed=self._fix.done if self._fix is not None else (),
            table=self._table,
            waited=not isinstance(error, KeyboardInterrupt) and fault is None,
            error=type(error).__name__ if error is not None else None,
            fault=fault,
        )
        global _last
        _last = report
        return report


def _ledger(watched: watch) -> Ledger:
    try:
        return watched.ledger
    except Exception:  # noqa: BLE001  the cell's own result matters more
        return Ledger()


def _tensors(namespace: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in list(namespace.items()):
        if type(value) is torch.Tensor and not name.startswith("_"):
            yield name, value


_last: Report | None = None


def last_report() -> Report | None:
    """The report of the last cell that ran on a device; None before the first.

    Examples
    --------
    >>> report = gpumagic.last_report()
    >>> report.seconds, report.moved_bytes
    (1.24, 1234944)
    """
    return _last
