"""Draw the pieces of plots in SVG, scale values to its pixels, and choose those worth a label."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

# Contrast of 3 : 1 and more against both white and #111 (WCAG 2.1, 1.4.11); orange and red are for
# trouble. js/src/monitor/overview.ts has the same.
COLORS = ("#2f80ed", "#55a144", "#ba2997", "#8f5c2f", "#c07e9d", "#127a6b", "#685f99", "#a876f2")
_CPU = "#7d8590"
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_MARKS = ("square", "triangle", "diamond", "circle")
LETTER = 6.3
"""Pixels, about, of a letter of 11 px."""


class Look(NamedTuple):
    """What a device looks like, in a plot and as a bar."""

    color: str
    dash: str
    mark: str


def looks(devices: Sequence[str]) -> dict[str, Look]:
    """Of each device: the CPU gray, a GPU's by its number, so that it has one in every picture."""
    found: dict[str, Look] = {}
    named = {where: int(where[5:]) for where in devices if re.fullmatch(r"cuda:\d+", where)}
    free = max(named.values(), default=-1) + 1
    others = (where for where in devices if where != "cpu" and where not in named)
    for where, n in (named | {where: free + n for n, where in enumerate(others)}).items():
        dash = _DASHES[n // len(COLORS) % len(_DASHES)]
        found[where] = Look(COLORS[n % len(COLORS)], dash, _MARKS[n % len(_MARKS)])
    found["cpu"] = Look(_CPU, "", "circle")
    return {where: found[where] for where in devices}


def mark(look: Look, x: float, y: float, size: float, tip: str = "") -> str:
    """A device's mark around a point, with what is said when one points at it."""
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"',
        "square": f'<path d="M{x - 0.9 * size:.1f} {y - 0.9 * size:.1f}'
        f'h{1.8 * size:.1f}v{1.8 * size:.1f}h{-1.8 * size:.1f}z"',
        "triangle": f'<path d="M{x:.1f} {y - 1.25 * size:.1f}'
        f'l{1.2 * size:.1f} {2.1 * size:.1f}h{-2.4 * size:.1f}z"',
        "diamond": f'<path d="M{x:.1f} {y - 1.35 * size:.1f}l{1.35 * size:.1f} {1.35 * size:.1f}'
        f'{-1.35 * size:.1f} {1.35 * size:.1f}{-1.35 * size:.1f} {-1.35 * size:.1f}z"',
    }
    title = f"<title>{escape(tip)}</title>" if tip else ""
    end = "</circle>" if look.mark == "circle" else "</path>"
    return f'{shapes[look.mark]} fill="{look.color}">{title}{end}'


def cross(x: float, y: float, color: str, tip: str) -> str:
    """A ✕ where a curve ended for want of something."""
    return (
        f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="2.2"'
        f' fill="none"><title>{escape(tip)}</title></path>'
    )


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    """Words, escaped; `anchor` as of SVG."""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]]) -> str:
    """Points as SVG has them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


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


def ticks(low: float, high: float) -> list[float]:
    """Round values between two positive ones on a logarithmic axis, from coarse to fine.

    Powers of ten where three of them lie between, else 1 and 3, else 1, 2, 5, else round steps.
    """
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [d * 10.0**k for k in decades for d in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / 8)]
    return even_ticks(low, high)


def even_ticks(low: float, high: float) -> list[float]:
    """About six round values between two, a round step apart."""
    if high <= low:
        return [low]
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * d for d in (1, 2, 2.5, 5, 10) if power * d >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


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
