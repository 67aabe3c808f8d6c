"""Find the largest value that stays within a limit, in few questions."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence


def largest(
    values: Sequence[float],
    need: Callable[[float], float],
    limit: float,
    *,
    from_below: bool = False,
) -> float | None:
    """The largest of ascending `values` that needs no more than `limit`; None if none does.

    What is needed never falls as the value grows, and may be infinite. Where it is affine four
    questions are enough. `from_below` asks for no value that is more than twice one that was within
    the limit.
    """
    low, high = 0, len(values) - 1
    if need(values[low]) > limit:
        return None
    if from_below:
        low, high = _doubled(values, need, limit)
    if low == high or need(values[high]) <= limit:
        return values[high]
    sides: list[bool] = []
    while high - low > 1:
        # A line that is met from the same side again and again comes closer only slowly.
        slow = len(sides) > 1 and sides[-1] == sides[-2] and len(sides) % 2 == 0
        middle = _middle(values, low, high)
        if not slow:
            middle = _on_the_line(values, low, high, need, limit)
        sides.append(need(values[middle]) <= limit)
        low, high = (middle, high) if sides[-1] else (low, middle)
    return values[low]


def _doubled(
    values: Sequence[float], need: Callable[[float], float], limit: float
) -> tuple[int, int]:
    """Two places, the first of them within the limit: the second is not, or it is the last one."""
    low = 0
    while low < len(values) - 1:
        high = max(bisect_right(values, 2 * values[low]) - 1, low + 1)
        if need(values[high]) > limit:
            return low, high
        low = high
    return low, low


def _on_the_line(
    values: Sequence[float],
    low: int,
    high: int,
    need: Callable[[float], float],
    limit: float,
) -> int:
    """The place between two where a line through both meets the limit."""
    at_low, at_high = need(values[low]), need(values[high])
    if math.isinf(at_high) or at_high <= at_low:
        return _middle(values, low, high)
    part = (limit - at_low) / (at_high - at_low)
    value = values[low] + part * (values[high] - values[low])
    return min(max(bisect_right(values, value) - 1, low + 1), high - 1)


def _middle(values: Sequence[float], low: int, high: int) -> int:
    """The place in the middle of two: by their ratio, for a value may be many times the other."""
    value = math.sqrt(values[low] * values[high]) if values[low] > 0 else 0.0
    at = bisect_right(values, value) - 1 if values[high] > 4 * values[low] else (low + high) // 2
    return min(max(at, low + 1), high - 1)
