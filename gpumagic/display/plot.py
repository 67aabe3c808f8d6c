"""Draw curves over a variable in SVG, without JavaScript: axes, bands, marks, names, crossings.

Curves differ by color, by mark and, if there are many, by dashes; each bears its name. Text takes
the page's color, and the curves' colors stand out from white and from black alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

from gpumagic.display import svg

# More points than these would be a row of beads.
_FEW = 24
_LINE_HEIGHT = 15.0
# Margins; on the right the names come on top.
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 26.0, 26.0, 42.0
# A plot shrinks to this part of its size where there is little room; then one scrolls.
_LEAST = 0.6


class Frame(NamedTuple):
    """A plot's size in pixels."""

    width: float = 680.0
    height: float = 320.0


SMALL = Frame(300.0, 230.0)


class Point(NamedTuple):
    """Of a curve; the band around it is from `low` to `high`."""

    x: float
    y: float
    low: float
    high: float
    tip: str  # is said when one points at it


class Ending(NamedTuple):
    """Where a curve has no value, for a reason; `last` is the point to its left that has one."""

    x: float
    words: str
    tip: str
    last: Point | None


class Crossing(NamedTuple):
    """Where two curves cross."""

    x: float
    y: float
    words: str
    tip: str


class Curve(NamedTuple):
    """From left to right."""

    name: str
    look: svg.Look
    points: Sequence[Point]
    endings: Sequence[Ending]


class Plot:
    """Curves in a frame; words give way to those that stand there already.

    `words` spell each value of x, in ascending order. If these are no numbers they lie one beside
    the other, and no line leads from one to the next: then it is `ordinal`. Both axes are by
    logarithm, or `linear`, heights then from zero on.
    """

    def __init__(
        self,
        frame: Frame,
        words: Mapping[float, str],
        heights: Iterable[float],
        curves: Sequence[Curve],
        *,
        ordinal: bool,
        quantity: str = "time",
        linear: bool = False,
    ) -> None:
        self._frame, self._words, self._ordinal = frame, words, ordinal
        self._curves, self._quantity = curves, quantity
        self._foot = frame.height - _BOTTOM
        self._end = frame.width - _RIGHT - svg.LETTER * max(len(c.name) for c in curves)
        low, high = min(heights := list(heights)), max(heights)
        # Air above and below, and around a flat curve.
        air = max((high / low) ** 0.06, 1.08)
        foot, top = (0.0, 1.05 * high) if linear else (low / air, high * air)
        self._y = svg.Scale(foot, top, self._foot, _TOP, not linear)
        self._ticks = svg.even_ticks if linear else svg.ticks
        xs, start, end = list(words), _LEFT + 12, self._end - 12
        half = (end - start) / len(xs) / 2 if ordinal else 0.0
        log = xs[0] > 0 and not ordinal and not linear
        self._x = svg.Scale(xs[0], xs[-1], start + half, end - half, log)
        # The words that stand in the plot: (x from, x to, y).
        self._taken: list[tuple[float, float, float]] = []

    def svg(
        self,
        name: str,
        tick: Callable[[float], str],
        crossings: Iterable[Crossing],
        label: str,
    ) -> str:
        """The element: `name` is the variable's, `label` is for those who do not see it."""
        f = self._frame
        # The names come before the words that give way to them.
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
        yield svg.text(_LEFT - 8, _TOP - 11, self._quantity, "end", "gm-dim")
        self._free(0.0, _LEFT - 8, 0.0)
        for value in self._ticks(self._y.low, self._y.high):
            y = self._y(value)
            yield svg.line(_LEFT, y, self._end, y, "gm-grid")
            yield svg.text(_LEFT - 8, y + 4, tick(value), "end")

    def _below(self, name: str) -> Iterator[str]:
        """The axis of the variable."""
        f, words = self._frame, self._words
        yield svg.line(_LEFT, self._foot, self._end, self._foot, "gm-axis")
        for x in svg.apart(list(words), self._x, lambda x: svg.LETTER * len(words[x])):
            at = self._x(x)
            yield svg.line(at, self._foot, at, self._foot + 4, "gm-axis")
            yield svg.text(at, self._foot + 17, words[x], "middle")
        yield svg.text((_LEFT + self._end) / 2, f.height - 6, name, "middle", "gm-code")

    def _names(self) -> Iterator[str]:
        """Each curve's name, beside its end."""
        ending = [curve for curve in self._curves if curve.points]
        ends = [self._y(curve.points[-1].y) for curve in ending]
        heights = svg.parted(ends, _LINE_HEIGHT, _TOP + 4, self._foot)
        for curve, y in zip(ending, heights, strict=True):
            yield svg.mark(curve.look, self._end + 10, y, 3.6)
            yield svg.text(self._end + 19, y + 4, curve.name)
            self._free(self._end + 5, self._frame.width, y + 4)

    def _crossing(self, crossing: Crossing) -> Iterator[str]:
        """A ring, and a line down from its value above, where there is room."""
        x, y, words = self._x(crossing.x), self._y(crossing.y), crossing.words
        yield (
            f'<circle class="gm-ring" cx="{x:.1f}" cy="{y:.1f}" r="6.5">'
            f"<title>{escape(crossing.tip)}</title></circle>"
        )
        half = svg.LETTER * len(words) / 2
        # Beside the word above the axis.
        middle = max(x, _LEFT + half)
        if self._free(middle - half, middle + half, 0.0):
            yield svg.line(x, _TOP - 6, x, self._foot, "gm-crossing")
            yield svg.text(middle, _TOP - 11, words, "middle", "gm-this")

    def _free(self, start: float, end: float, y: float) -> bool:
        """Whether nothing is written there, and it is taken from now on."""
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
            band = svg.path([*upper, *lower[::-1]])
            dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
            yield f'<polygon points="{band}" fill="{look.color}" opacity=".18"/>'
            yield f'<polyline points="{svg.path(middle)}" stroke="{look.color}"{dash}/>'
        size = 3.6 if len(middle) <= _FEW else 1.8
        for (x, y), point in zip(middle, curve.points, strict=True):
            yield svg.mark(look, x, y, size, point.tip)
        for ending in curve.endings:
            yield from self._ending(ending, look.color)

    def _ending(self, ending: Ending, color: str) -> Iterator[str]:
        """A ✕ beside the curve's last value, since there is none to put it at."""
        x, y, start = self._x(ending.x), _TOP + 8, _LEFT
        if ending.last:
            last, y = self._x(ending.last.x), self._y(ending.last.y)
            start = last - 4
            yield (
                f'<path d="M{last:.1f} {y:.1f}H{x - 6:.1f}" stroke="{color}"'
                ' stroke-dasharray="1 4" stroke-linecap="round" fill="none"/>'
            )
        yield svg.cross(x, y, color, ending.tip)
        length = svg.LETTER * len(ending.words)
        # Below: time grows with the size, as a rule, and the curve rises from the left.
        start = max(x - length / 2, start)
        if start + length < self._frame.width and self._free(start, start + length, y + 17):
            yield svg.text(start, y + 17, ending.words)
