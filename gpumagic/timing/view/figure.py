"""Gather a sweep's curves, and draw them in SVG."""

from collections.abc import Mapping
from typing import Any

from gpumagic.display import plot
from gpumagic.display.plot import Crossing, Curve, Ending, Frame, Plot, Point
from gpumagic.display.units import fine, tick
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.view import verdict
from gpumagic.timing.view.verdict import at_point, percent, point, spelled


class Panel:
    """The curves along `Comparison.axis`, at one value of the other variable."""

    def __init__(self, comparison: Comparison, fixed: Mapping[str, Any]) -> None:
        self.fixed = fixed
        self.name = comparison.axis or ""
        values = comparison.sweep[self.name]
        self.ordinal = not all(type(v) in (int, float) for v in values)
        if self.ordinal:
            self.values = [(float(n), value) for n, value in enumerate(values)]
        else:
            self.values = sorted(((float(v), v) for v in values), key=lambda pair: pair[0])
        looks = plot.looks(comparison.devices)
        self.curves = [self._curve(comparison, where, look) for where, look in looks.items()]
        self.crossings = []
        for c in verdict.crossovers(comparison, fixed):
            words = verdict.at(c)
            tip = f"{c.faster} is faster than {c.slower} from {words}"
            self.crossings.append(Crossing(c.at, c.seconds, words, tip))

    def _curve(self, comparison: Comparison, where: str, look: plot.Look) -> Curve:
        points: list[Point] = []
        endings: list[Ending] = []
        for x, value in self.values:
            timing = comparison.at(where, {**self.fixed, self.name: value})
            if timing is None:
                continue
            tip = f"{where} · {point(timing.values)}"
            if timing.median:
                low, high = timing.quartiles or (0.0, 0.0)
                spread = f" · IQR {percent(timing.iqr)}" if timing.iqr is not None else ""
                tip = f"{tip} · {fine(timing.median)}{spread}"
                points.append(Point(x, timing.median, low, high, tip))
            elif timing.error not in (None, "interrupted"):
                words = spelled(timing.error)
                last = points[-1] if points else None
                endings.append(Ending(x, words, f"{tip} · {words}", last))
        return Curve(where, look, points, endings)


def drawn(comparison: Comparison, fixed: Mapping[str, Any], frame: Frame | None = None) -> str:
    """An SVG element with the curves of one `Panel`; ``""`` where nothing was measured there."""
    panel = Panel(comparison, fixed)
    ends = [
        f"{curve.name} from {fine(curve.points[0].y)} to {fine(curve.points[-1].y)}"
        for curve in panel.curves
        if curve.points
    ]
    if not ends:
        return ""
    # Of all panels, so that they can be compared.
    timings = comparison.timings
    heights = [edge for t in timings for edge in (*(t.quartiles or ()), t.median) if edge]
    words = {x: spelled(value) for x, value in panel.values}
    label = f"median time over {panel.name}{at_point(fixed)}: {'; '.join(ends)}"
    made = Plot(frame or Frame(), words, heights, panel.curves, ordinal=panel.ordinal)
    return made.svg(panel.name, tick, panel.crossings, label)
