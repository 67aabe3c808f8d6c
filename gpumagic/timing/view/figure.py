"""Draw a comparison with matplotlib: for papers, and for whoever wants to go on from it."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from gpumagic.display import svg
from gpumagic.display.plot import Curve
from gpumagic.display.units import fine
from gpumagic.errors import library_needed
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.view import verdict
from gpumagic.timing.view.curves import Panel
from gpumagic.timing.view.verdict import point, shown

_TITLE = 64  # characters
_DASHES = {"": "-", "7 3": "--", "2 3": ":", "9 3 2 3": "-."}
_MARKS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}


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
    looks = svg.looks(comparison.devices)
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
        ax.set_xticks([x for x, _ in first.values], [shown(value) for _, value in first.values])
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
