"""Draw curves as SVG without JavaScript, and mark the points where curves cross."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import NamedTuple

from gpumagic.display.units import tick

# Contrast with white and with #111 is at least 3 : 1 (WCAG 2.1, 1.4.11). No color is orange or red,
# because orange and red mark problems. js/src/monitor/overview.ts has the same colors.
COLORS = ("#2f80ed", "#55a144", "#ba2997", "#8f5c2f", "#c07e9d", "#127a6b", "#685f99", "#a876f2")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
LETTER = 6.3  # average width of a letter in pixels, for a font of 11 px


class Look(NamedTuple):
    """The color and dashes of a device's curve."""

    color: str
    dash: str


def looks(devices: Sequence[str]) -> dict[str, Look]:
    """Return each device's color and dashes. ``cuda:1`` looks the same in all plots."""
    numbers = {where: int(where[5:]) for where in devices if re.fullmatch(r"cuda:\d+", where)}
    others = [where for where in devices if where != "cpu" and where not in numbers]
    numbers |= zip(others, count(max(numbers.values(), default=-1) + 1))
    found = {"cpu": Look("#7d8590", "")}
    for where, n in numbers.items():
        dash = _DASHES[(n + n // len(COLORS)) % len(_DASHES)]
        found[where] = Look(COLORS[n % len(COLORS)], dash)
    return {where: found[where] for where in devices}


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    """Return an SVG element with escaped `words`; `anchor` is the element's text-anchor."""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _dot(x: float, y: float, r: float, style: str, tip: str = "") -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="{r:g}">{title}</circle>'


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


@dataclass(frozen=True)
class Scale:
    """Map values in [`low`, `high`] to pixels in [`start`, `end`], on a log or linear axis."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        low, high, at = map(math.log10 if self.log else float, (self.low, self.high, value))
        share = 0.5 if high == low else (at - low) / (high - low)
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float) -> list[float]:
    """Return round ticks for a log axis: powers of ten, and ticks between them if they are few."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5)):
        found = [d * 10.0**k for k in decades for d in digits if low <= d * 10.0**k <= high]
        if len(found) >= 3:
            return found[:: math.ceil(len(found) / 8)]
    return even_ticks(low, high)


def even_ticks(low: float, high: float) -> list[float]:
    """Return about six round values between `low` and `high`, with a round step."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * d for d in (1, 2, 2.5, 5, 10) if power * d >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]


_WIDTH, _HEIGHT = 680.0, 320.0
# Margins; the right margin is extended by the width of the longest curve name.
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 26.0, 26.0, 42.0
FOOT = _HEIGHT - _BOTTOM
_LINE_HEIGHT = 15.0
_LEAST = 0.6 * _WIDTH  # minimum width of a plot; on a narrower page the plot scrolls
_FEW = 24  # with more points, a curve has smaller dots


class Point(NamedTuple):
    """A curve's point or missing value, or a crossing of two curves."""

    x: float
    y: float | None  # None for a missing value
    tip: str  # tooltip
    words: str = ""  # label below a missing value or above a crossing
    low: float = 0.0  # lower edge of the band around the curve
    high: float = 0.0  # upper edge of the band


class Curve(NamedTuple):
    """A curve; its points are in order from left to right."""

    name: str
    look: Look
    points: Sequence[Point]

    @property
    def heights(self) -> list[float]:
        return [point.y for point in self.points if point.y is not None]


class Plot:
    """Draw curves with axes. `words` maps ascending x values to labels."""

    def __init__(self, words: Mapping[float, str], curves: Sequence[Curve]) -> None:
        self._words, self._curves = words, curves
        self._end = _WIDTH - _RIGHT - LETTER * max(len(c.name) for c in curves)
        heights = [e for c in curves for p in c.points for e in (p.y, p.low, p.high) if e]
        low, high = min(heights), max(heights)
        air = max((high / low) ** 0.06, 1.08)  # space above and below the curves, even if flat
        self._y = Scale(low / air, high * air, FOOT, _TOP)
        first, last = min(words), max(words)
        self._x = Scale(first, last, _LEFT + 12, self._end - 12, log=first > 0)
        self._taken: list[tuple[float, float, float]] = []  # drawn labels: left x, right x, y

    def svg(self, name: str, crossings: Iterable[Point], label: str) -> str:
        """Return the SVG element. `name` labels the x axis, and `label` is for screen readers."""
        # Draw the curves' names before the crossings, so that names get room first.
        parts = [*self._axes(name), *self._names()]
        parts += [part for crossing in crossings for part in self._crossing(crossing)]
        parts += [part for curve in self._curves for part in self._curve(curve)]
        return (
            f'<svg class="gm-plot" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" width="{_WIDTH:g}"'
            f' style="min-width:{_LEAST:.0f}px" role="img" aria-label="{escape(label)}">'
            f"{''.join(parts)}</svg>"
        )

    def _axes(self, name: str) -> Iterator[str]:
        yield text(_LEFT - 8, _TOP - 11, "time", "end", "gm-dim")
        self._reserve(0.0, _LEFT - 8, 0.0)
        for value in ticks(self._y.low, self._y.high):
            y = self._y(value)
            yield line(_LEFT, y, self._end, y, "gm-grid")
            yield text(_LEFT - 8, y + 4, tick(value), "end")
        yield line(_LEFT, FOOT, self._end, FOOT, "gm-axis")
        for value, words in reversed([*self._words.items()]):  # so that the last label has room
            x, half = self._x(value), LETTER * len(words) / 2
            if self._reserve(x - half, x + half, FOOT + 17):
                yield line(x, FOOT, x, FOOT + 4, "gm-axis")
                yield text(x, FOOT + 17, words, "middle")
        yield text((_LEFT + self._end) / 2, _HEIGHT - 6, name, "middle", "gm-code")

    def _names(self) -> Iterator[str]:
        """Yield each curve's name at the right end of the curve, or higher to avoid other names."""
        named = [curve for curve in self._curves if curve.heights]
        for curve in sorted(named, key=lambda curve: curve.heights[-1]):
            y = self._y(curve.heights[-1])
            while not self._reserve(self._end + 5, _WIDTH, y + 4):
                y -= 1
            yield _dot(self._end + 10, y, 3.6, f'fill="{curve.look.color}"')
            yield text(self._end + 19, y + 4, curve.name)

    def _crossing(self, crossing: Point) -> Iterator[str]:
        """Yield a ring at the crossing; if there is room, also a vertical line with a label."""
        x, half = self._x(crossing.x), LETTER * len(crossing.words) / 2
        yield _dot(x, self._y(crossing.y or 0.0), 6.5, 'class="gm-ring"', crossing.tip)
        middle = max(x, _LEFT + half)  # keep clear of the word "time" at the upper left
        if self._reserve(middle - half, middle + half, 0.0):
            yield line(x, _TOP - 6, x, FOOT, "gm-crossing")
            yield text(middle, _TOP - 11, crossing.words, "middle", "gm-this")

    def _reserve(self, start: float, end: float, y: float) -> bool:
        """Reserve room for a label; return False if there is none."""
        for other_start, other_end, other_y in self._taken:
            if start < other_end + 6 and other_start < end + 6 and abs(y - other_y) < _LINE_HEIGHT:
                return False
        self._taken.append((start, end, y))
        return True

    def _curve(self, curve: Curve) -> Iterator[str]:
        color, least = curve.look.color, self._y.low
        known = [point for point in curve.points if point.y is not None]
        middle = [(self._x(p.x), self._y(y)) for p, y in zip(known, curve.heights, strict=True)]
        if len(known) > 1:
            upper = [(self._x(p.x), self._y(max(p.high, least))) for p in known]
            lower = [(self._x(p.x), self._y(max(p.low, least))) for p in known]
            band, dash = _path([*upper, *lower[::-1]]), f'stroke-dasharray="{curve.look.dash}"'
            yield f'<polygon points="{band}" fill="{color}" opacity=".18"/>'
            yield f'<polyline points="{_path(middle)}" stroke="{color}" {dash}/>'
        for (x, y), point in zip(middle, known, strict=True):
            yield _dot(x, y, 3.6 if len(known) <= _FEW else 1.8, f'fill="{color}"', point.tip)
        for point in curve.points:
            if point.y is None:
                before = [y for x, y in middle if x < self._x(point.x)]
                yield from self._missing(point, before, color)

    def _missing(self, point: Point, before: Sequence[float], color: str) -> Iterator[str]:
        """Yield a ✕ at the last y in `before` (earlier points), and a label below if it fits."""
        x, y, half = self._x(point.x), [_TOP + 8, *before][-1], LETTER * len(point.words) / 2
        yield (
            f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="2.2"'
            f' fill="none"><title>{escape(point.tip)}</title></path>'
        )
        start = max(x - half, _LEFT)
        if start + 2 * half < _WIDTH and self._reserve(start, start + 2 * half, y + 17):
            yield text(start, y + 17, point.words)
