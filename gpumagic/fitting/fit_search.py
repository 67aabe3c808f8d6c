"""Find the largest value that fits, first by dry runs, then by runs on copied variables.

A dry run follows the code in a fork, on tensors without data, and counts the bytes needed.
"""

import contextvars
import inspect
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumagic import faults
from gpumagic.copies.trial import Trial
from gpumagic.device import Device, cuda_state
from gpumagic.device.cards import Card
from gpumagic.display.units import size
from gpumagic.dryrun.follow_code import Subject, dry, leave_out_magics
from gpumagic.dryrun.result import LIMIT_S, DryRun
from gpumagic.errors import GpuError, note
from gpumagic.fitting.fit_result import Largest, Tried
from gpumagic.isolation.settings import kept
from gpumagic.isolation.worker import Quiet
from gpumagic.ledger.dispatch import MemoryMeter
from gpumagic.moving.find_tensors import nbytes_held
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.telemetry.history import board
from gpumagic.usercode.program import FUNCTION, Program
from gpumagic.usercode.variables import variables_read

_MAX_RUNS = 8  # maximum number of runs in a search
# After `_FEW` tries, `largest` may return too small a value. After `_MANY` tries, it bisects.
_FEW, _MANY = 6, 7
Need = Callable[[float], float]  # returns the bytes that a value needs


@dataclass
class Search:
    """Search for the largest value that fits. Ctrl-C or an error does not discard results."""

    program: Program
    space: dict[str, Any]
    name: str
    values: Sequence[float]  # ascending
    device: Device
    cards: tuple[Card, ...]  # if not empty, predict for these cards and not for `device`
    margin: float
    tell: Callable[[str], object]
    trains: bool | None = None
    stopped: str = ""  # why larger values may fit too; empty if the search was complete
    notes: dict[str, None] = field(default_factory=dict)
    _predicted: dict[float, int] = field(default_factory=dict)
    _ended: dict[float, str] = field(default_factory=dict)  # why a value's dry run ended early
    _raises: set[float] = field(default_factory=set)  # values for which the code raises an error
    _measured: dict[float, float] = field(default_factory=dict)  # bytes; infinite if out of memory
    _error: Exception | None = None  # the error that the code raised in a run

    def __post_init__(self) -> None:
        self._target, self._quiet, self._limit = as_torch(self.device), Quiet(), LIMIT_S
        here = [] if self.cards else [(str(self.device), cuda_state.free_bytes(self._target))]
        where = [*here, *((card.name, card.usable) for card in self.cards)]
        self._rooms = {name: (free, int(free * (1 - self.margin))) for name, free in where}
        self._near = self.margin / 2
        self._last = self.values[0]
        self._reads = self._read()
        # Bytes of the variables in `_reads` that are on the device. Each run copies these bytes.
        self._copied = nbytes_held(self._reads, str(self._target))
        old = [(each, self.space[each]) for each in self.program.assigned if each in self.space]
        # Bytes of old values that the code replaces without reading. They stay allocated in a run.
        self._replaced = nbytes_held([*self._reads, *old], str(self._target)) - self._copied

    def _read(self) -> list[tuple[str, Any]]:
        space, names = self.space, [*self.program.reads]
        module = str(space.get("__name__") or "__main__")
        if (function := self.program.function) is not None:
            space, names = {**space, FUNCTION: function}, [*names, FUNCTION]
            module = str(getattr(inspect.unwrap(function), "__module__", module))
        found = variables_read([each for each in names if each != self.name], space, module)
        return [(name, value) for name, value in found if name != self.name]

    def run(self, *, dry: bool) -> None:
        """Find the value by dry runs; if they fail, by runs. Unless `dry`, confirm it by a run."""
        first, *rest = self.values[:2]
        unknown = math.isinf(self._predict(first))
        if unknown and first in self._raises and rest and math.isfinite(self._predict(rest[0])):
            # Perhaps only the first value fails. For example, BatchNorm rejects a batch of size 1.
            self.notes[f"{self.name} = {first} raises {self._ended[first]}"] = None
            self.values, unknown = self.values[1:], False
        if unknown and dry:
            raise GpuError(f"the dry run ended early: {self._ended[first]}")
        if unknown:
            self._predicted.clear()
            self.trains = None
            self.notes[f"found by runs alone; the dry run ended early: {self._ended[first]}"] = None
            ((_, room),) = self._rooms.values()
            largest(self.values, self._run, room, near=self._near, from_below=True)
            if self._replaced:
                replaced = f"{size(self._replaced)} of values that the code replaces"
                self.stopped = f"larger values may fit: {replaced} stay allocated during a run"
            return
        for _, room in self._rooms.values():
            largest(self.values, self._predict, room, near=self._near)
        self._note_limit()
        if not dry:
            self._confirm()
        for found in self.found():
            self._set_stopped(found.value)

    def _note_limit(self) -> None:
        """Add a note if the largest values need the same, as if the data had too few rows."""
        below, last = self.values[(len(self.values) - 1) * 9 // 10], self.values[-1]
        all_fit = any(found.value == last != below for found in self.found())
        if all_fit and self._predict(below) == self._predict(last):
            same = f"{self.name} = {below} and {self.name} = {last} need the same memory"
            self.notes[f"{same}: do the data have fewer rows than the code asks for?"] = None

    def _confirm(self) -> None:
        """Run the code with the predicted value. If the measured bytes differ, search again."""
        ((free, room),) = self._rooms.values()
        more = self._copied + self._replaced  # a run needs these bytes besides the code's own
        rest = min(room, free - more)
        for _ in range(_MAX_RUNS):
            largest(self.values, self._estimate, rest, near=self._near)
            value, ran = self._best(rest)
            if value is None or ran:
                break
            if math.isinf(self._run(value)):
                if lower := [each for each in self.values if each < value]:
                    largest(lower, self._run, rest)
                break
        largest(self.values, self._estimate, room, near=self._near)
        best, ran = self._best(room)
        if best is not None and not ran:
            self.notes[
                f"{self.name} = {best} is only predicted: a run would need {size(more)} more, for "
                "copies of the variables on the device and the values that the code replaces"
            ] = None

    def _estimate(self, value: float) -> float:
        """Estimate the bytes for a value: at least the bytes measured for smaller values."""
        if value in self._measured:
            return self._measured[value]
        below = max((need for each, need in self._measured.items() if each < value), default=0.0)
        if math.isinf(below):  # a smaller value ran out of memory
            return math.inf
        known = [(self._predicted.get(each), need) for each, need in self._measured.items()]
        more = [need - least for least, need in known if least is not None and need < math.inf]
        return max(below, self._predict(value) + max(more, default=0.0))

    def stop(self, error: Exception) -> bool:
        """Record the error that ended the search; return False if the error must be raised."""
        if error is self._error or not self.tried():
            return False
        said = faults.in_words(error)
        said = said if isinstance(error, GpuError) else f"a bug in gpumagic: {said}"
        self.stopped = f"stopped at {self.name} = {self._last}: {said}; results so far"
        return True

    def _set_stopped(self, best: float | None) -> None:
        """Set `stopped` if the dry run of the next tried value above `best` ended early."""
        known = {tried.value for tried in self.tried()}
        above = (each for each in known | self._ended.keys() if best and each > best)
        if (value := min(above, default=math.inf)) in self._ended:
            what = "raises" if value in self._raises else "is unknown:"
            self.stopped = f"{self.name} = {value} {what} {self._ended[value]}"

    def _predict(self, value: float) -> float:
        """Return the predicted bytes for a value; infinite if its dry run ended early."""
        if value not in self._predicted and value not in self._ended:
            self._report(value, "dry run")  # shown first, because a dry run may take long
            try:
                self._learn(value, dry(self._subject(value)))
            except GpuError as error:
                if not self._predicted:
                    raise
                self._ended[value] = str(error)
            self._report(value, "dry run")
        return self._predicted.get(value, math.inf)

    def _learn(self, value: float, run: DryRun) -> None:
        if (needed := run.needed(str(self.device))) is not None:
            self._predicted[value] = needed
            self.trains = bool(self.trains) or run.backward
            self.notes |= dict.fromkeys(str(each) for each in run.unknown if not each.ended)
        else:
            raised = run.error or next((each.error for each in run.mismatches), "")
            self._ended[value] = raised or next(str(each) for each in run.unknown if each.ended)
            self._raises |= {value} if raised else set()
        # Limit the next dry run to 3 times this run's seconds, but to 20 s at least.
        self._limit = min(LIMIT_S, max(20.0, 3 * run.seconds))

    def _subject(self, value: float) -> Subject:
        made, space = self.program, self.space

        def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
            # This runs in the dry run's forked child, so it changes only a copy of `space`.
            space.update({self.name: value, FUNCTION: made.function})
            if "get_ipython" in space:
                leave_out_magics(space, note, made.filename, space["get_ipython"]().transform_cell)

            def go() -> dict[str, Any]:
                made.set_up(space)
                return {"Out": made.once(space)}

            return go

        return Subject(space, [*self._reads], prepare, self.device, True, self._limit, self.cards)

    def _run(self, value: float) -> float:
        """Return a run's bytes, minus copied and replaced values; infinite if out of memory."""
        if value not in self._measured:
            self._report(value, "run")
            self._measured[value] = contextvars.copy_context().run(self._measure, value)
            self._report(value, "run")
        return self._measured[value]

    def _measure(self, value: float) -> float:
        cuda_state.give_back()
        before = torch.cuda.memory_allocated(self._target)
        try:
            with kept(), self._quiet:
                need = self._peak(value) - before - self._copied
                return max(self._predicted.get(value, need), need - self._replaced)
        except torch.OutOfMemoryError:
            return math.inf
        except Exception as error:
            self._error = error
            note(error, f"with {self.name} = {value}, in a run on copies")
            raise
        finally:
            cuda_state.give_back()  # not in `except`, where the traceback keeps tensors alive

    def _peak(self, value: float) -> int:
        with ExitStack() as stack:
            trial = Trial(self.program, self._target, self.space, {self.name: value})
            stack.callback(trial.close)
            stack.callback(trial.stack.close)
            meter = MemoryMeter()
            stack.callback(meter.stop)
            meter.start()
            trial.set_up()
            trial.first()
            wait_for(self._target)
            peaks = [memory.peak for memory in meter.stop() if memory.device == str(self._target)]
            return peaks[0] if peaks else torch.cuda.memory_allocated(self._target)

    def _report(self, value: float, by: str) -> None:
        self._last, tried = value, self._tried(value)
        (_, room), *_ = self._rooms.values()
        line = f"{by} of {self.name} = {value}"
        if tried.ran is False:
            line += ": out of memory"
        elif value in self._ended:
            line += f" ended early: {self._ended[value]}"
        elif tried.needed is not None:
            line += f" needs {size(tried.needed)} of {size(room)} usable"
        title = self.program.text.strip().partition("\n")[0]
        board.post({"line": f"{title} · {line}", "bars": []})
        self.tell(line)

    def _tried(self, value: float) -> Tried:
        measured = self._measured.get(value)
        ran = None if measured is None else math.isfinite(measured)
        nbytes = int(measured) if measured is not None and ran else None
        return Tried(value, self._predicted.get(value), nbytes, ran)

    def tried(self) -> tuple[Tried, ...]:
        return tuple(map(self._tried, sorted(self._predicted.keys() | self._measured.keys())))

    def found(self) -> tuple[Largest, ...]:
        """Return the largest value known to fit on the GPU, or on each card."""
        return tuple(
            Largest(where, free, room, *self._best(room), self.device.virtual and not self.cards)
            for where, (free, room) in self._rooms.items()
        )

    def _best(self, room: int) -> tuple[float | None, bool]:
        """Return the largest value that fits in `room` bytes, and whether a run of it completed."""
        fitting = [tried for tried in self.tried() if self._estimate(tried.value) <= room]
        return (fitting[-1].value, bool(fitting[-1].ran)) if fitting else (None, False)


def largest(
    values: Sequence[float], need: Need, limit: float, *, near: float = 0, from_below: bool = False
) -> float | None:
    """Return the largest of `values` with `need(value) <= limit`; None if there is none."""
    # `values` are positive and ascending. `need` must not decrease. After six tries, the result may
    # be too small by less than the fraction `near`. `from_below` starts by doubling values[0].
    if need(values[0]) > limit:
        return None
    low, high = _doubled(values, need, limit) if from_below else (0, len(values) - 1)
    if need(values[high]) <= limit:
        return values[high]
    tries, fits = 2, True
    while high - low > 1 and (tries < _FEW or values[high] > values[low] * (1 + near)):
        if tries >= _MANY:
            value = math.sqrt(values[high] * values[low])
        elif tries >= _FEW - 2 and tries % 2 == 0:  # stay close to the bound that changed last
            value = values[low] * (1 + near) if fits else values[high] / (1 + near)
        else:
            value = _interpolate(values, low, high, need, limit)
        middle = min(max(bisect_right(values, value) - 1, low + 1), high - 1)
        tries += 1
        fits = need(values[middle]) <= limit
        low, high = (middle, high) if fits else (low, middle)
    return values[low]


def _doubled(values: Sequence[float], need: Need, limit: float) -> tuple[int, int]:
    """Double the value until `need` exceeds `limit`, or to the end; return the last two indices."""
    low = high = 0
    while high < len(values) - 1 and need(values[high]) <= limit:
        low, high = high, max(bisect_right(values, 2 * values[high]) - 1, high + 1)
    return low, high


def _interpolate(values: Sequence[float], low: int, high: int, need: Need, limit: float) -> float:
    """Estimate the value that needs exactly `limit`, assuming that `need` follows a power law."""
    least, first = need(values[0]), values[0]
    at_low, at_high = need(values[low]) - least, need(values[high]) - least
    if math.isinf(at_high) or at_high <= at_low * (1 + 1e-9):
        return math.sqrt(values[low] * values[high])
    if at_low <= 0:  # a power cannot be computed, so interpolate linearly
        return values[low] + (limit - least) * (values[high] - values[low]) / at_high
    power = math.log(at_high / at_low) / math.log((values[high] - first) / (values[low] - first))
    return first + (values[low] - first) * math.pow((limit - least) / at_low, 1 / power)
