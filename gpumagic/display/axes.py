"""Scale values of a plot to pixels, and choose which of them are worth a label."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

_MOST = 8


@dataclass(frozen=True)
class Scale:
    """From values, `low` to `high`, to pixels, `start` to `end`: by logarithm, or linear."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high = self._at(self.low), self._at(self.high)
        part = 0.5 if high == low else (self._at(value) - low) / (high - low)
        return self.start + part * (self.end - self.start)

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else value


def ticks(low: float, high: float, most: int = _MOST) -> list[float]:
    """Round values between two positive ones on a logarithmic axis, from coarse to fine.

    Powers of ten where three of them lie between, else 1, 2, 5, else round steps.
    """
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [d * 10.0**k for k in decades for d in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / most)]
    return linear(low, high, 6)


def linear(low: float, high: float, most: int = _MOST) -> list[float]:
    """Round values between two, a round step apart."""
    if high <= low:
        return [low]
    rough = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * d for d in (1, 2, 2.5, 5, 10) if power * d >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


def geometric(values: Sequence[float]) -> bool:
    """Whether each value is the same multiple of the one before."""
    ratios = [b / a for a, b in pairwise(values)]
    return not ratios or max(ratios) <= 1.01 * min(ratios)


def apart(
    values: Sequence[float],
    scale: Callable[[float], float],
    width: Callable[[float], float],
    gap: float = 12.0,
) -> list[float]:
    """Every so many of ascending values, as many as have room for labels of their width."""
    for stride in range(1, max(len(values), 1)):
        # From the end: the largest is what one looks for.
        kept = list(values[::-1][::stride][::-1])
        pairs = pairwise(kept)
        if all(scale(b) - scale(a) >= (width(a) + width(b)) / 2 + gap for a, b in pairs):
            return kept
    return list(values[-1:])


def parted(pixels: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Labels' pixels moved as little as need be, so that each two are `gap` apart.

    They stay between `low` and `high` as far as there is room, in the order given.
    """
    order = sorted(range(len(pixels)), key=lambda n: pixels[n])
    found = [0.0] * len(pixels)
    last = low - gap
    for n in order:
        last = found[n] = max(pixels[n], last + gap)
    last = high + gap
    for n in reversed(order):
        last = found[n] = min(found[n], last - gap)
    return found
