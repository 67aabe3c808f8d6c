"""A comparison as HTML: the answer, bars or curves, and the details folded."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gpumagic.display import svg
from gpumagic.display.style import block, tag
from gpumagic.display.units import fine
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view import comparison_text as words
from gpumagic.timing.view import curves, remarks, verdict

# A saved notebook carries them all.
_MOST_ROWS = 200


def html(comparison: Comparison) -> str:
    """For notebooks: static, with all that it needs."""
    wrong = [tag("div", line, "gm-answer gm-bad") for line in verdict.wrong(comparison)]
    answers = verdict.answer(comparison)
    lines = [tag("div", line, "gm-answer" if not n else "") for n, line in enumerate(answers)]
    problems = [tag("div", line, "gm-problem") for line in remarks.problems(comparison)]
    body = _plots(comparison) if comparison.sweep else _bars(comparison)
    head = [*wrong, *lines, tag("div", comparison.title, "gm-code gm-title"), *problems]
    foot = [_change(comparison), _machine(comparison), _details(comparison)]
    return block("".join([*head, body, *foot]), "table", "comparison")


def _bars(comparison: Comparison) -> str:
    """A row for each device, its bar as long as its time."""
    longest = max((max(t.quartiles or (0, 0)) for t in comparison.timings), default=0.0)
    looks = svg.looks(comparison.devices)
    columns = words.table_of(comparison)
    heads = "".join(_th(name, right) for name, _, right in columns[:1])
    heads += '<th scope="col"></th>' + "".join(_th(name, right) for name, _, right in columns[1:])
    rows = []
    for n, timing in enumerate(comparison.timings):
        cells = [tag("td", columns[0][1][n], "gm-code")]
        cells.append(
            f'<td class="gm-lane">{_race(timing, longest, looks[timing.where].colour)}</td>'
        )
        for name, texts, right in columns[1:]:
            css = "gm-number" if right else ""
            if name == "numbers" and texts[n].startswith("DIFFERS"):
                css = "gm-bad gm-this"
            elif name in ("median", "speed-up"):
                css += " gm-this"
            elif name != "numbers":
                css += " gm-dim"
            cells.append(tag("td", texts[n], css.strip()))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _th(name: str, right: bool) -> str:
    css = ' class="gm-number"' if right else ""
    return f'<th scope="col"{css}>{escape(name)}</th>'


def _race(timing: Timing, longest: float, colour: str) -> str:
    """The bar to the median, and over it a line from the first quartile to the third."""
    if not timing.median or not timing.quartiles or not longest:
        return ""
    low, high = (100 * edge / longest for edge in timing.quartiles)
    label = f"{timing.where}: median {fine(timing.median)}"
    if timing.iqr is not None:
        label += (
            f", half of the repeats from {fine(timing.quartiles[0])} to {fine(timing.quartiles[1])}"
        )
    return (
        f'<span class="gm-race" role="img" aria-label="{escape(label)}" title="{escape(label)}">'
        f'<i style="width:{100 * timing.median / longest:.2f}%;background:{colour}"></i>'
        f'<u style="left:{low:.2f}%;width:{high - low:.2f}%"></u></span>'
    )


def _plots(comparison: Comparison) -> str:
    """One plot, or one for each value of the other variable; then all numbers, folded."""
    panels = comparison.panels
    figures = []
    for fixed in panels:
        drawn = curves.plot(comparison, fixed, curves.SMALL if len(panels) > 1 else None)
        caption = tag("figcaption", verdict.point(fixed), "gm-code") if fixed else ""
        if drawn:
            figures.append(f"<figure>{caption}{drawn}</figure>")
    table = words.sweep_table(comparison)
    unfolded = " open" if len(table[0][1]) <= 6 and len(panels) == 1 else ""
    return (
        f'<div class="gm-plots">{"".join(figures)}</div>'
        f"<details{unfolded}><summary>medians</summary>{_table(table)}</details>"
    )


def _table(columns: Sequence[words.Column]) -> str:
    heads = "".join(_th(name, right) for name, _, right in columns)
    rows = []
    count = len(columns[0][1])
    for n in range(min(count, _MOST_ROWS)):
        fastest = next((cells[n] for name, cells, _ in columns if name == "fastest"), "")
        cells = []
        for name, texts, right in columns:
            css = "gm-number" if right else ""
            cells.append(tag("td", texts[n], f"{css} gm-win".strip() if name == fastest else css))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    left = count - _MOST_ROWS
    return table + (tag("div", f"{left} more; to_pandas() has all", "gm-note") if left > 0 else "")


def _change(comparison: Comparison) -> str:
    rows = "".join(
        f"<tr>{tag('td', where, 'gm-code')}{tag('td', by, 'gm-wrap')}</tr>"
        for where, by in remarks.change(comparison)
    )
    if not rows:
        return ""
    head = '<tr><th colspan="2" scope="colgroup">against the earlier run</th></tr>'
    other = remarks.differences(comparison)
    note = tag("div", other, "gm-note") if other else ""
    return f'<table class="gm-section"><thead>{head}</thead><tbody>{rows}</tbody></table>{note}'


def _machine(comparison: Comparison) -> str:
    return tag("div", remarks.machine(comparison), "gm-caption gm-where")


def _details(comparison: Comparison) -> str:
    """How it was measured, and where."""
    table = words.sweep_table(comparison) if comparison.sweep else words.table_of(comparison)
    lines = [*words.legend(table), *remarks.measured(comparison)]
    told = "".join(tag("div", line, "gm-note") for line in lines)
    code = escape(comparison.code.strip("\n"))
    setup = f"# set-up\n{escape(comparison.setup.strip())}\n\n" if comparison.setup else ""
    return (
        f"<details><summary>how it was measured</summary>{told}"
        f'<pre class="gm-code">{setup}{code}</pre></details>'
    )
