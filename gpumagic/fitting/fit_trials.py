"""Ask what code needs with one value of a variable: by a dry run, or by a run on copies."""

import contextvars
import gc
import inspect
import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from gpumagic.copies.trial import Trial
from gpumagic.device import Device
from gpumagic.device.cards import Card
from gpumagic.dryrun.dry_cell import leave_out_magics
from gpumagic.dryrun.follow_code import LIMIT_S, Subject, dry
from gpumagic.dryrun.result import DryRun
from gpumagic.errors import GpuError
from gpumagic.isolation.output import Quiet
from gpumagic.isolation.settings import kept
from gpumagic.ledger.memory_meter import MemoryMeter
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.program import FUNCTION, Program
from gpumagic.usercode.variables import variables_read

_FAR_S = 20.0


class Predicting:
    """What dry runs say that each value needs; each is asked once."""

    def __init__(
        self,
        program: Program,
        space: dict[str, Any],
        name: str,
        device: Device,
        cards: tuple[Card, ...],
        told: Callable[[float, str], object],
    ) -> None:
        self._program, self._space, self._name = program, space, name
        self._device, self._cards, self._told = device, cards, told
        self.reads = _read(program, space, name)
        self.needed: dict[float, int] = {}
        self.trains: bool | None = None
        self.ended: dict[float, str] = {}  # why, where a dry run did not come to the end
        self.raises: dict[float, str] = {}  # of these, those at which the code itself fails
        self.notes: dict[str, None] = {}
        self._limit = LIMIT_S

    def __call__(self, value: float) -> float:
        """Bytes beside what is allocated now; infinite where the dry run ended early."""
        if value in self.ended:
            return math.inf
        if value not in self.needed:
            self._told(value, "dry run")  # it may take long
            try:
                self._learn(value, dry(self._subject(value)))
            except GpuError as error:
                if not self.needed:
                    raise
                self.ended[value] = str(error)
            self._told(value, "dry run")
        return self.needed.get(value, math.inf)

    def _learn(self, value: float, run: DryRun) -> None:
        if run.complete:
            peak = run.peak.get(str(self._device))
            self.needed[value] = 0 if peak is None else peak.needed
            self.trains = bool(self.trains) or run.backward
            self.notes |= dict.fromkeys(str(u) for u in run.unknown if not u.ended)
        else:
            ends = [str(mismatch.error) for mismatch in run.mismatches]
            ends += [run.error] if run.error else [str(u) for u in run.unknown if u.ended]
            self.ended[value] = ends[0]
            if run.error or run.mismatches:
                self.raises[value] = ends[0]
        # A larger value that takes so much longer is not waited for.
        self._limit = min(LIMIT_S, max(_FAR_S, 3 * run.seconds))

    def _subject(self, value: float) -> Subject:
        program, space = self._program, self._space

        def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
            # In the forked copy alone.
            space.update({self._name: value, FUNCTION: program.function})
            if "get_ipython" in space:
                transform = space["get_ipython"]().transform_cell
                leave_out_magics(space, note, program.filename, transform)

            def go() -> dict[str, Any]:
                program.set_up(space)
                return {"Out": program.once(space)}

            return go

        device, cards = self._device, self._cards
        return Subject(space, list(self.reads), prepare, device, True, self._limit, cards)


class Confirming:
    """What runs on copies measure; out of memory is infinite."""

    def __init__(
        self,
        program: Program,
        space: dict[str, Any],
        name: str,
        device: Device,
        told: Callable[[float, str], object],
    ) -> None:
        self._program, self._space, self._name = program, space, name
        self._target, self._told = as_torch(device), told
        self._quiet = Quiet()
        self.measured: dict[float, float] = {}
        self.error: Exception | None = None  # of the code
        # What lies there already has a copy beside it while the code runs.
        self.beside = _bytes_on(self._target, _read(program, space, name))

    def __call__(self, value: float) -> float:
        """Bytes beside what is allocated now, without the copies of what lies there already."""
        if value not in self.measured:
            self._told(value, "run")
            self.measured[value] = contextvars.copy_context().run(self._run, value)
            self._told(value, "run")
        return self.measured[value]

    def _run(self, value: float) -> float:
        _give_back()
        before = torch.cuda.memory_allocated(self._target)
        try:
            with kept(), self._quiet:
                return self._once(value) - before - self.beside
        except torch.OutOfMemoryError:
            pass
        except Exception as error:
            self.error = error
            if hasattr(error, "add_note"):  # Python 3.11 and newer
                error.add_note(f"with {self._name} = {value}, in a run on copies")
            raise
        finally:
            _give_back()  # out here: the exception's traceback would keep what was allocated
        return math.inf

    def _once(self, value: float) -> int:
        """The peak of one run."""
        with ExitStack() as stack:
            values, clock = {self._name: value}, time.perf_counter
            trial = Trial(
                self._program, self._target, self._space, values, in_place=False, clock=clock
            )
            stack.callback(trial.close)
            stack.callback(trial.stack.close)
            meter = MemoryMeter()
            stack.callback(meter.stop)
            meter.start()
            trial.set_up()
            trial.first()
            wait_for(self._target)
            memory = meter.stop().get(self._target.index)
            return torch.cuda.memory_allocated(self._target) if memory is None else memory.peak


def _read(program: Program, space: dict[str, Any], name: str) -> list[tuple[str, Any]]:
    """The variables that the code leads to, without the one whose value is sought."""
    names, module = [*program.reads], str(space.get("__name__") or "__main__")
    if program.function is not None:
        space, names = {**space, FUNCTION: program.function}, [*names, FUNCTION]
        module = str(getattr(inspect.unwrap(program.function), "__module__", module))
    return [(n, v) for n, v in variables_read(names, space, module) if n != name]


def _bytes_on(target: torch.device, variables: list[tuple[str, Any]]) -> int:
    finder = TensorFinder()
    finder.variables(variables)
    storages = {}
    for found in finder.tensors:
        if found.tensor.device == target:
            with suppress(RuntimeError, NotImplementedError):  # sparse: no one storage
                storage = found.tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _give_back() -> None:
    gc.collect()
    with suppress(RuntimeError):  # of a device that has failed, the code's own error tells more
        torch.cuda.empty_cache()
