"""Tell from repeats the interval that their median lies in, and their quartiles."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

CONFIDENCE = 0.95
# Fewer repeats than these have no such interval: 2 · 0.5⁵ is more than 5 %.
LEAST = 6


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, whatever the distribution.

    Between the j-th smallest and the j-th largest, where j is the greatest for which a binomial
    variable of n fair tosses is below j with a probability of 2.5 % or less (W. J. Conover,
    Practical Nonparametric Statistics, 3rd edition, section 3.2; J.-Y. Le Boudec, Performance
    Evaluation of Computer and Communication Systems, 2010, theorem 2.1 and its table in appendix A,
    from which the formula for more than 70 is). Of fewer than `LEAST` it is the whole range, which
    covers the median with probability ``1 - 2 ** (1 - n)`` only: 94 % for five, 50 % for two.
    """
    ordered = sorted(seconds)
    rank = _rank(len(ordered))
    return ordered[rank - 1], ordered[-rank]


@lru_cache(maxsize=128)
def _rank(count: int) -> int:
    if count < LEAST:
        return 1
    if count > 70:
        return max(math.floor(0.5 * count - 0.980 * math.sqrt(count)), 1)
    below, rank, limit = 0, 0, (1 - CONFIDENCE) / 2 * 2**count
    while below + math.comb(count, rank) <= limit:
        below += math.comb(count, rank)
        rank += 1
    return rank


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """The first and the third, interpolated as `torch.quantile` and Measurement do."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, third
