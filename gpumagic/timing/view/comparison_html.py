"""Show a comparison as HTML: the answer, bars or curves, and the details folded."""

from __future__ import annotations

from html import escape

from gpumagic.display import svg, table
from gpumagic.display.style import block, folded, tag
from gpumagic.display.units import fine
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view import curves, remarks, verdict, words
from gpumagic.timing.view.columns import columns_of, legend

# A saved notebook carries them all.
_FOLD = table.Fold(200, 0, "{} more; to_pandas() has all")
# As many rows are shown without a click.
_UNFOLDED = 6


def html(comparison: Comparison) -> str:
    """For notebooks: static, with all that it needs."""
    columns = columns_of(comparison)
    wrong = [tag("div", line, "gm-answer gm-bad") for line in verdict.wrong(comparison)]
    answers = verdict.answer(comparison)
    lines = [tag("div", line, "gm-answer" if not n else "") for n, line in enumerate(answers)]
    problems = [tag("div", line, "gm-problem") for line in remarks.problems(comparison)]
    parts = [
        *wrong,
        *lines,
        tag("div", comparison.title, "gm-code gm-title"),
        *problems,
        _plots(comparison, columns) if comparison.sweep else _bars(comparison, columns),
        _change(comparison),
        tag("div", remarks.machine(comparison), "gm-caption gm-where"),
        _details(comparison, columns),
    ]
    return block("".join(parts), "table", "comparison")


def _bars(comparison: Comparison, columns: list[table.Column]) -> str:
    """A row for each device, its bar as long as its time."""
    timings = comparison.timings
    longest = max((max(t.quartiles or (0, 0)) for t in timings), default=0.0)
    looks = svg.looks(comparison.devices)
    bars = [_race(timing, longest, looks[timing.where].color) for timing in timings]
    lane = table.Column("", [""] * len(bars), css="gm-lane", html=bars)
    return table.html([*columns[:1], lane, *columns[1:]])


def _race(timing: Timing, longest: float, color: str) -> str:
    """The bar to the median, and over it a line from the first quartile to the third."""
    if not timing.median or not timing.quartiles or not longest:
        return ""
    low, high = (100 * edge / longest for edge in timing.quartiles)
    label = f"{timing.where}: median {fine(timing.median)}"
    if timing.iqr is not None:
        first, third = map(fine, timing.quartiles)
        label += f", half of the repeats from {first} to {third}"
    return (
        f'<span class="gm-race" role="img" aria-label="{escape(label)}" title="{escape(label)}">'
        f'<i style="width:{100 * timing.median / longest:.2f}%;background:{color}"></i>'
        f'<u style="left:{low:.2f}%;width:{high - low:.2f}%"></u></span>'
    )


def _plots(comparison: Comparison, columns: list[table.Column]) -> str:
    """One plot, or one for each value of the other variable; then all numbers, folded."""
    panels = comparison.panels
    figures = []
    for fixed in panels:
        drawn = curves.plot(comparison, fixed, curves.SMALL if len(panels) > 1 else None)
        caption = tag("figcaption", words.point(fixed), "gm-code") if fixed else ""
        if drawn:
            figures.append(f"<figure>{caption}{drawn}</figure>")
    unfolded = len(comparison.points) <= _UNFOLDED and len(panels) == 1
    medians = folded("medians", table.html(columns, fold=_FOLD), unfolded=unfolded)
    return f'<div class="gm-plots">{"".join(figures)}</div>{medians}'


def _change(comparison: Comparison) -> str:
    changed = remarks.change(comparison)
    if not changed:
        return ""
    where, by = zip(*changed, strict=True)
    columns = [table.Column("", where, css="gm-code"), table.Column("", by, css="gm-wrap")]
    other = remarks.differences(comparison)
    note = tag("div", other, "gm-note") if other else ""
    return table.html(columns, title="against the earlier run", css="gm-section") + note


def _details(comparison: Comparison, columns: list[table.Column]) -> str:
    """How it was measured, and where."""
    lines = [*legend(columns), *remarks.measured(comparison)]
    code = comparison.code.strip("\n")
    setup = f"# set-up\n{comparison.setup.strip()}\n\n" if comparison.setup else ""
    notes = "".join(tag("div", line, "gm-note") for line in lines)
    return folded("how it was measured", notes + tag("pre", setup + code, "gm-code"))
