"""Draw a sweep as lines in SVG: time over a variable, a curve for each device, no JavaScript.

Curves differ by color, by mark and, if there are many, by dashes; each bears its device's name.
The crossover is marked, and where a device ran out of memory its curve ends in a ✕. Text takes the
page's color, and the curves' colors stand out from white and from black alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from gpumagic.display import svg
from gpumagic.display.svg import Scale
from gpumagic.display.units import fine
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.crossover import Crossover
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view import verdict
from gpumagic.timing.view.verdict import at_point, number, percent, point, shown

# More points than these would be a row of beads.
_FEW = 24
_LINE_HEIGHT = 15.0
# A plot shrinks to this part of its size where there is little room; then one scrolls.
_LEAST = 0.6


class Frame(NamedTuple):
    """The plot's size in pixels, and its margins; on the right the names come on top."""

    width: float = 680.0
    height: float = 320.0
    left: float = 58.0
    right: float = 26.0
    top: float = 26.0
    bottom: float = 42.0


SMALL = Frame(width=300.0, height=230.0)


@dataclass(frozen=True)
class Curve:
    """One device's times along the axis, from left to right."""

    where: str
    look: svg.Look
    known: list[tuple[float, Timing]]  # x and a timing with a median
    # Those that ended in an error, and the last of `known` to their left.
    failed: list[tuple[float, Timing, tuple[float, Timing] | None]]


class Panel:
    """The curves along `Comparison.axis`, at one value of the other variable.

    Values that are no numbers lie one beside the other, and no line leads from one to the next:
    then it is `ordinal`.
    """

    def __init__(self, comparison: Comparison, fixed: Mapping[str, Any]) -> None:
        self.fixed = fixed
        self.name = comparison.axis or ""
        values = comparison.sweep[self.name]
        self.ordinal = not all(type(v) in (int, float) for v in values)
        if self.ordinal:
            self.points = [(float(n), value) for n, value in enumerate(values)]
        else:
            self.points = sorted(((float(v), v) for v in values), key=lambda point: point[0])
        looks = svg.looks(comparison.devices)
        self.curves = [self._curve(comparison, where, look) for where, look in looks.items()]
        self.crossovers: list[Crossover] = verdict.crossovers(comparison, fixed)

    def _curve(self, comparison: Comparison, where: str, look: svg.Look) -> Curve:
        curve = Curve(where, look, [], [])
        for x, value in self.points:
            timing = comparison.at(where, {**self.fixed, self.name: value})
            if timing is not None and timing.median:
                curve.known.append((x, timing))
            elif timing is not None and timing.error not in (None, "interrupted"):
                before = curve.known[-1] if curve.known else None
                curve.failed.append((x, timing, before))
        return curve


def plot(comparison: Comparison, fixed: Mapping[str, Any], frame: Frame | None = None) -> str:
    """An SVG element with the curves of one `Panel`; ``""`` where nothing was measured there."""
    return _Plot(comparison, fixed, frame or Frame()).svg()


class _Plot:
    def __init__(self, comparison: Comparison, fixed: Mapping[str, Any], frame: Frame) -> None:
        self._comparison, self._frame = comparison, frame
        self._panel = Panel(comparison, fixed)
        self._curves = [curve for curve in self._panel.curves if curve.known]
        self._foot = frame.height - frame.bottom
        names = svg.LETTER * max(map(len, comparison.devices), default=0)
        self._end = frame.width - frame.right - names
        # The words that stand in the plot already: (x from, x to, y).
        self._taken: list[tuple[float, float, float]] = []

    def svg(self) -> str:
        if not self._curves:
            return ""
        self._x, self._y = self._scales()
        # The names come before the words that give way to them.
        parts = [self._grid(), self._below(), self._names(), self._crossings()]
        parts += [self._curve(curve) for curve in self._panel.curves]
        f = self._frame
        return (
            f'<svg class="gm-plot" viewBox="0 0 {f.width:g} {f.height:g}" width="{f.width:g}"'
            f' style="min-width:{_LEAST * f.width:.0f}px"'
            f' role="img" aria-label="{escape(self._said())}">'
            f"{''.join(parts)}</svg>"
        )

    def _said(self) -> str:
        """For those who do not see it."""
        ends = [
            f"{c.where} from {fine(c.known[0][1].median)} to {fine(c.known[-1][1].median)}"
            for c in self._curves
        ]
        at = at_point(self._panel.fixed)
        return f"median time over {self._panel.name}{at}: {'; '.join(ends)}"

    def _scales(self) -> tuple[Scale, Scale]:
        f = self._frame
        xs = [x for x, _ in self._panel.points]
        # Of all panels, so that they can be compared.
        timings = self._comparison.timings
        edges = [edge for t in timings for edge in (*(t.quartiles or ()), t.median) if edge]
        low, high = min(edges), max(edges)
        # Air above and below, and around a flat curve.
        air = max((high / low) ** 0.06, 1.08)
        y = Scale(low / air, high * air, self._foot, f.top)
        start, end = f.left + 12, self._end - 12
        if self._panel.ordinal:
            half = (end - start) / len(xs) / 2
            return Scale(xs[0], xs[-1], start + half, end - half, log=False), y
        return Scale(xs[0], xs[-1], start, end, log=xs[0] > 0), y

    def _grid(self) -> str:
        f = self._frame
        lines = [svg.text(f.left - 8, f.top - 11, "time", "end", "gm-dim")]
        self._free(0.0, f.left - 8, 0.0)
        for tick in svg.ticks(self._y.low, self._y.high):
            y = self._y(tick)
            lines.append(svg.line(f.left, y, self._end, y, "gm-grid"))
            lines.append(svg.text(f.left - 8, y + 4, _tick(tick), "end"))
        return "".join(lines)

    def _below(self) -> str:
        """The axis of the variable."""
        f = self._frame
        words = {x: shown(value) for x, value in self._panel.points}
        xs = [x for x, _ in self._panel.points]
        labeled = svg.apart(xs, self._x, lambda x: svg.LETTER * len(words[x]))
        if self._x.log and len(labeled) < len(xs) and not svg.geometric(xs):
            # They are crowded at one end: round ones instead.
            labeled = svg.ticks(self._x.low, self._x.high)
            words = {x: number(x) for x in labeled}
        parts = [svg.line(f.left, self._foot, self._end, self._foot, "gm-axis")]
        for x in labeled:
            at = self._x(x)
            parts.append(svg.line(at, self._foot, at, self._foot + 4, "gm-axis"))
            parts.append(svg.text(at, self._foot + 17, words[x], "middle"))
        middle = (f.left + self._end) / 2
        parts.append(svg.text(middle, f.height - 6, self._panel.name, "middle", "gm-code"))
        return "".join(parts)

    def _crossings(self) -> str:
        """A line down from each crossover, and its value above, where there is room."""
        parts = []
        for c in self._panel.crossovers:
            x, y = self._x(c.at), self._y(c.seconds)
            tip = f"{c.faster} is faster than {c.slower} from {verdict.at(c)}"
            parts.append(
                f'<circle class="gm-ring" cx="{x:.1f}" cy="{y:.1f}" r="6.5">'
                f"<title>{escape(tip)}</title></circle>"
            )
            words = verdict.at(c)
            half = svg.LETTER * len(words) / 2
            # Beside the word above the axis.
            middle = max(x, self._frame.left + half)
            if self._free(middle - half, middle + half, 0.0):
                parts.append(svg.line(x, self._frame.top - 6, x, self._foot, "gm-crossing"))
                parts.append(svg.text(middle, self._frame.top - 11, words, "middle", "gm-this"))
        return "".join(parts)

    def _free(self, start: float, end: float, y: float) -> bool:
        """Whether nothing is written there, and it is taken from now on."""
        for other_start, other_end, other_y in self._taken:
            if start < other_end + 6 and other_start < end + 6 and abs(y - other_y) < _LINE_HEIGHT:
                return False
        self._taken.append((start, end, y))
        return True

    def _curve(self, curve: Curve) -> str:
        look = curve.look
        middle = [(self._x(x), self._y(t.median or 1.0)) for x, t in curve.known]
        parts = []
        if len(middle) > 1 and not self._panel.ordinal:
            upper = [(self._x(x), self._edge(t, 1)) for x, t in curve.known]
            lower = [(self._x(x), self._edge(t, 0)) for x, t in curve.known]
            band = svg.path([*upper, *lower[::-1]])
            dash = f' stroke-dasharray="{look.dash}"' if look.dash else ""
            parts = [
                f'<polygon points="{band}" fill="{look.color}" opacity=".18"/>',
                f'<polyline points="{svg.path(middle)}" stroke="{look.color}"{dash}/>',
            ]
        size = 3.6 if len(middle) <= _FEW else 1.8
        for (x, y), (_, t) in zip(middle, curve.known, strict=True):
            spread = f" · IQR {percent(t.iqr)}" if t.iqr is not None else ""
            tip = f"{curve.where} · {point(t.values)} · {fine(t.median)}{spread}"
            parts.append(svg.mark(look, x, y, size, tip))
        return "".join([*parts, *self._endings(curve)])

    def _edge(self, timing: Timing, n: int) -> float:
        edges = timing.quartiles or (0.0, 0.0)
        return self._y(max(edges[n], self._y.low))

    def _endings(self, curve: Curve) -> Iterator[str]:
        """Where a device failed: a ✕ beside its last time, since there is none to put it at."""
        color = curve.look.color
        for value, t, before in curve.failed:
            x, y, start = self._x(value), self._frame.top + 8, self._frame.left
            if before:
                last, y = self._x(before[0]), self._y(before[1].median or 1.0)
                start = last - 4
                yield (
                    f'<path d="M{last:.1f} {y:.1f}H{x - 6:.1f}" stroke="{color}"'
                    ' stroke-dasharray="1 4" stroke-linecap="round" fill="none"/>'
                )
            words = shown(t.error)
            yield svg.cross(x, y, color, f"{curve.where} · {point(t.values)} · {words}")
            length = svg.LETTER * len(words)
            # Below: time grows with the size, as a rule, and the curve rises from the left.
            start = max(x - length / 2, start)
            if start + length < self._frame.width and self._free(start, start + length, y + 17):
                yield svg.text(start, y + 17, words)

    def _names(self) -> str:
        """Each curve's device, beside its end."""
        ends = [self._y(curve.known[-1][1].median or 1.0) for curve in self._curves]
        heights = svg.parted(ends, _LINE_HEIGHT, self._frame.top + 4, self._foot)
        parts = []
        for curve, y in zip(self._curves, heights, strict=True):
            parts.append(svg.mark(curve.look, self._end + 10, y, 3.6))
            parts.append(svg.text(self._end + 19, y + 4, curve.where))
            self._free(self._end + 5, self._frame.width, y + 4)
        return "".join(parts)


def _tick(seconds: float) -> str:
    """``"10 µs"``, ``"2.5 ms"``, ``"100 s"``."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
