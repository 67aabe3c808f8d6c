"""Gather a sweep's curves, and draw them in SVG; or draw any comparison with matplotlib."""

from collections.abc import Mapping
from textwrap import wrap
from typing import Any

from gpumagic.display import plot
from gpumagic.display.plot import Crossing, Curve, Ending, Frame, Plot, Point
from gpumagic.display.units import fine, tick
from gpumagic.errors import library_needed
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.view import verdict
from gpumagic.timing.view.verdict import at_point, percent, point, spelled

_TITLE = 64  # characters
_DASHES = {"": "-", "7 3": "--", "2 3": ":", "9 3 2 3": "-."}
_MARKS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}


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


def plot(comparison: Comparison, ax: Any = None) -> Any:
    """Bars, or curves of a sweep; see `Comparison.plot`."""
    with library_needed("matplotlib", "plot()", "matplotlib"):
        from matplotlib import pyplot
    if ax is None:
        _, ax = pyplot.subplots(layout="constrained")
    if comparison.sweep:
        _sweep(comparison, ax)
    else:
        _bars(comparison, ax)
    lines = verdict.wrong(comparison) or verdict.answer(comparison)[:1]
    ax.set_title("\n".join(wrap("; ".join(lines), _TITLE)), fontsize="medium")
    return ax


def _bars(comparison: Comparison, ax: Any) -> None:
    timed = [t for t in comparison.timings if t.median is not None]
    looks = plot.looks(comparison.devices)
    medians = [t.median or 0.0 for t in timed]
    edges = [t.quartiles or (0.0, 0.0) for t in timed]
    bars = ax.barh(
        [f"{t.where}{' (virtual)' * t.virtual}" for t in timed],
        medians,
        color=[looks[t.where].color for t in timed],
        xerr=[
            [m - low for m, (low, _) in zip(medians, edges, strict=True)],
            [high - m for m, (_, high) in zip(medians, edges, strict=True)],
        ],
    )
    ax.bar_label(bars, [fine(m) for m in medians], padding=4)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.set_xlabel("seconds, median and quartiles")


def _sweep(comparison: Comparison, ax: Any) -> None:
    """All curves in one; those of the other variable's values are told apart by their labels."""
    panels = [Panel(comparison, fixed) for fixed in comparison.panels]
    for n, panel in enumerate(panels):
        for curve in panel.curves:
            _curve(panel, curve, ax, alpha=1 - 0.7 * n / len(panels))
    first = panels[0]
    ax.set_yscale("log")
    if first.ordinal:
        ax.set_xticks([x for x, _ in first.values], [spelled(value) for _, value in first.values])
    elif first.values[0][0] > 0:
        ax.set_xscale("log")
    if len(panels) == 1:
        # Two pairs of devices may cross at the same value.
        for c in {c.words: c for c in first.crossings}.values():
            ax.axvline(c.x, color="gray", linestyle=":", linewidth=1)
            ax.annotate(c.words, (c.x, c.y), xytext=(5, -14), textcoords="offset points")
    ax.set_xlabel(first.name)
    ax.set_ylabel("seconds, median")
    if ax.lines:
        ax.legend()


def _curve(panel: Panel, curve: Curve, ax: Any, alpha: float) -> None:
    if not curve.points:
        return
    look = curve.look
    xs, medians, lows, highs, _ = zip(*curve.points, strict=True)
    ax.plot(
        xs,
        medians,
        color=look.color,
        alpha=alpha,
        linestyle="none" if panel.ordinal else _DASHES[look.dash],
        marker=_MARKS[look.mark],
        label=f"{curve.name}, {point(panel.fixed)}" if panel.fixed else curve.name,
    )
    for x, _, _, last in curve.endings:
        if last is not None:
            # Beside the last time, where a device could not go on.
            ax.plot([x], [last.y], color=look.color, marker="x", markersize=8, linestyle="none")
    if not panel.ordinal:
        ax.fill_between(xs, lows, highs, color=look.color, alpha=0.15, linewidth=0)
