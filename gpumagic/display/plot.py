"""Draw curves in SVG, without JavaScript: axes, bands, marks, names, crossings.

Curves differ by color, by mark and, if there are many, by dashes; each is labelled with its name.
Text has the page's color, and the curves' colors are visible on white and on black.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import NamedTuple

# Contrast of at least 3 : 1 against white and #111 (WCAG 2.1, 1.4.11); orange and red are for
# problems. js/src/monitor/overview.ts has the same.
COLORS = ("#2f80ed", "#55a144", "#ba2997", "#8f5c2f", "#c07e9d", "#127a6b", "#685f99", "#a876f2")
_CPU = "#7d8590"
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_MARKS = ("square", "triangle", "diamond", "circle")
LETTER = 6.3
"""Pixels, about, of a letter of 11 px."""


class Look(NamedTuple):
    """The color, mark and dashes of a device."""

    color: str
    dash: str
    mark: str


def looks(devices: Sequence[str]) -> dict[str, Look]:
    """Return each device's look: gray for the CPU, by number for GPUs, the same in all plots."""
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
    """Return a device's mark at a point, with its tooltip."""
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
    """Return a ✕ where a curve ended with an error."""
    return (
        f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="2.2"'
        f' fill="none"><title>{escape(tip)}</title></path>'
    )


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    """Return escaped text; `anchor` as in SVG."""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """Return a straight line."""
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]]) -> str:
    """Return points in SVG's format."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


@dataclass(frozen=True)
class Scale:
    """A map from values `low` to `high` to pixels `start` to `end`, logarithmic or linear."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        low, high = self._at(self.low), self._at(self.high)
        part = 0.5 if high == low else (self._at(value) - low) / (high - low)
        return self.start + part * (self.end - self.start)

    def _at(self, value: float) -> float:
        return math.log10(value) if self.log else value


def ticks(low: float, high: float) -> list[float]:
    """Return round values between two positive ones, for a logarithmic axis.

    Powers of ten if at least three fit, else 1 and 3, else 1, 2, 5, else even steps.
    """
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [d * 10.0**k for k in decades for d in digits]
        found = [value for value in found if low <= value <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / 8)]
    return even_ticks(low, high)


def even_ticks(low: float, high: float) -> list[float]:
    """Return about six round values between two, with a round step."""
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
    """Pick evenly spaced ticks, as many as the labels' width allows."""
    for stride in range(1, max(len(values), 1)):
        # From the end, so that the largest is labelled.
        kept = list(values[::-1][::stride][::-1])
        pairs = pairwise(kept)
        if all(scale(b) - scale(a) >= (width(a) + width(b)) / 2 + gap for a, b in pairs):
            return kept
    return list(values[-1:])


def parted(pixels: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels' pixels as little as possible, so that they are `gap` apart.

    They keep their order, and stay between `low` and `high` if there is room.
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


# More points than these get no marks.
_FEW = 24
_LINE_HEIGHT = 15.0
# Margins; names need more on the right.
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 26.0, 26.0, 42.0
# A plot shrinks to this part of its size; below that it scrolls.
_LEAST = 0.6


class Frame(NamedTuple):
    """A plot's size in pixels."""

    width: float = 680.0
    height: float = 320.0


class Point(NamedTuple):
    """A point of a curve; the band is from `low` to `high`."""

    x: float
    y: float
    low: float
    high: float
    tip: str  # tooltip


class Ending(NamedTuple):
    """A missing value with its reason; `last` is the nearest point to its left."""

    x: float
    words: str
    tip: str
    last: Point | None


class Crossing(NamedTuple):
    """The crossing of two curves."""

    x: float
    y: float
    words: str
    tip: str


class Curve(NamedTuple):
    """A curve, from left to right."""

    name: str
    look: Look
    points: Sequence[Point]
    endings: Sequence[Ending]


class Plot:
    """Curves in a frame; a label is left out where another one already stands.

    `words` are the labels of the values of x, in ascending order. If x has no numbers the plot is
    `ordinal`: values are evenly spaced and not connected. Axes are logarithmic.
    """

    def __init__(
        self,
        frame: Frame,
        words: Mapping[float, str],
        curves: Sequence[Curve],
        *,
        ordinal: bool,
    ) -> None:
        self._frame, self._words, self._ordinal = frame, words, ordinal
        self._curves = curves
        self._foot = frame.height - _BOTTOM
        self._end = frame.width - _RIGHT - LETTER * max(len(c.name) for c in curves)
        heights = [e for c in curves for p in c.points for e in (p.y, p.low, p.high) if e]
        low, high = min(heights), max(heights)
        # Space above and below, and around a flat curve.
        air = max((high / low) ** 0.06, 1.08)
        self._y = Scale(low / air, high * air, self._foot, _TOP)
        xs, start, end = list(words), _LEFT + 12, self._end - 12
        half = (end - start) / len(xs) / 2 if ordinal else 0.0
        log = xs[0] > 0 and not ordinal
        self._x = Scale(xs[0], xs[-1], start + half, end - half, log)
        # The placed labels: (x from, x to, y).
        self._taken: list[tuple[float, float, float]] = []

    def svg(
        self,
        name: str,
        tick: Callable[[float], str],
        crossings: Iterable[Crossing],
        label: str,
    ) -> str:
        """Return the SVG element: `name` is the variable's, `label` is for screen readers."""
        f = self._frame
        # Names come first, since other labels give way to them.
        parts = [*self._grid(tick), *self._below(name), *self._names()]
        parts += [part for crossing in crossings for part in self._crossing(crossing)]
        parts += [part for curve in self._curves for part in self._curve(curve)]
        return (
            f'<svg class="gm-plot" viewBox="0 0 {f.width:g} {f.height:g}" width="{f.width:g}"'
            f' style="min-width:{_LEAST * f.width:.0f}px"'
            f' role="img" aria-label="{escape(label)}">'
            f"{''.join(parts)}</svg>"
        )

    def _grid(self, tick: Callable[[float], str]) -> Iterator[str]:
        yield text(_LEFT - 8, _TOP - 11, "time", "end", "gm-dim")
        self._free(0.0, _LEFT - 8, 0.0)
        for value in ticks(self._y.low, self._y.high):
            y = self._y(value)
            yield line(_LEFT, y, self._end, y, "gm-grid")
            yield text(_LEFT - 8, y + 4, tick(value), "end")

    def _below(self, name: str) -> Iterator[str]:
        """Return the axis of the variable."""
        f, words = self._frame, self._words
        yield line(_LEFT, self._foot, self._end, self._foot, "gm-axis")
        for x in apart(list(words), self._x, lambda x: LETTER * len(words[x])):
            at = self._x(x)
            yield line(at, self._foot, at, self._foot + 4, "gm-axis")
            yield text(at, self._foot + 17, words[x], "middle")
        yield text((_LEFT + self._end) / 2, f.height - 6, name, "middle", "gm-code")

    def _names(self) -> Iterator[str]:
        """Return each curve's name, at its end."""
        ending = [curve for curve in self._curves if curve.points]
        ends = [self._y(curve.points[-1].y) for curve in ending]
        heights = parted(ends, _LINE_HEIGHT, _TOP + 4, self._foot)
        for curve, y in zip(ending, heights, strict=True):
            yield mark(curve.look, self._end + 10, y, 3.6)
            yield text(self._end + 19, y + 4, curve.name)
            self._free(self._end + 5, self._frame.width, y + 4)

    def _crossing(self, crossing: Crossing) -> Iterator[str]:
        """Return a ring, and a line to its value above if there is room."""
        x, y, words = self._x(crossing.x), self._y(crossing.y), crossing.words
        yield (
            f'<circle class="gm-ring" cx="{x:.1f}" cy="{y:.1f}" r="6.5">'
            f"<title>{escape(crossing.tip)}</title></circle>"
        )
        half = LETTER * len(words) / 2
        # Next to the word above the axis.
        middle = max(x, _LEFT + half)
        if self._free(middle - half, middle + half, 0.0):
            yield line(x, _TOP - 6, x, self._foot, "gm-crossing")
            yield text(middle, _TOP - 11, words, "middle", "gm-this")

    def _free(self, start: float, end: float, y: float) -> bool:
        """Whether a place is free; if so, reserve it."""
        for other_start, other_end, other_y in self._taken:
            if start < other_end + 6 and other_start < end + 6 and abs(y - other_y) < _LINE_HEIGHT:
                return False
        self._taken.append((start, end, y))
        return True

    def _curve(self, curve: Curve) -> Iterator[str]:
        look, least = curve.look, self._y.low
        middle = [(self._x(p.x), self._y(p.y)) for p in curve.points]
        if len(middle) > 1 and not self._ordinal:
            upper = [(self._x(p.x), self._y(max(p.high, least))) for p in curve.points]
            lower = [(self._x(p.x), self._y(max(p.low, least))) for p in curve.points]
            band = path([*upper, *lower[::-1]])
            dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
            yield f'<polygon points="{band}" fill="{look.color}" opacity=".18"/>'
            yield f'<polyline points="{path(middle)}" stroke="{look.color}"{dash}/>'
        size = 3.6 if len(middle) <= _FEW else 1.8
        for (x, y), point in zip(middle, curve.points, strict=True):
            yield mark(look, x, y, size, point.tip)
        for ending in curve.endings:
            yield from self._ending(ending, look.color)

    def _ending(self, ending: Ending, color: str) -> Iterator[str]:
        """Return a ✕ next to the curve's last value."""
        x, y, start = self._x(ending.x), _TOP + 8, _LEFT
        if ending.last:
            last, y = self._x(ending.last.x), self._y(ending.last.y)
            start = last - 4
            yield (
                f'<path d="M{last:.1f} {y:.1f}H{x - 6:.1f}" stroke="{color}"'
                ' stroke-dasharray="1 4" stroke-linecap="round" fill="none"/>'
            )
        yield cross(x, y, color, ending.tip)
        length = LETTER * len(ending.words)
        # Below, since the curve mostly rises from the left.
        start = max(x - length / 2, start)
        if start + length < self._frame.width and self._free(start, start + length, y + 17):
            yield text(start, y + 17, ending.words)
