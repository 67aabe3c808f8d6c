"""Compare two recorded runs: align them, and follow their differences through the operations."""

import cmath
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from gpumagic.numerics.diff_result import Divergence, Gap
from gpumagic.numerics.recorded_run import RecordedOperation
from gpumagic.timing.agreement import array_differences, tolerance
from gpumagic.usercode.files import expression, line_at

# An operation of condition number 10 loses a decimal digit (Higham, "Accuracy and Stability of
# Numerical Algorithms", 1.6). What grows less, or exceeds the tolerance less, is rounding.
_DIGIT = 10.0
# Operators that add terms, which may cancel; and those that jump at a threshold.
_SUMS = ("add.", "sub.", "sum", "mean", "native_batch_norm_b", "native_layer_norm_b")
_JUMPS = ("threshold_b", "relu_b", "hardtanh_b", "round", "floor", "ceil", "trunc", "sign")
# Operations that are aligned after the runs part: difflib takes quadratic time.
_ALIGNED = 2_000

Runs = Sequence[list[RecordedOperation]]


def divergences(
    runs: Runs, sides: tuple[str, ...], dtypes: list[torch.dtype]
) -> tuple[tuple[Divergence, ...], int, Gap]:
    """Return where two runs part, the number of compared operations, the largest gap of others.

    `dtypes` are those of the sides, if these are no devices.
    """
    base = max((_allowed(each)[0] for each in dtypes), default=0.0)
    found, count, largest = dict[str, Divergence](), 0, Gap()
    for one, other in _aligned(runs):
        inputs = [*one.inputs, *other.inputs]
        known = [each.gap for each in inputs if each.gap is not None]
        before = max(known, key=lambda gap: gap.excess, default=Gap())
        gap = _gap(one, other, known, base)
        block = next((each.block for each in inputs if each.gap is None and each.block), None)
        if gap.excess > 1 and block and one.at:
            # Results of different operations need not be the same; those of the code must be.
            one.block = other.block = block
            continue
        one.gap = other.gap = gap
        count += 1
        grew = not block and gap.relative > _DIGIT * before.relative
        if gap.excess <= 1:
            largest = max(largest, gap, key=lambda each: each.excess)
        elif gap.excess > (1 if grew else _DIGIT) and before.excess <= _DIGIT:
            each = _explained(one, other, before, block, sides)
            found.setdefault(each.where, each)  # a loop may repeat it
    return tuple(found.values()), count, largest


def _aligned(runs: Runs) -> Iterator[tuple[RecordedOperation, RecordedOperation]]:
    """Yield the operations that both runs have, and give the others their block."""
    keys = [[(each.name, each.shapes) for each in run] for run in runs]
    pairs = enumerate(zip(*keys, strict=False))
    alike = next((n for n, (a, b) in pairs if a != b), min(map(len, keys)))
    yield from zip(*(run[:alike] for run in runs), strict=True)
    left, right = (each[alike : alike + _ALIGNED] for each in keys)
    for tag, *ends in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        a, b, c, d = (alike + end for end in ends)
        block = runs[0][a:b], runs[1][c:d]
        if tag == "equal":
            yield from zip(*block, strict=True)
        else:
            for each in (*block[0], *block[1]):
                each.block = block


def _allowed(dtype: torch.dtype) -> tuple[float, float]:
    """Return torch.testing's relative and absolute tolerance of a dtype; 0 for integers."""
    return tolerance(str(dtype).removeprefix("torch.")) or (0.0, 0.0)


def _gap(one: RecordedOperation, other: RecordedOperation, known: list[Gap], rtol: float) -> Gap:
    """Return the worst gap of the results; `known` are those of the inputs."""
    rtol = max([rtol, *(each.rtol for each in known)])
    pairs = list(zip(one.results, other.results, strict=False))
    if other.rows is not None and pairs:
        chosen = [other.rows.gather(1, x.reshape(-1, 1)) for x in pairs[0]]
        pairs.append((chosen[0], chosen[1]))
    # Bytes beside other results may be a kernel's own workspace.
    gaps = [_difference(*p, rtol) for p in pairs if len(pairs) == 1 or p[0].dtype != torch.uint8]
    one.results, other.results, one.rows, other.rows = [], [], None, None
    worst = max(gaps, key=lambda each: each.excess, default=Gap(rtol=rtol))
    floats = [each.excess for each in gaps if not each.exact]
    terms = max((each.scale for each in known), default=0.0)
    if one.name.startswith(_SUMS, len("aten.")) and worst.scale <= worst.rtol * terms:
        # Rounding errors of the terms are all that is left: they count where they are used.
        return replace(worst, excess=min(worst.excess, 1.0), noise=True)
    return replace(worst, choice=worst.exact and bool(floats) and max(floats) <= 1)


def _difference(one: Tensor, other: Tensor, rtol: float) -> Gap:
    exact = not (one.is_floating_point() or one.is_complex())
    if one.shape != other.shape:
        shapes = tuple(one.shape), tuple(other.shape)
        return Gap(math.inf, rtol, math.inf, values=shapes, exact=exact)
    # A dtype on one device alone excuses no difference.
    own, atol = min(_allowed(one.dtype), _allowed(other.dtype))
    strict = exact or (one.dtype != other.dtype and rtol <= own)
    rtol = max(rtol, own)
    largest, scale = array_differences(one, other)
    largest = math.inf if math.isnan(largest) else largest
    # That is the first one's; the other's is at least the difference to it.
    scale = scale if math.isinf(largest) else max(scale, largest - scale)
    excess = math.inf if strict and largest else largest / (atol + rtol * scale or 1.0)
    if excess <= 1:
        return Gap(excess, rtol, largest, scale, exact=exact)
    same = (one == other) | (one.isnan() & other.isnan())
    apart = (one - other.to(one.dtype)).abs().double().nan_to_num(math.inf, math.inf)
    place = apart.masked_fill(same, -1).argmax()
    at = tuple(map(int, torch.unravel_index(place, one.shape)))
    return Gap(excess, rtol, largest, scale, at, (one[at].item(), other[at].item()), exact)


def _explained(
    one: RecordedOperation,
    other: RecordedOperation,
    before: Gap,
    block: Any,
    sides: tuple[str, ...],
) -> Divergence:
    """Return why an operation parts the runs, and the line to blame."""
    gap, choice = one.gap, False
    why, blamed = _by_code(one, other, block, sides)
    if not why:
        noise = next((each for each in other.inputs if each.gap and each.gap.noise), None)
        threshold = gap.exact or any(word in one.name for word in _JUMPS)
        choice = gap.choice or (threshold and before.relative > 0)
        if choice:
            why = "a tie: the chosen values agree" if gap.choice else "a number at the threshold"
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


def _by_code(
    one: RecordedOperation, other: RecordedOperation, block: Any, sides: tuple[str, ...]
) -> tuple[str, RecordedOperation]:
    """Return what the code does otherwise on one side, or empty, and the operation to blame."""
    if block:
        ran = [", ".join(dict.fromkeys(each.name for each in run)) or "nothing" for run in block]
        why = f"different operations: {ran[0]} on {sides[0]}, {ran[1]} on {sides[1]}"
        return why, (block[1] or block[0])[0]
    for each in other.inputs:
        if each.empty:
            return f"{other.name} reads memory that nothing has written", each
    rtol, atol = _allowed(torch.float32)
    for a, b in zip(one.numbers, other.numbers, strict=False):
        if not (cmath.isclose(a, b, rel_tol=rtol, abs_tol=atol) or (a != a and b != b)):
            return f"called with {a:.6g} on {sides[0]}, {b:.6g} on {sides[1]}", other
    return "its random numbers differ" * other.random, other
