"""Find where two curves of a sweep cross: the value from which on another device is faster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from gpumagic.timing.result.timing import Timing

_Known = tuple[float, Timing, Timing]


@dataclass(frozen=True)
class Crossover:
    """From here on another device is the faster one; `seconds` is what both take there."""

    faster: str
    slower: str
    variable: str
    at: float
    seconds: float
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's other variable


def flips(
    xs: Sequence[float], a: Sequence[Timing | None], b: Sequence[Timing | None]
) -> list[tuple[float, float, int]]:
    """Where the order of two curves flips beyond both spreads: x, seconds, and who is faster then.

    It is 0 for `a` and 1 for `b`; None, and a timing without `seconds`, is a gap. Between two
    ascending x lies a line in log-log, or a straight one where some x is not positive.
    """
    known = [
        (x, first, second)
        for x, first, second in zip(xs, a, b, strict=True)
        if first is not None and second is not None and first.median and second.median
    ]
    decided = [
        (n, int(_ratio(first, second) > 0))
        for n, (_, first, second) in enumerate(known)
        if first.differs(second)
    ]
    log = all(x > 0 for x in xs)
    return [
        (*_cross(known[before : after + 1], now, log), now)
        for (before, then), (after, now) in pairwise(decided)
        if then != now
    ]


def _ratio(a: Timing, b: Timing) -> float:
    """How much slower `a` is, as a logarithm."""
    return math.log((a.median or 1.0) / (b.median or 1.0))


def _cross(known: Sequence[_Known], now: int, log: bool) -> tuple[float, float]:
    """The last meeting of two lines through points, of which the ends are ordered differently."""
    for (x0, a0, b0), (x1, a1, b1) in reversed(list(pairwise(known))):
        was, is_ = _ratio(a0, b0), _ratio(a1, b1)
        # Beyond it `a` is the faster for now == 0.
        if (was >= 0 > is_) if now == 0 else (was <= 0 < is_):
            part = was / (was - is_)
            x = x0 * (x1 / x0) ** part if log else x0 + (x1 - x0) * part
            return x, (a0.median or 1.0) * math.exp(_ratio(a1, a0) * part)
    x, a, b = known[-1]
    return x, math.sqrt((a.median or 1.0) * (b.median or 1.0))
