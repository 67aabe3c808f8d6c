"""Find the operation at which two devices, or two dtypes, diverge: `gpumagic.diff`.

The code runs once on each side (a device or a dtype), on copies of the variables. Operations are
paired by operator and shapes. Operations that depend on an unpaired operation are not reported.

For one operation, two results may differ by twice torch.testing's tolerance. For a chain of
operations, this limit grows with the square root of the chain's length, as rounding errors do
(N. J. Higham and T. Mary, "A New Approach to Probabilistic Rounding Error Analysis", 2019). The
limit never exceeds ten tolerances. The tolerance of a sum is relative to the largest term.
"""

import contextvars
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from gpumagic.copies.trial import Trial
from gpumagic.device import Device, cuda_state
from gpumagic.display.table import Shown, block, coded, wrapped
from gpumagic.display.units import both, many
from gpumagic.errors import GpuError, meant, note
from gpumagic.isolation.settings import Randomness, deferred, kept
from gpumagic.isolation.worker import Quiet
from gpumagic.moving.moved import reasons
from gpumagic.numerics.recorded_run import RecordedOperation, Recorder
from gpumagic.placement.torch_devices import as_torch, find
from gpumagic.timing.agreement import array_differences, dtype_of, tolerance
from gpumagic.usercode.program import Program, namespace_of, program

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_SHORT = re.compile(r"^fp(?=\d)|(?<=^b)f(?=\d)")  # to read fp16 as float16, bf16 as bfloat16
_TYPE = "two devices or two dtypes are needed; type cpu 1, or float32 bfloat16"
_DIGIT = 10.0  # a loss of one digit (Higham, "Accuracy and Stability of Numerical Algorithms", 1.6)
# Operators that add terms. Large terms may cancel, so the tolerance is relative to these terms.
_SUMS = ("add.", "sub.", "rsub.", "sum", "mean", "native_batch_norm_b", "native_layer_norm_b")
_ALIGNED = 2_000  # operations to pair after the runs differ; difflib is too slow for more


@dataclass(frozen=True)
class Gap:
    """The largest difference between the two sides' results of an operation, and the cause."""

    rtol: float = 0.0  # torch.testing's tolerance for the chain's least precise dtype
    depth: int = 0  # number of operations in the longest chain that ends here
    inputs: float = 0.0  # the largest relative difference of the operation's inputs
    excess: float = 0.0  # `largest` divided by the allowed difference; above 1, the results diverge
    largest: float = 0.0  # the largest difference; infinite if a NaN or an infinity differs
    scale: float = 0.0  # the largest finite magnitude in the results
    at: tuple[int, ...] = ()  # the index of the largest difference
    values: tuple[object, ...] = ()  # the two values at the index `at`, or two unequal shapes
    noise: bool = False  # whether the gap is allowed only because the terms of a sum are large
    choice: bool = False  # whether the operation, such as argmax, chose among nearly equal numbers
    where: str = ""  # "In [3], line 7: `x.softmax(-1)` (aten._softmax)"
    line: int | None = None
    variable: str = ""  # path of the variable that differs; empty if an operation's result differs
    why: str = ""  # the cause of a divergence; empty if the operation is the cause

    @property
    def relative(self) -> float:
        """The largest difference, relative to the largest magnitude."""
        return self.largest / self.scale if self.scale else self.largest


@dataclass(frozen=True, repr=False)
class NumericDiff(Shown):
    """The result of `diff`: where two devices, or two dtypes, diverge."""

    sides: tuple[str, ...]  # the devices or dtypes
    found: tuple[Gap, ...]  # results that diverge although their inputs agree, in order
    operations: int  # number of operations whose results were compared
    largest: float  # relative difference of the results that come closest to their tolerance
    notes: tuple[str, ...]
    unused: str = ""  # the devices on which torch ran nothing, and why: "cuda:0; left ds: …"

    @property
    def first(self) -> Gap | None:
        """The first divergence, or a choice among equal numbers if there is no other divergence."""
        return min(self.found, key=lambda each: each.choice, default=None)

    @property
    def agree(self) -> bool:
        """Whether both sides ran, and all results agree except for choices among equal numbers."""
        return not self.unused and all(each.choice for each in self.found)


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
        Code to run once on each side, on copies of the variables that it reads.
    *between : two objects
        Two devices (``"cpu", 1``) or two dtypes (``"float32", torch.bfloat16``). Floating tensors
        are converted to each dtype. The default is the CPU and the current GPU.
    namespace : dict, optional
        The variables of the code. By default, the variables of the function or the caller.
    filename, text : str, optional
        The file that `code` is from, and the text to show for `code`.

    Raises
    ------
    GpuError
        There is no such device or dtype, or the code cannot run twice.
    Exception
        The code's own error, with a note that names the side.

    Examples
    --------
    >>> gpumagic.diff("net(x)", "cpu", 1)
    cpu and cuda:1 differ at train.py, line 7: `x.softmax(-1)` (aten._softmax)
    """
    cuda_state.check()
    if namespace is None:
        namespace = namespace_of(code, sys._getframe(1))
    pair = _sides(between or ("cpu", "cuda"))
    made = program(code, namespace, filename=filename, text=text)
    randomness, runs, notes = Randomness(), list[Recorder](), dict[str, None]()
    for name, side in pair.items():
        try:
            with kept(), Quiet() if runs else nullcontext():
                runs.append(Recorder(len(runs)))
                randomness.restore()
                # Use a copied context, so that the code's changes to context variables do not last.
                said = contextvars.copy_context().run(_run, made, namespace, side, runs[-1])
                notes |= dict.fromkeys(said)
        except Exception as error:
            note(error, f"this was the run on {name}")
            raise
        finally:
            cuda_state.collect()
    if not any(run.operations or any(run.variables.values()) for run in runs):
        raise GpuError("nothing to compare: the code ran no operation of torch")
    found = _compared(runs, tuple(pair), max(tolerance(name)[0] for name in pair), [*notes])
    idle = {name: run.left for name, run in zip(pair, runs, strict=True) if run.idle}
    left = dict.fromkeys(chain.from_iterable(idle.values()))
    return replace(found, unused=both(idle) + reasons(left))


def _sides(given: tuple[object, ...]) -> dict[str, Device | torch.dtype]:
    words = [_SHORT.sub("float", str(each).removeprefix("torch.")) for each in given]
    found: dict[str, Any] = {word: getattr(torch, word) for word in words if word in _DTYPES}
    found = found or {str(device): device for device in map(find, given)}
    if len(given) != 2 or len(found) != 2:
        question = meant(" ".join({*words} - {*_DTYPES}), _DTYPES)
        raise GpuError(f"{' '.join(words)}: {question}{_TYPE}")
    return found


def _run(
    made: Program, namespace: dict[str, Any], side: Device | torch.dtype, recorder: Recorder
) -> list[str]:
    """Record one run of the code, on copies of its variables; return notes for the user."""
    device = as_torch(side) if isinstance(side, Device) else None
    trial = Trial(made, device, namespace, {})
    try:
        trial.set_up()
        copied, recorder.left = trial.copies.storages.tensors(), trial.copies.left
        if isinstance(side, torch.dtype):
            torch.set_default_dtype(side)
            for _, tensor in copied:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(side)
        with recorder:
            value = trial.first()
        recorder.idle = bool(device and recorder.devices and device not in recorder.devices)
        # Leave out variables that the run neither copied nor assigned. They are the user's objects.
        left = {n: v for n, v in trial.copies.globals.items() if namespace.get(n) is not v}
        recorder.add_variables({**left, "Out": value}, str(namespace.get("__name__")), copied)
        said = [f"{side} is virtual: it rounds as the CPU does"] * getattr(side, "virtual", False)
        said += ["results beyond 512 MiB are not compared"] * recorder.full
        return [*trial.copies.notes, *said]
    finally:
        with deferred():
            trial.stack.close()
            trial.close()


def _compared(
    runs: Sequence[Recorder], sides: tuple[str, ...], base: float, notes: list[str]
) -> NumericDiff:
    """Compare two runs; `base` is the relative tolerance if the sides are dtypes, else 0."""
    found, count, closest = dict[str, Gap](), 0, Gap()
    read = runs[0].read | runs[1].read
    for one, other in chain(_paired_operations(runs), _paired_variables(runs)):
        inputs = [*one.inputs, *other.inputs]
        known = [Gap(rtol=base), *filter(None, (each.gap for each in inputs))]
        count += all((one.name, one.results, other.results))
        gap = _gap(one, other, known, read)
        # Unpaired operations on which the inputs depend. Prefer operations that only one side ran,
        # because two different sequences may be equivalent.
        instead = min((each.instead for each in inputs if each.instead), key=all, default=None)
        if gap.excess > 1 and instead and one.name:
            one.instead = other.instead = instead
            continue
        one.gap = other.gap = gap
        # Do not report a gradient of rounding errors alone, as for a bias before a batch norm.
        rounding = any(each.backward and each.is_noise for each in inputs)
        if gap.excess <= 1:
            closest = max(closest, gap, key=lambda each: each.excess)
        elif all(each.excess <= 1 for each in known) and not (one.variable and rounding):
            gap = _explained(other, gap, instead, sides)
            found.setdefault(gap.where, gap)  # report a loop's operation only once
    # 1e-5 is torch.testing's absolute tolerance for float32.
    if not found and closest.relative > 0.01 and (closest.noise or closest.largest < 1e-5):
        apart = f"a difference of {closest.largest:.0e} in values up to {closest.scale:.0e}"
        notes = [*notes, f"{apart} counts as a rounding error of small numbers or large terms"]
    notes = [*notes, _coverage(runs, count)]
    return NumericDiff(sides, tuple(found.values()), count, closest.relative, tuple(notes))


def _coverage(runs: Sequence[Recorder], count: int) -> str:
    """Return the note on how many operations were compared, and where the runs first differ."""
    ran = max(sum(not each.empty for each in run.operations) for run in runs)
    said = f"{count:,} of {many(ran, 'operation')} compared, on copies"
    each_run = (enumerate(run.operations) for run in reversed(runs))
    if alone := [each for run in each_run for each in run if each[1].results and each[1].instead]:
        first = min(alone, key=itemgetter(0))[1].place()[0]
        said += f"; some operations ran on one side only, the first at {first}"
    return said


def _paired_operations(runs: Sequence[Recorder]) -> Iterator[tuple[RecordedOperation, ...]]:
    """Yield pairs of operations, and set `.instead` of unpaired operations."""
    ran = [run.operations for run in runs]
    keys = [[(each.name, each.shapes) for each in run] for run in ran]
    alike = [*(a == b for a, b in zip(*keys, strict=False)), False].index(False)
    yield from zip(*(run[:alike] for run in ran), strict=True)
    left, right = (each[alike : alike + _ALIGNED] for each in keys)
    for how, a, b, c, d in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        pair = ran[0][alike + a : alike + b], ran[1][alike + c : alike + d]
        if how == "equal":
            yield from zip(*pair, strict=True)
        else:
            for each in (*pair[0], *pair[1]):
                each.instead = pair


def _paired_variables(runs: Sequence[Recorder]) -> Iterator[tuple[RecordedOperation, ...]]:
    """Yield pairs of variables' tensors. If several paths refer to a pair, yield it only once."""
    named = dict[tuple[int, ...], tuple[RecordedOperation, ...]]()
    values, others = (run.variables for run in runs)
    for name in (name for name in values if name in others):
        for path in values[name] | others[name]:
            absent = RecordedOperation("", [], variable=path, results=[(0, None)])
            ends = values[name].get(path, absent), others[name].get(path, absent)
            one, other = ([id(tensor) for _, tensor in each.results] for each in ends)
            if one != other:
                named.setdefault((*one, *other), ends)
    yield from named.values()


def _gap(one: RecordedOperation, other: RecordedOperation, known: list[Gap], read: set[int]) -> Gap:
    """Return the worst gap of an operation's results; `known` has the gaps of the inputs."""
    before = Gap(
        rtol=max(each.rtol for each in known),
        depth=max(one.depth, other.depth),
        inputs=max(each.relative for each in known),
    )
    terms = max(each.scale for each in known) * one.name.startswith(_SUMS, 5)
    pairs = [*zip(one.results, other.results, strict=False)]
    # Leave out the buffers for the backward pass, such as the workspace of an LSTM.
    used = [(x, y) for x, y in pairs if read & {x[0], y[0]}]
    gaps = [_difference(x, y, before, terms) for (_, x), (_, y) in used or pairs]
    one.results, other.results = [], []
    worst = max(gaps, key=lambda each: each.excess, default=before)
    # Different integers may be indices of nearly equal numbers, so they count as a choice.
    exact = {*map(type, worst.values)} <= {bool, int}
    choice = exact and any(each.excess <= 1 for each in gaps)
    choice |= before.inputs > 0 and (exact or "threshold" in one.name)
    return replace(worst, choice=choice, noise=any(each.noise for each in gaps))


def _difference(one: Tensor | None, other: Tensor | None, before: Gap, terms: float) -> Gap:
    """Return the gap of two results; `terms` is the magnitude of a sum's largest term, else 0."""
    if one is None or other is None or one.shape != other.shape:
        shapes = (each if each is None else tuple(each.shape) for each in (one, other))
        return replace(before, excess=math.inf, largest=math.inf, values=tuple(shapes))
    one, other = one.detach().cpu(), other.detach().cpu()  # `one` may be the user's parameter
    # Take the smaller tolerance, so that a lower precision on only one side is reported.
    own, atol = min(tolerance(dtype_of(one)), tolerance(dtype_of(other)))
    gap = replace(before, rtol=max(before.rtol, own))
    if not one.numel():
        return gap
    largest, scale, place = array_differences(one, other)
    at = tuple(map(int, torch.unravel_index(torch.tensor(place), one.shape)))
    growth = min(2 * math.sqrt(gap.depth), _DIGIT) if own else 0.0
    allowed = growth * (atol + gap.rtol * max(scale, terms))
    return replace(
        gap,
        excess=largest / allowed if allowed else math.inf if largest else 0.0,
        largest=largest,
        scale=scale,
        at=at,
        values=(one[at].item(), other[at].item()),
        noise=scale < terms and growth * gap.rtol * scale < largest <= allowed,
    )


def _explained(other: RecordedOperation, gap: Gap, instead: Any, sides: tuple[str, ...]) -> Gap:
    """Add the cause and the user's line to the gap of the diverging operation `other`."""
    blamed, why = other, ""
    unwritten = next((each for each in other.inputs if each.empty), None)
    noise = next((each for each in other.inputs if each.is_noise), None)
    if instead:
        blamed = (instead[1] or instead[0])[0]
        ran = map("{} on {}".format, map(_names, instead), sides)
        why = f"different operations, not compared: {', '.join(ran)}"
    elif unwritten:
        blamed, why = unwritten, f"{other.name}{other.variable} reads uninitialized memory"
    elif gap.choice:
        why = "a choice among numbers that are equal within the tolerance"
    elif noise:
        blamed, gap = noise, noise.gap
        why = "cancellation: only rounding errors are left"
    elif other.variable:
        why = "the operations that were compared agree"
    elif gap.relative <= _DIGIT * gap.inputs:
        why = "small differences add up: no single operation makes them ten times larger"
    where, line = blamed.place()
    return replace(gap, where=where, line=line, why=why, variable=other.variable)


def _names(ran: Sequence[RecordedOperation]) -> str:
    return ", ".join(dict.fromkeys(each.name for each in ran)) or "nothing"


def text(diff: NumericDiff) -> str:
    first, *others = _lines(diff)
    return "\n".join([first, *(line for each in others for line in wrapped(each, "  "))])


def html(diff: NumericDiff) -> str:
    first, *others = map(coded, _lines(diff))
    css = "gm-answer" if diff.agree else "gm-answer gm-bad"
    notes = "".join(f'<div class="gm-note">{line}</div>' for line in others)
    return block(f'<div class="{css}">{first}</div>{notes}', "table", "comparison")


def _lines(diff: NumericDiff) -> list[str]:
    """Return the headline, the numbers, other divergences, and the notes."""
    sides, found = " and ".join(diff.sides), diff.first
    unused = [f"torch ran nothing on {diff.unused}"] * bool(diff.unused)
    if found is None and unused:
        return [f"nothing to compare: {unused[0]}"]
    if found is None:
        words = f"largest relative difference {diff.largest:.0e}" if diff.largest else "equal"
        return [f"{sides} agree: {words}", *diff.notes]
    values = (f"{x:.6g}" if isinstance(x, float) else str(x) for x in found.values)
    pairs = ", ".join(map("{} on {}".format, values, diff.sides))
    within = f"{found.variable}, " * bool(found.variable)
    apart = f"largest difference {found.largest:.2g} in {within}values up to {found.scale:.2g}"
    apart = apart if math.isfinite(found.largest) else f"{within}a value that is not finite"
    apart = f"{within}shapes" if tuple in map(type, found.values) else apart
    numbers = f"{apart}: {pairs}" + f" at {list(found.at)}" * bool(found.at)
    inputs = f"inputs agreed to {found.inputs:.0e}" if found.inputs else "inputs were equal"
    how = "agree, except for a choice" if diff.agree else "differ"
    answer = "; ".join(filter(None, [found.why, numbers, inputs]))
    also = [f"also at {each.where}" for each in diff.found if each is not found][:4]
    return [f"{sides} {how} at {found.where}", answer, *also, *unused, *diff.notes]
