"""Find the operation at which two devices, or two dtypes, part: `gpumagic.diff`.

Both runs are recorded and aligned by operator and shapes. Results of different operations need not
be the same: then only what the code assigns is compared. The user's variables, random state and
settings do not change.
"""

import contextvars
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from gpumagic.copies.trial import Trial
from gpumagic.device import Device, cuda_state
from gpumagic.display.table import Shown, block, coded, wrapped
from gpumagic.display.units import many
from gpumagic.errors import GpuError, meant, note
from gpumagic.isolation.settings import Randomness, deferred, kept
from gpumagic.isolation.worker import Quiet
from gpumagic.numerics.recorded_run import RecordedOperation, Recorder
from gpumagic.placement.torch_devices import as_torch, find
from gpumagic.timing.agreement import tolerance
from gpumagic.usercode.files import expression, line_at
from gpumagic.usercode.program import Program, namespace_of, program

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_TYPE = "two devices or two dtypes are needed; type cpu 1, or float32 bfloat16"
# Tolerances of torch.testing that are rounding: a decimal digit, which an operation of condition
# number 10 loses (Higham, "Accuracy and Stability of Numerical Algorithms", 1.6).
_DIGIT = 10.0
# Operators that add terms, which may cancel.
_SUMS = ("add.", "sub.", "sum", "mean", "native_batch_norm_b", "native_layer_norm_b")
# Operations that are aligned after the runs part: difflib takes quadratic time.
_ALIGNED = 2_000
_MOST_LINES = 4


@dataclass(frozen=True)
class Gap:
    """The largest difference between two results."""

    excess: float = 0.0  # above 1 it is no rounding error
    rtol: float = 0.0  # the relative tolerance, of the loosest dtype on the way here
    largest: float = 0.0  # infinite if only one is a number
    scale: float = 0.0  # the largest finite magnitude
    at: tuple[int, ...] = ()
    values: tuple[object, ...] = ()  # there, on each side
    exact: bool = False  # integers or bools
    tie: bool = False  # integers that choose among numbers that agree
    noise: bool = False  # rounding errors of cancelled terms are all that is left

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest magnitude."""
        return self.largest / self.scale if self.scale else self.largest


@dataclass(frozen=True)
class Divergence:
    """Record one operation whose results differ though its inputs agree."""

    where: str  # "In [3], line 7: `x.softmax(-1)` (aten._softmax)"
    line: int | None
    why: str  # in words; empty if the operation itself makes the difference
    gap: Gap
    inputs: float  # how far the inputs differ, relative to their largest magnitude
    choice: bool  # among numbers that are equal within the tolerance


@dataclass(frozen=True, repr=False)
class NumericDiff(Shown):
    """Record where two devices, or two dtypes, part."""

    sides: tuple[str, ...]  # the devices or dtypes
    found: tuple[Divergence, ...]  # in the order in which they ran
    operations: int  # that were compared: others are of one side alone
    largest: float  # relative difference of those that agree
    notes: tuple[str, ...]

    @property
    def first(self) -> Divergence | None:
        """The first divergence; a choice only if there is nothing else."""
        return min(self.found, key=lambda each: each.choice, default=None)

    @property
    def agree(self) -> bool:
        """Whether at most choices among equal numbers differ."""
        return all(each.choice for each in self.found)


def diff(
    code: str | Callable[[], Any],
    *between: object,
    namespace: dict[str, Any] | None = None,
    filename: str | None = None,
    text: str | None = None,
) -> NumericDiff:
    """Find the first operation at which two devices, or two dtypes, give different numbers.

    Parameters
    ----------
    code : str or callable
        It runs once on each side, on copies of the variables that it reads.
    *between : two objects
        Devices (``"cpu", 1``); or dtypes (``"float32", torch.bfloat16``), to which floating
        tensors are converted. By default the CPU and the current GPU.
    namespace : dict, optional
        The variables of the code; if None, a function's globals, or the caller's variables.
    filename, text : str, optional
        Where `code` is from, and how it is shown.

    Raises
    ------
    GpuError
        No such device or dtype, or code that cannot be run again.
    Exception
        The code's own error, with a note of the side.

    Examples
    --------
    >>> gpumagic.diff("net(x)", "cpu", 1)
    cpu and cuda:1 part at train.py, line 7: `x.softmax(-1)` (aten._softmax)
    """
    cuda_state.check()
    if namespace is None:
        namespace = namespace_of(code, sys._getframe(1))
    pair = _sides(between or ("cpu", "cuda"))
    made = program(code, namespace, filename=filename, text=text)
    randomness, notes = Randomness(), dict[str, None]()
    runs = Recorder(0), Recorder(1)
    for run, (name, side) in zip(runs, pair.items(), strict=True):
        try:
            with kept(), Quiet() if run is runs[1] else nullcontext():
                randomness.restore()
                # The code's settings end with the context.
                said = contextvars.copy_context().run(_run, made, namespace, side, run)
                notes |= dict.fromkeys(said)
        except Exception as error:
            note(error, f"this was the run on {name}")
            raise
        finally:
            cuda_state.collect()
    dtypes = [side for side in pair.values() if isinstance(side, torch.dtype)]
    return _compared([run.operations for run in runs], tuple(pair), dtypes, tuple(notes))


def _sides(given: tuple[object, ...]) -> dict[str, Device | torch.dtype]:
    """Return two devices or two dtypes, by name."""
    words = [str(each).removeprefix("torch.") for each in given]
    found: dict[str, Device | torch.dtype] = {
        word: getattr(torch, word) for word in words if word in _DTYPES
    }
    if not found:
        found = {str(device): device for device in map(find, given)}
    if len(given) != 2 or len(found) != 2:
        question = meant(" ".join({*words} - {*_DTYPES}), _DTYPES)
        raise GpuError(f"{' '.join(words)}: {question}{_TYPE}")
    return found


def _run(
    made: Program, namespace: dict[str, Any], side: Device | torch.dtype, recorder: Recorder
) -> list[str]:
    """Run the code once on copies; return notes for the user."""
    device = as_torch(side) if isinstance(side, Device) else None
    trial = Trial(made, device, namespace, {}, clock=time.perf_counter)
    try:
        trial.set_up()
        if isinstance(side, torch.dtype):
            torch.set_default_dtype(side)
            for tensor in trial.copies.tensors():
                # To type promotion, one without dimensions is like a number: an optimizer's step.
                if tensor.is_floating_point() and tensor.dim():
                    tensor.data = tensor.data.to(side)
        with recorder:
            value = trial.first()
        space = trial.copies.globals
        names = [name for name in (*made.reads, *made.assigned) if name in space]
        recorder.add_variables([*((name, space[name]) for name in names), ("Out", value)])
        virtual = isinstance(side, Device) and side.virtual
        said = [f"{side} is virtual: it rounds as the CPU does"] * virtual
        if recorder.left_out:
            said.append(f"{many(recorder.left_out, 'operation')} not compared: no room in 512 MiB")
        return [*trial.copies.notes, *said]
    finally:
        with deferred():
            trial.stack.close()
            trial.close()


# -- the comparison
def _compared(
    runs: Sequence[list[RecordedOperation]],
    sides: tuple[str, ...],
    dtypes: Sequence[torch.dtype],
    notes: tuple[str, ...],
) -> NumericDiff:
    """Compare two runs, of which `dtypes` are the sides, if these are no devices."""
    base = max((_allowed(each)[0] for each in dtypes), default=0.0)
    found, count, largest = dict[str, Divergence](), 0, Gap()
    for one, other in _aligned(runs):
        inputs = [*one.inputs, *other.inputs]
        known = [each.gap for each in inputs if each.gap is not None]
        before = max(known, key=lambda gap: gap.excess, default=Gap())
        kept = bool(one.results and other.results)  # there was room
        gap = _gap(one, other, known, base)
        instead = next((each.instead for each in inputs if each.instead), None)
        if gap.excess > 1 and instead and one.at:
            # Not a variable: those must be the same.
            one.instead = other.instead = instead
            continue
        one.gap = other.gap = gap
        count += kept
        if gap.excess <= 1:
            largest = max(largest, gap, key=lambda each: each.excess)
        elif before.excess <= 1:
            each = _divergence(other, gap, before, instead, sides)
            found.setdefault(each.where, each)  # a loop may repeat it
    said = f"{count:,} of {many(max(map(len, runs)), 'operation')} compared, on copies"
    return NumericDiff(sides, tuple(found.values()), count, largest.relative, (*notes, said))


def _aligned(
    runs: Sequence[list[RecordedOperation]],
) -> Iterator[tuple[RecordedOperation, RecordedOperation]]:
    """Yield the operations that both runs have; the others know what ran instead."""
    keys = [[(each.name, each.shapes) for each in run] for run in runs]
    pairs = enumerate(zip(*keys, strict=False))
    alike = next((n for n, (a, b) in pairs if a != b), min(map(len, keys)))
    yield from zip(*(run[:alike] for run in runs), strict=True)
    left, right = (each[alike : alike + _ALIGNED] for each in keys)
    for tag, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        pair = runs[0][alike + a : alike + b], runs[1][alike + c : alike + d]
        if tag == "equal":
            yield from zip(*pair, strict=True)
        else:
            for each in (*pair[0], *pair[1]):
                each.instead = pair


def _allowed(dtype: torch.dtype) -> tuple[float, float]:
    """Return torch.testing's relative and absolute tolerance of a dtype; 0 for integers."""
    return tolerance(str(dtype).removeprefix("torch.")) or (0.0, 0.0)


def _gap(one: RecordedOperation, other: RecordedOperation, known: list[Gap], rtol: float) -> Gap:
    """Return the worst gap of the results; `known` are those of the inputs."""
    rtol = max([rtol, *(each.rtol for each in known)])
    gaps = [_difference(*p, rtol) for p in zip(one.results, other.results, strict=False)]
    one.results, other.results = [], []
    worst = max(gaps, key=lambda each: each.excess, default=Gap(rtol=rtol))
    terms = max((each.scale for each in known), default=0.0)
    if one.name.startswith(_SUMS, 5) and worst.scale <= worst.rtol * terms:
        # Rounding errors of the terms are all that is left: they count where they are used.
        return replace(worst, excess=min(worst.excess, 1.0), noise=True)
    floats = [each.excess <= 1 for each in gaps if not each.exact]
    return replace(worst, tie=worst.exact and bool(floats) and all(floats))


def _difference(one: Tensor, other: Tensor, rtol: float) -> Gap:
    """Return the largest difference; integers must be equal."""
    exact = not (one.is_floating_point() or one.is_complex())
    # A dtype on one device alone excuses no difference.
    own, atol = min(_allowed(one.dtype), _allowed(other.dtype))
    rtol = max(rtol, own)
    if one.shape != other.shape:
        shapes = tuple(one.shape), tuple(other.shape)
        return Gap(math.inf, rtol, math.inf, values=shapes, exact=exact)
    if not one.numel():
        return Gap(rtol=rtol, exact=exact)
    same = (one == other) | (one.isnan() & other.isnan())
    dtype = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    a, b = one.to(dtype), other.to(dtype)
    apart = (a - b).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)
    scale = max(float(each.abs().nan_to_num(0, 0).max()) for each in (a, b))
    largest, allowed = float(apart.max()), 0.0 if exact else _DIGIT * (atol + rtol * scale)
    excess = largest / allowed if allowed else math.inf if largest else 0.0
    at = tuple(map(int, torch.unravel_index(apart.argmax(), one.shape)))
    return Gap(excess, rtol, largest, scale, at, (one[at].item(), other[at].item()), exact)


def _divergence(
    other: RecordedOperation, gap: Gap, before: Gap, instead: Any, sides: tuple[str, ...]
) -> Divergence:
    """Return why an operation parts the runs, and the line to blame."""
    blamed, why, choice = other, "", False
    unwritten = next((each for each in other.inputs if each.empty), None)
    noise = next((each for each in other.inputs if each.gap and each.gap.noise), None)
    if instead:
        blamed = (instead[1] or instead[0])[0]
        ran = [", ".join(dict.fromkeys(each.name for each in run)) or "nothing" for run in instead]
        why = f"different operations: {ran[0]} on {sides[0]}, {ran[1]} on {sides[1]}"
    elif unwritten:
        blamed, why = unwritten, f"{other.name} reads memory that nothing has written"
    elif gap.tie or (before.largest and (gap.exact or "threshold" in other.name)):
        choice, why = True, "a choice among numbers that are equal within the tolerance"
    elif noise:
        blamed, gap = noise, noise.gap
        why = "cancellation: rounding errors are all that is left"
    elif gap.relative <= _DIGIT * before.relative:
        why = "small differences add up: no operation adds a digit"
    number, where = None, f"({blamed.name})"
    if blamed.at:
        line = line_at(*blamed.at)
        number, label = line.line, "" if line.label.startswith("<") else f"{line.label}, "
        code = f"{'backward of ' * blamed.backward}`{expression(*blamed.at)}`"
        where = f"{label}line {number}: {code} {where}"
    return Divergence(where, number, why, gap, before.relative, choice)


# -- the view
def text(diff: NumericDiff) -> str:
    """For terminals."""
    first, *others = _lines(diff)
    return "\n".join([first, *(line for each in others for line in wrapped(each, "  "))])


def html(diff: NumericDiff) -> str:
    """For notebooks."""
    first, *others = map(coded, _lines(diff))
    notes = "".join(f'<div class="gm-note">{line}</div>' for line in others)
    answer = f'<div class="gm-answer{"" if diff.agree else " gm-bad"}">{first}</div>'
    return block(answer + notes, "table", "comparison")


def _lines(diff: NumericDiff) -> list[str]:
    """Return the headline, the numbers, other divergences, and the notes."""
    said, found = " and ".join(diff.sides), diff.first
    if found is None:
        words = f"largest difference {diff.largest:.0e}" if diff.largest else "equal"
        return [f"{said} agree: {words}", *diff.notes]
    values = (f"{x:.6g}" if isinstance(x, float) else str(x) for x in found.gap.values)
    pairs = ", ".join(f"{value} on {side}" for value, side in zip(values, diff.sides, strict=True))
    place = f" at {list(found.gap.at)}" if found.gap.at else ""
    numbers = f"max. difference {found.gap.largest:.2g} of {found.gap.scale:.2g}: {pairs}{place}"
    inputs = f"inputs agreed to {found.inputs:.0e}" if found.inputs else "inputs were equal"
    how = "agree but for a choice" if diff.agree else "part"
    answer = "; ".join(filter(None, [found.why, numbers, inputs]))
    also = [f"also at {each.where}" for each in diff.found if each is not found][:_MOST_LINES]
    return [f"{said} {how} at {found.where}", answer, *also, *diff.notes]
