"""Show what the peak of a cell's memory was made of: by kind, by line, and over time."""

from html import escape

from gpumagic.display import plot, table
from gpumagic.display.table import Column, block, coded, tag
from gpumagic.display.units import duration, size
from gpumagic.memory.memory_view import MANY, share
from gpumagic.memory.peak import BEFORE, KINDS, MemoryPeak

_LINES = 8
_BARS = "▁▂▃▄▅▆▇█"
_COLUMNS = 60
# A plot's size in pixels, and its margins: left, right, above, below.
_WIDTH, _HEIGHT = 460.0, 170.0
_LEFT, _RIGHT, _TOP, _FOOT = 64.0, 12.0, 20.0, 144.0
# The GPU's own grays are for what nobody explains.
_GRAY = "#7d8590"
_COLORS = dict(zip(KINDS, (*plot.COLORS, _GRAY), strict=True))
_MANY = MANY | {"tensor": "other tensors"}


def text(peak: MemoryPeak) -> str:
    """What was allocated when the most was, and a line of bars over time."""
    columns = [*_columns(peak.kinds, peak, "at the peak"), *_columns(_lines(peak), peak, "by line")]
    rows = max(len(column.cells) for column in columns)
    even = [
        Column(c.head, [*c.cells, *[""] * (rows - len(c.cells))], number=c.number, fit=c.fit)
        for c in columns
    ]
    made_of = table.lines(even, margin="  ") if peak.kinds else []
    return "\n".join([*table.wrapped(_head(peak)), *made_of, *_below(peak)])


def html(peak: MemoryPeak) -> str:
    """The same, and the kinds one above the other over time."""
    kinds = table.html(_columns(peak.kinds, peak, "at the peak", colors=True))
    lines = table.html(_columns(_lines(peak), peak, "by line"))
    plot = f"<figure>{_plot(peak)}</figure>" if len(peak.curve) > 1 else ""
    notes = "".join(tag("div", note, "gm-note") for note in _notes(peak))
    body = f'<div class="gm-plots"><div>{kinds}</div>{plot}<div>{lines}</div></div>{notes}'
    return block(f"<div>{coded(_head(peak))}</div>{body}", "table", "comparison")


def _head(peak: MemoryPeak) -> str:
    words = f"the peak of {peak.device}, {size(peak.nbytes)}, was "
    if peak.refused is not None:
        wanted, line = peak.refused
        words = f"out of memory at {_at(line)}, which wanted {size(wanted)} more; {words}"
    if peak.line != BEFORE:
        return f"{words}{duration(peak.seconds)} after the start, at {_at(peak.line)}"
    if peak.allocations or len(peak.curve) > 1:
        return f"{words}before the cell: it gave back more than it allocated"
    return f"{words}before the cell: the cell allocated nothing"


def _at(line: str) -> str:
    place, _, code = line.partition(": ")
    return f"{place}: `{code}`" if code else place


def _columns(
    parts: tuple[tuple[str, int], ...], peak: MemoryPeak, head: str, *, colors: bool = False
) -> list[Column]:
    words = [_MANY.get(name, name) for name, _ in parts]
    marks = [
        f'<i style="background:{_COLORS.get(name, _GRAY)};display:inline-block;width:9px;'
        f'height:9px;border-radius:2px;margin-right:7px"></i>{escape(shown)}'
        for (name, _), shown in zip(parts, words, strict=True)
    ]
    return [
        Column(head, words, fit="cut", html=marks if colors else ()),
        Column("memory", [size(nbytes) for _, nbytes in parts], number=True),
        Column("share", [share(nbytes, peak.nbytes) for _, nbytes in parts], number=True),
    ]


def _lines(peak: MemoryPeak) -> tuple[tuple[str, int], ...]:
    """The first lines, and the others as one."""
    rest = peak.lines[_LINES:]
    if len(rest) < 2:
        return peak.lines
    more = (f"{len(rest):,} more lines", sum(nbytes for _, nbytes in rest))
    return (*peak.lines[:_LINES], more)


def _below(peak: MemoryPeak) -> list[str]:
    """A bar for each stretch of time, and what is to be said."""
    totals = [sum(moment.nbytes) for moment in peak.curve]
    each = -(-len(totals) // _COLUMNS) or 1
    most = [max(totals[n : n + each]) for n in range(0, len(totals), each)]
    bars = "".join(_BARS[min(7, 8 * n // (peak.nbytes + 1))] for n in most)
    end = duration(peak.curve[-1].seconds) if peak.curve else ""
    drawn = [f"  {bars} 0 to {size(peak.nbytes)}, over {end}"] if len(most) > 1 else []
    return drawn + [f"  {note}" for note in _notes(peak)]


def _notes(peak: MemoryPeak) -> list[str]:
    found = []
    if not peak.complete:
        found.append("More happened than the record holds: what came first is missing.")
    if peak.saved:
        found.append(f"{peak.saved} is for the viewer at https://docs.pytorch.org/memory_viz")
    return found


def _plot(peak: MemoryPeak) -> str:
    """The kinds one above the other over time, with a line at the peak."""
    end = peak.curve[-1].seconds or 1e-6
    x = plot.Scale(0.0, end, _LEFT, _WIDTH - _RIGHT, log=False)
    y = plot.Scale(0.0, float(peak.nbytes or 1), _FOOT, _TOP, log=False)
    parts = []
    for value in (0, peak.nbytes / 2, peak.nbytes):
        parts.append(plot.line(_LEFT, y(value), _WIDTH - _RIGHT, y(value), "gm-grid"))
        parts.append(plot.text(_LEFT - 8, y(value) + 4, size(value), "end"))
    below = [0] * len(peak.curve)
    for k, kind in enumerate(peak.curve_kinds):
        above = [low + moment.nbytes[k] for low, moment in zip(below, peak.curve, strict=True)]
        edge = [*_steps(peak, above, x, y), *_steps(peak, below, x, y)[::-1]]
        parts.append(
            f'<polygon points="{plot.path(edge)}" fill="{_COLORS[kind]}" opacity=".85">'
            f"<title>{escape(_MANY.get(kind, kind))}</title></polygon>"
        )
        below = above
    at = x(min(peak.seconds, end))
    parts.append(plot.line(at, _TOP - 4, at, _FOOT, "gm-crossing"))
    parts.append(plot.text(min(max(at, _LEFT + 14), _WIDTH - 30), _TOP - 8, "peak", "middle"))
    parts.append(plot.text(_LEFT, _FOOT + 17, "0", "middle"))
    parts.append(plot.text(_WIDTH - _RIGHT, _FOOT + 17, duration(end), "end"))
    label = f"Memory over time on {peak.device}: at most {size(peak.nbytes)}"
    return (
        f'<svg class="gm-plot" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" width="{_WIDTH:g}" role="img"'
        f' aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _steps(
    peak: MemoryPeak, heights: list[int], x: plot.Scale, y: plot.Scale
) -> list[tuple[float, float]]:
    """The corners of a curve that stays as it is until it changes."""
    found: list[tuple[float, float]] = []
    for moment, height in zip(peak.curve, heights, strict=True):
        if found:
            found.append((x(moment.seconds), found[-1][1]))
        found.append((x(moment.seconds), y(float(height))))
    return found
