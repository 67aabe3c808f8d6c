"""A comparison drawn with matplotlib: for papers, and for whoever wants to go on from it."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

from gpumagic.display import svg
from gpumagic.display.units import fine
from gpumagic.errors import GpuError
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.view import verdict

_TITLE = 64  # characters
_DASHES = {"": "-", "7 3": "--", "2 3": ":", "9 3 2 3": "-."}
_MARKS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D"}


def plot(comparison: Comparison, ax: Any = None) -> Any:
    """Bars, or curves of a sweep; see `Comparison.plot`."""
    try:
        from matplotlib import pyplot
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise GpuError(
            "plot() needs matplotlib, which is not installed here; type: pip install matplotlib"
        ) from None
    if ax is None:
        _, ax = pyplot.subplots(layout="constrained")
    if comparison.sweep:
        _curves(comparison, ax)
    else:
        _bars(comparison, ax)
    lines = verdict.wrong(comparison) or verdict.answer(comparison)[:1]
    ax.set_title("\n".join(wrap("; ".join(lines), _TITLE)), fontsize="medium")
    return ax


def _bars(comparison: Comparison, ax: Any) -> None:
    timed = [t for t in comparison.timings if t.median is not None and t.quartiles is not None]
    looks = svg.looks(comparison.devices)
    medians = [t.median or 0.0 for t in timed]
    edges = [t.quartiles or (0.0, 0.0) for t in timed]
    bars = ax.barh(
        [f"{t.where}{' (virtual)' * t.virtual}" for t in timed],
        medians,
        color=[looks[t.where].colour for t in timed],
        xerr=[
            [m - low for m, (low, _) in zip(medians, edges, strict=True)],
            [high - m for m, (_, high) in zip(medians, edges, strict=True)],
        ],
    )
    ax.bar_label(bars, [fine(m) for m in medians], padding=4)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.set_xlabel("seconds, median and quartiles")


def _curves(comparison: Comparison, ax: Any) -> None:
    """All curves in one; those of the other variable's values are told apart by their labels."""
    axis = comparison.axis or ""
    values = comparison.sweep[axis]
    ordinal = not all(type(value) in (int, float) for value in values)
    looks = svg.looks(comparison.devices)
    for n, fixed in enumerate(comparison.panels):
        for where, look in looks.items():
            timings = [comparison.at(where, {**fixed, axis: value}) for value in values]
            known = [
                (verdict.shown(value) if ordinal else value, t.median, t.quartiles)
                for value, t in zip(values, timings, strict=True)
                if t is not None and t.median is not None and t.quartiles is not None
            ]
            if not known:
                continue
            known = known if ordinal else sorted(known, key=lambda point: point[0])
            xs = [x for x, _, _ in known]
            label = f"{where}, {verdict.point(fixed)}" if fixed else where
            ax.plot(
                xs,
                [median for _, median, _ in known],
                color=look.colour,
                alpha=1 - 0.7 * n / len(comparison.panels),
                linestyle="none" if ordinal else _DASHES[look.dash],
                marker=_MARKS[look.mark],
                label=label,
            )
            _failed(ax, values, timings, look.colour, ordinal)
            if not ordinal:
                lows, highs = [e[0] for _, _, e in known], [e[1] for _, _, e in known]
                ax.fill_between(xs, lows, highs, color=look.colour, alpha=0.15, linewidth=0)
    ax.set_yscale("log")
    if not ordinal and min(values) > 0:
        ax.set_xscale("log")
    if len(comparison.panels) == 1:
        _crossovers(comparison, ax)
    ax.set_xlabel(axis)
    ax.set_ylabel("seconds, median")
    if ax.lines:
        ax.legend()


def _failed(ax: Any, values: Any, timings: Any, colour: str, ordinal: bool) -> None:
    """A ✕ beside the last time, where a device could not go on."""
    before = None
    for value, t in zip(values, timings, strict=True):
        if t is not None and t.median is not None:
            before = t.median
        elif t is not None and t.error not in (None, "interrupted") and before is not None:
            x = verdict.shown(value) if ordinal else value
            ax.plot([x], [before], color=colour, marker="x", markersize=8, linestyle="none")


def _crossovers(comparison: Comparison, ax: Any) -> None:
    said = set()
    for c in verdict.crossovers(comparison, {}):
        if verdict.at(c) in said:
            continue
        said.add(verdict.at(c))
        ax.axvline(c.at, color="grey", linestyle=":", linewidth=1)
        where = {"xytext": (5, -14), "textcoords": "offset points"}
        ax.annotate(verdict.at(c), (c.at, c.seconds), **where)
