"""Search for the largest value that fits: predict by dry runs, then confirm by runs on copies."""

import contextvars
import inspect
import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
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
from gpumagic.errors import GpuError
from gpumagic.fitting.fit_result import Largest, Tried
from gpumagic.isolation.settings import kept
from gpumagic.isolation.worker import Quiet
from gpumagic.ledger.memory_meter import MemoryMeter
from gpumagic.moving.find_tensors import nbytes_held
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.telemetry.history import board
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
        # Bytes of the copies of variables that are on the device already.
        self.copied = nbytes_held(_read(asked), str(self._target))

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
                return self._once(value) - before - self.copied
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
            trial = Trial(asked.program, self._target, asked.space, values, clock=clock)
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


Need = Callable[[float], float]

_MOST_RUNS = 8  # up and down, where what is measured leads back and forth
_FEW = 6  # questions, after which the answer may be within `near` of the largest value
_SLOW = 4  # estimates that may leave more than half of the bracket; from then on it is halved


@dataclass
class Fitting:
    """Run a search; whatever happens, `found`, `tried` and `stopped` have the results so far."""

    asked: Asked
    tell: Callable[[str], object]
    notes: dict[str, None] = field(default_factory=dict)
    interrupted: bool = False
    stopped: str = ""  # why larger values are not known

    def __post_init__(self) -> None:
        a = self.asked
        where = [(card.name, card.usable) for card in a.cards] or [(str(a.device), self._free())]
        self._rooms = {name: (free, int(free * (1 - a.margin))) for name, free in where}
        self.predicting = Predicting(a, self._told)
        self._values, self._last = a.values, a.values[0]
        # To find it closer than the margin would cost dry runs that nobody would notice.
        self._near = a.margin / 2
        self._confirming = Confirming(a, self._told)

    def _free(self) -> int:
        cuda_state.check()
        return cuda_state.room(as_torch(self.asked.device))

    def _told(self, value: float, by: str) -> None:
        """Say how far it is."""
        self._last = value
        tried = self._tried(value)
        (_, room), *_ = self._rooms.values()
        line = f"{by} of {self.asked.name} = {value}"
        if tried.ran is False:
            line += ": out of memory"
        elif value in self.predicting.ended:
            line += f" ended early: {self.predicting.ended[value]}"
        elif tried.needed is not None:
            line += f" needs {size(tried.needed)}, and {size(room)} may be used"
        title = self.asked.program.text.strip().partition("\n")[0]
        board.post({"line": f"{title} · {line}", "bars": []})
        self.tell(line)

    # -- the search
    def run(self) -> None:
        """Predict, then confirm; code that dry runs cannot follow is run from the start."""
        predict = self.predicting
        self._leave_out_first(predict.raises)
        if math.isinf(predict(self._values[0])):
            self._without_dry_runs()
            return
        for _, room in self._rooms.values():
            largest(self._values, predict, room, near=self._near)
        if not self.asked.dry:
            self._confirm()
        self._say_what_is_open()

    def _leave_out_first(self, raises: dict[float, str]) -> None:
        """Skip the first value if the code fails at it alone, as BatchNorm does at 1."""
        first, *rest = self._values[:2]
        self.predicting(first)
        if first in raises and rest and math.isfinite(self.predicting(rest[0])):
            self.notes[f"{self.asked.name} = {first} raises {raises[first]}"] = None
            self._values = self._values[1:]

    def _without_dry_runs(self) -> None:
        predict, run = self.predicting, self._confirming
        why = predict.ended[self._values[0]]
        predict.needed.clear()
        if self.asked.dry:
            raise GpuError(f"a dry run cannot tell: {why}")
        predict.trains = None
        self.notes[f"found by runs alone, since a dry run ends at {why}"] = None
        ((_, room),) = self._rooms.values()
        largest(self._values, run, room, near=self._near, from_below=True)

    def stop(self, error: Exception) -> bool:
        """Take an error as the end of the search; False where it is the code's or all there is."""
        if error is self._confirming.error or not self.tried():
            return False
        ours = "" if isinstance(error, GpuError) else "a fault of gpumagic: "
        self.stopped = (
            f"stopped at {self.asked.name} = {self._last}: {ours}{faults.in_words(error)}; "
            "these are the values tried until then"
        )
        return True

    def _say_what_is_open(self) -> None:
        """Note a value whose need is unknown, if all smaller ones fit."""
        for found in self.found():
            ended = [v for v in self.predicting.ended if found.value and v > found.value]
            known = [t.value for t in self.tried() if found.value and t.value > found.value]
            if ended and min(ended) < min(known, default=math.inf):
                value = min(ended)
                what = "raises" if value in self.predicting.raises else "is not known:"
                self.stopped = f"{self.asked.name} = {value} {what} {self.predicting.ended[value]}"

    def _confirm(self) -> None:
        """Run the predicted value, and go up or down by the measured bytes."""
        ((free, room),) = self._rooms.values()
        run, values = self._confirming, self._values
        rest = min(room, free - run.copied)  # less the copies' memory
        for _ in range(_MOST_RUNS):
            largest(values, self._estimate, rest, near=self._near)
            value, ran = self._largest(rest)
            if value is None or ran:
                break
            if math.isinf(run(value)):
                lower = [v for v in values if v < value]
                if lower:
                    largest(lower, run, rest)
                break
        largest(values, self._estimate, room, near=self._near)
        best, ran = self._largest(room)
        if best is not None and not ran:
            self.notes[
                f"{self.asked.name} = {best} is only predicted: a run would need "
                f"{size(run.copied)} more, for copies of the variables that are on it"
            ] = None

    def _estimate(self, value: float) -> float:
        """Estimate a value's need from all results; infinite from the first that did not run."""
        measured = self._confirming.measured
        if value in measured:
            return measured[value]
        if any(math.isinf(need) and value >= refused for refused, need in measured.items()):
            return math.inf
        known = self.predicting.needed
        more = [m - known[v] for v, m in measured.items() if math.isfinite(m) and v in known]
        return self.predicting(value) + max(more, default=0.0)

    # -- what is known
    def _tried(self, value: float) -> Tried:
        measured = self._confirming.measured.get(value)
        return Tried(
            value,
            self.predicting.needed.get(value),
            int(measured) if measured is not None and math.isfinite(measured) else None,
            None if measured is None else math.isfinite(measured),
        )

    def tried(self) -> tuple[Tried, ...]:
        """Return all values that were tried."""
        known = {**self.predicting.needed, **self._confirming.measured}
        return tuple(self._tried(value) for value in sorted(known))

    def found(self) -> tuple[Largest, ...]:
        """Return the largest value known to fit, for each device."""
        virtual = self.asked.device.virtual and not self.asked.cards
        return tuple(
            Largest(where, free, room, *self._largest(room), virtual)
            for where, (free, room) in self._rooms.items()
        )

    def _largest(self, room: int) -> tuple[float | None, bool]:
        """Return the largest value within the limit, and whether it ran."""
        tried = self.tried()
        best = max((t.value for t in tried if self._estimate(t.value) <= room), default=None)
        return best, any(t.value == best and t.ran for t in tried)


def largest(
    values: Sequence[float], need: Need, limit: float, *, near: float = 0, from_below: bool = False
) -> float | None:
    """Return the largest of ascending `values`, all above 0, that needs at most `limit`, or None.

    What is needed never falls as the value grows, and may be infinite. The answer was asked about.
    So was the next value, which needs more; or, where six questions do not tell it, one that is
    larger by at most the part `near`. Four are enough where the need is affine. `from_below` asks
    for no value that is more than twice one that was within the limit.
    """
    asked, low, high = 2, 0, len(values) - 1
    if need(values[low]) > limit:
        return None
    if from_below:
        low, high = _doubled(values, need, limit)
    if low == high or need(values[high]) <= limit:
        return values[high]
    slow = same = 0  # `same`: how often in a row it was within the limit; below 0: was not
    while high - low > 1 and (asked < _FEW or values[high] > values[low] * (1 + near)):
        width = values[high] / values[low]
        value = math.sqrt(values[high] * values[low])
        if slow < _SLOW:
            value = _estimate(values, low, high, need, limit)
            if abs(same) > 1:  # to the other side, to close the bracket there
                value *= 1 + math.copysign(0.01 * 2 ** (abs(same) - 2), same)
        middle = min(max(bisect_right(values, value) - 1, low + 1), high - 1)
        asked += 1
        if need(values[middle]) <= limit:
            low, same = middle, max(same, 0) + 1
        else:
            high, same = middle, min(same, 0) - 1
        slow += (values[high] / values[low]) ** 2 > width
    return values[low]


def _doubled(values: Sequence[float], need: Need, limit: float) -> tuple[int, int]:
    """Return two positions: one within the limit, and one above it, or the last one."""
    low = 0
    while low < len(values) - 1:
        high = max(bisect_right(values, 2 * values[low]) - 1, low + 1)
        if need(values[high]) > limit:
            return low, high
        low = high
    return low, low


def _estimate(values: Sequence[float], low: int, high: int, need: Need, limit: float) -> float:
    """Interpolate the value that needs exactly the limit, if the need grows by a power law."""
    least, first = need(values[0]), values[0]
    at_low, at_high = need(values[low]) - least, need(values[high]) - least
    if math.isinf(at_high) or at_high <= at_low * (1 + 1e-9):
        return math.sqrt(values[low] * values[high])
    if at_low <= 0:  # nothing is known of the power
        return values[low] + (limit - least) * (values[high] - values[low]) / at_high
    power = math.log(at_high / at_low) / math.log((values[high] - first) / (values[low] - first))
    return first + (values[low] - first) * math.pow((limit - least) / at_low, 1 / power)
