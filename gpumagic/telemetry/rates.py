"""Turn counters into rates by their own time: never negative, never more than can be."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gpumagic.nvml import Field

# A mean over longer than this says nothing of now.
_LONGEST_S = 30.0


@dataclass
class _Before:
    value: float
    at_s: float
    rate: float | None


class Rates:
    """What each counter was before; the clock is for those that do not say when they were read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._before: dict[Hashable, _Before] = {}

    def per_second(self, key: Hashable, field: Field | None, most: float) -> float | None:
        """How fast a counter grows, where ``most`` is the greatest rate that can be.

        None at first, where it wrapped or was reset, and where it may have wrapped unseen.
        """
        if field is None:
            self._before.pop(key, None)
            return None
        at_s = self._clock() if field.at_us is None else field.at_us / 1e6
        before = self._before.get(key)
        if before is not None and at_s == before.at_s:
            return before.rate
        rate = None
        if before is not None:
            passed = at_s - before.at_s
            grown = field.value - before.value
            # 32 bits of bytes are full in a tenth of a second on a fast link.
            wraps = field.narrow and most * passed >= 2**32
            if 0 < passed <= _LONGEST_S and 0 <= grown <= most * passed and not wraps:
                rate = grown / passed
        self._before[key] = _Before(field.value, at_s, rate)
        return rate
