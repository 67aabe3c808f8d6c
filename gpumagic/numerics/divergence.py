"""Compare two recorded runs: align them, and follow their differences through the operations."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import Tensor

from gpumagic.numerics.diff_result import Divergence
from gpumagic.numerics.recorded_run import Operation
from gpumagic.timing.agreement import FLOAT32, numbers_apart, tolerance
from gpumagic.usercode.files import expression, line_at

# An operation of condition number 10 loses a decimal digit (Higham, "Accuracy and Stability of
# Numerical Algorithms", 1.6). What grows less, or exceeds the tolerance less, is rounding.
_DIGIT = 10.0
# Operators that add terms, which may cancel; and those that jump at a threshold.
_SUMS = {"add.Tensor", "sub.Tensor", "sum", "sum.dim_IntList", "mean", "mean.dim"}
_SUMS = {
    f"aten.{name}" for name in (*_SUMS, *(f"native_{n}_norm_backward" for n in ("layer", "batch")))
}
_JUMPS = ("threshold_b", "relu_b", "hardtanh_b", "round", "floor", "ceil", "trunc", "sign")
# Operations that are aligned after the runs part: difflib takes quadratic time.
_ALIGNED = 2_000
# Numbers compared at a time, each as several float64.
_PART = 2**22


@dataclass(frozen=True)
class Gap:
    """The largest difference between two results; infinite if only one is a number."""

    excess: float = 0.0  # in units of the tolerance
    rtol: float = 0.0  # of the loosest dtype on the way here
    largest: float = 0.0
    scale: float = 0.0  # the largest finite magnitude
    at: tuple[int, ...] = ()
    values: tuple[Any, Any] = (0, 0)
    exact: bool = False  # integers or bools
    choice: bool = False  # integers that choose among equal values
    noise: bool = False  # rounding errors of cancelled terms are all that is left

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest magnitude."""
        return self.largest / self.scale if self.scale else self.largest


def divergences(
    first: list[Operation],
    second: list[Operation],
    sides: tuple[str, ...],
    dtypes: list[torch.dtype],
) -> tuple[tuple[Divergence, ...], int, Gap]:
    """Return where two runs part, the number of compared operations, the largest gap of others.

    `dtypes` are those of the sides, if these are no devices.
    """
    base = max((_allowed(each)[0] for each in dtypes), default=0.0)
    found, count, largest = dict[str, Divergence](), 0, Gap()
    for one, other in _aligned(first, second):
        inputs = [*one.inputs, *other.inputs]
        known = [each.gap for each in inputs if each.gap is not None]
        before = max(known, key=lambda gap: gap.excess, default=Gap())
        gap = _gap(one, other, max([base, *(each.rtol for each in known)]))
        block = next((each.block for each in inputs if each.gap is None and each.block), None)
        if gap.excess > 1 and block and one.at:
            # Results of different operations need not be the same; those of the code must be.
            one.block = other.block = block
            continue
        terms = max((each.scale for each in known), default=0.0)
        if one.name in _SUMS and gap.scale <= gap.rtol * terms:
            # It counts where it is used.
            gap = replace(gap, excess=min(gap.excess, 1.0), noise=True)
        one.gap = other.gap = gap
        count += 1
        grew = not block and gap.relative > _DIGIT * before.relative
        if gap.excess <= 1:
            largest = max(largest, gap, key=lambda each: each.excess)
        elif gap.excess > (1 if grew else _DIGIT) and before.excess <= _DIGIT:
            each = _explained(one, other, before, block, sides)
            found.setdefault(each.where, each)  # a loop may repeat it
    return tuple(found.values()), count, largest


def _aligned(
    first: list[Operation], second: list[Operation]
) -> Iterator[tuple[Operation, Operation]]:
    """Yield the operations that both runs have, and give the others their block."""
    keys = [[(each.name, each.shapes) for each in run] for run in (first, second)]
    pairs = enumerate(zip(*keys, strict=False))
    alike = next((n for n, (a, b) in pairs if a != b), min(map(len, keys)))
    yield from zip(first[:alike], second[:alike], strict=True)
    end = alike + _ALIGNED
    matcher = SequenceMatcher(None, keys[0][alike:end], keys[1][alike:end], autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        block = first[alike + a : alike + b], second[alike + c : alike + d]
        if tag == "equal":
            yield from zip(*block, strict=True)
        else:
            for each in (*block[0], *block[1]):
                each.block = block


def _allowed(dtype: torch.dtype) -> tuple[float, float]:
    """Return torch.testing's relative and absolute tolerance of a dtype; 0 for integers."""
    return tolerance(torch.empty(0, dtype=dtype, device="cpu")) or (0.0, 0.0)


def _gap(one: Operation, other: Operation, rtol: float) -> Gap:
    """Return the worst gap of the results; `rtol` is the tolerance of the inputs."""
    pairs = list(zip(one.results, other.results, strict=False))
    if one.rows is not None and other.rows is not None:
        chosen = [other.rows.gather(1, x.results[0].reshape(-1, 1)) for x in (one, other)]
        pairs.append((chosen[0], chosen[1]))
    # An integer beside floats may be a kernel's own workspace.
    gaps = [_difference(*p, rtol) for p in pairs if len(pairs) == 1 or p[0].dtype != torch.uint8]
    one.results, other.results, one.rows, other.rows = [], [], None, None
    worst = max(gaps, key=lambda each: each.excess, default=Gap(rtol=rtol))
    floats = [each.excess for each in gaps if not each.exact]
    return replace(worst, choice=worst.exact and bool(floats) and max(floats) <= 1)


def _difference(one: Tensor, other: Tensor, rtol: float) -> Gap:
    exact = not (one.is_floating_point() or one.is_complex())
    if one.shape != other.shape:
        shapes = tuple(one.shape), tuple(other.shape)
        return Gap(math.inf, rtol, math.inf, values=shapes, exact=exact)
    # A dtype on one device alone excuses no difference.
    own, atol = min(_allowed(one.dtype), _allowed(other.dtype))
    rtol = max(rtol, own)
    kind = torch.complex128 if one.is_complex() else torch.float64
    flat = one.reshape(-1), other.reshape(-1)
    largest, scale, place = 0.0, 0.0, 0
    for start in range(0, one.numel(), _PART):
        x, y = (each[start : start + _PART].to(kind) for each in flat)
        same = (x == y) | (x.isnan() & y.isnan())
        apart = (x - y).abs().nan_to_num(math.inf, math.inf).masked_fill(same, 0)
        scale = max(scale, *(float(z.abs().nan_to_num(0, 0).max()) for z in (x, y)))
        if (most := float(apart.max())) > largest:
            largest, place = most, start + int(apart.argmax())
    if not largest:
        return Gap(rtol=rtol, scale=scale, exact=exact)
    at = tuple(map(int, torch.unravel_index(torch.tensor(place), one.shape)))
    excess = math.inf if exact else largest / (atol + rtol * scale)
    values = flat[0][place].item(), flat[1][place].item()
    return Gap(excess, rtol, largest, scale, at, values, exact)


def _explained(
    one: Operation, other: Operation, before: Gap, block: Any, sides: tuple[str, ...]
) -> Divergence:
    """Return why an operation parts the runs, and the line to blame."""
    gap, blamed, why, choice = one.gap, other, "", one.gap.choice
    empty = next((each for each in other.inputs if each.is_empty), None)
    noise = next((each for each in other.inputs if each.gap and each.gap.noise), None)
    numbers = zip(one.scalars, other.scalars, strict=False)
    if block:
        blamed = (block[1] or block[0])[0]
        ran = [", ".join(dict.fromkeys(each.name for each in run)) or "nothing" for run in block]
        why = f"different operations: {ran[0]} on {sides[0]}, {ran[1]} on {sides[1]}"
    elif empty:
        blamed, why = empty, f"{other.name} reads memory that nothing has written"
    elif odd := next((pair for pair in numbers if _differ(*pair)), None):
        why = f"called with {odd[0]:.6g} on {sides[0]}, {odd[1]:.6g} on {sides[1]}"
    elif other.random:
        why = "its random numbers differ"
    elif choice:
        why = "a tie: the chosen values agree"
    elif before.relative and (gap.exact or any(word in one.name for word in _JUMPS)):
        why, choice = "a number at the threshold", True
    elif noise:
        blamed, gap = noise, noise.gap
        why = "cancellation: rounding errors are all that is left"
    elif gap.relative <= _DIGIT * before.relative:
        why = "small differences add up: no operation adds a digit"
    line = line_at(*blamed.at) if blamed.at else None
    where = f"({blamed.name})"
    if blamed.at and line:
        label = "" if line.label.startswith("<") else f"{line.label}, "
        code = f"{'backward of ' * blamed.backward}`{expression(*blamed.at)}`"
        where = f"{label}line {line.line}: {code} {where}"
    return Divergence(
        where=where,
        line=line.line if line else None,
        why=why,
        largest=gap.largest,
        scale=gap.scale,
        at=gap.at,
        values=tuple(f"{v:.6g}" if isinstance(v, float) else str(v) for v in gap.values),
        inputs=before.relative,
        choice=choice,
    )


def _differ(one: complex, other: complex) -> bool:
    apart, most = numbers_apart(one, other)
    return not apart <= FLOAT32[1] + FLOAT32[0] * most
