"""Find the memory that code needs with one value: by a dry run, or by a run on copies."""

import contextvars
import inspect
import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.copies.trial import Trial
from gpumagic.device import Device, cuda_state
from gpumagic.device.cards import Card
from gpumagic.dryrun.dry_cell import leave_out_magics
from gpumagic.dryrun.follow_code import Subject, dry
from gpumagic.dryrun.result import LIMIT_S, DryRun
from gpumagic.errors import GpuError
from gpumagic.isolation.settings import kept
from gpumagic.isolation.worker import Quiet
from gpumagic.ledger.memory_meter import MemoryMeter
from gpumagic.moving.find_tensors import nbytes_held
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.program import FUNCTION, Program
from gpumagic.usercode.variables import variables_read

_FAR_S = 20.0


@dataclass(frozen=True)
class Asked:
    """Describe the code, the variable and the device of a fit."""

    program: Program
    space: dict[str, Any]
    name: str
    values: Sequence[float]  # ascending
    device: Device
    cards: tuple[Card, ...]  # that are not here, in the place of `device`
    margin: float
    dry: bool


class Predicting:
    """Predict by dry runs what each value needs; each is asked once."""

    def __init__(self, asked: Asked, told: Callable[[float, str], object]) -> None:
        self._asked, self._told = asked, told
        self._reads = _read(asked)
        self.needed: dict[float, int] = {}
        self.trains: bool | None = None
        self.ended: dict[float, str] = {}  # why, where a dry run did not come to the end
        self.raises: dict[float, str] = {}  # of these, those at which the code itself fails
        self.notes: dict[str, None] = {}
        self._limit = LIMIT_S

    def __call__(self, value: float) -> float:
        """Return the bytes needed on top of allocated ones; infinite if the dry run ended early."""
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
        needed = run.needed(str(self._asked.device))
        if needed is not None:
            self.needed[value] = needed
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
        asked = self._asked
        program, space = asked.program, asked.space

        def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
            # In the forked copy alone.
            space.update({asked.name: value, FUNCTION: program.function})
            if "get_ipython" in space:
                transform = space["get_ipython"]().transform_cell
                leave_out_magics(space, note, program.filename, transform)

            def go() -> dict[str, Any]:
                program.set_up(space)
                return {"Out": program.once(space)}

            return go

        reads, cards = list(self._reads), asked.cards
        return Subject(space, reads, prepare, asked.device, True, self._limit, cards)


class Confirming:
    """Measure by runs on copies what each value needs; infinite if out of memory."""

    def __init__(self, asked: Asked, told: Callable[[float, str], object]) -> None:
        self._asked, self._told = asked, told
        self._target = as_torch(asked.device)
        self._quiet = Quiet()
        self.measured: dict[float, float] = {}
        self.error: Exception | None = None  # of the code
        # Variables already on the device have copies there too while the code runs.
        self.beside = nbytes_held(_read(asked), str(self._target))

    def __call__(self, value: float) -> float:
        """Return the bytes needed on top of allocated ones, without copies of variables there."""
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
                error.add_note(f"with {self._asked.name} = {value}, in a run on copies")
            raise
        finally:
            _give_back()  # out here: the exception's traceback would keep what was allocated
        return math.inf

    def _once(self, value: float) -> int:
        """Return the peak of one run."""
        with ExitStack() as stack:
            asked, clock = self._asked, time.perf_counter
            values = {asked.name: value}
            trial = Trial(
                asked.program, self._target, asked.space, values, in_place=False, clock=clock
            )
            stack.callback(trial.close)
            stack.callback(trial.stack.close)
            meter = MemoryMeter()
            stack.callback(meter.stop)
            meter.start()
            trial.set_up()
            trial.first()
            wait_for(self._target)
            where = str(self._target)
            memory = next((each for each in meter.stop() if each.device == where), None)
            return torch.cuda.memory_allocated(self._target) if memory is None else memory.peak


def _read(asked: Asked) -> list[tuple[str, Any]]:
    """Return the variables that the code reads, also by functions, without the sought one."""
    program, space = asked.program, asked.space
    names, module = [*program.reads], str(space.get("__name__") or "__main__")
    if program.function is not None:
        space, names = {**space, FUNCTION: program.function}, [*names, FUNCTION]
        module = str(getattr(inspect.unwrap(program.function), "__module__", module))
    return [(n, v) for n, v in variables_read(names, space, module) if n != asked.name]


def _give_back() -> None:
    cuda_state.collect()
    with suppress(RuntimeError):  # of a device that has failed, the code's own error tells more
        torch.cuda.empty_cache()
