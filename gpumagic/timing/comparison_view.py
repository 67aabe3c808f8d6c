"""Show a comparison as text, HTML, or an SVG figure.

One device at one point is a line, as of `%timeit`. A column without any value is left out; a value
that is missing in a column is N/A.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from gpumagic.display import plot, table
from gpumagic.display.plot import Curve, Plot, Point
from gpumagic.display.table import Column, Fold, block, folded, tag
from gpumagic.display.units import duration, fine, rate, size, tick, times
from gpumagic.timing import verdict
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.timing import Timing, bars
from gpumagic.timing.verdict import percent, point, spelled


def sweep_figure(comparison: Comparison) -> str:
    """Return an SVG element with the curves of a sweep of numbers; ``""`` if there is none."""
    name = comparison.axis or ""
    values = comparison.sweep[name]
    if not all(type(value) in (int, float) for value in values):
        return ""
    xs = sorted((float(value), value) for value in values)
    looks = plot.looks(comparison.devices)
    curves = [_curve(comparison, where, look, xs) for where, look in looks.items()]
    ends = [
        f"{curve.name} from {fine(curve.heights[0])} to {fine(curve.heights[-1])}"
        for curve in curves
        if curve.heights
    ]
    if not ends:
        return ""
    crossings = [
        Point(
            c.at,
            c.seconds,
            f"{c.faster} is faster than {c.slower} from {verdict.at(c)}",
            verdict.at(c),
        )
        for c in comparison.crossovers
    ]
    heights = [e for t in comparison.timings for e in (*(t.quartiles or ()), t.median) if e]
    made = Plot({x: spelled(v) for x, v in xs}, heights, curves)
    return made.svg(name, tick, crossings, f"median time over {name}: {'; '.join(ends)}")


def _curve(
    comparison: Comparison, where: str, look: plot.Look, xs: Sequence[tuple[float, Any]]
) -> Curve:
    points: list[Point] = []
    for x, value in xs:
        timing = comparison.at(where, {comparison.axis or "": value})
        if timing is None:
            continue
        tip = f"{where} · {point(timing.values)}"
        if timing.median:
            low, high = timing.quartiles or (0.0, 0.0)
            spread = f" · IQR {percent(timing.iqr)}" if timing.iqr is not None else ""
            tip = f"{tip} · {fine(timing.median)}{spread}"
            points.append(Point(x, timing.median, tip, low=low, high=high))
        elif timing.error not in (None, "interrupted"):
            words = spelled(timing.error)
            points.append(Point(x, None, f"{tip} · {words}", words))
    return Curve(where, look, points)


# Rows of a sweep at its beginning and its end. A saved notebook contains all rows of the HTML.
_FOLD = Fold(24, 12, "… {} more; to_pandas() has all")
_HTML_FOLD = Fold(200, 0, "{} more; to_pandas() has all")
# Remarks below the table of a text; `Comparison.remarks` has all.
_REMARKS = 3
# Up to this many rows are shown unfolded.
_UNFOLDED = 6
# Show the host's time if it is below this part of the device's.
_SOONER = 0.9


def text(comparison: Comparison) -> str:
    """Return the headline, the table and three remarks, for terminals of 100 columns."""
    if line := verdict.one_line(comparison):
        return _lines([line, *_doubts(comparison)[:_REMARKS]], "")
    bad = [f"! {line}" for line in _bad(comparison)]
    rows = "\n".join(table.lines(columns_of(comparison), "  ", _FOLD))
    head = _lines([*bad, *verdict.answer(comparison)], "")
    parts = (head, rows, _lines(remarks(comparison)[:_REMARKS], "  "))
    return "\n\n".join(filter(None, parts))


def _bad(comparison: Comparison) -> list[str]:
    return [*verdict.wrong(comparison), *verdict.interrupted(comparison)]


def _lines(lines: Iterable[str], margin: str) -> str:
    return "\n".join("\n".join(table.wrapped(line, margin)) for line in lines)


def remarks(comparison: Comparison) -> list[str]:
    """Return everything that is not in the table, the most important first."""
    legends = legend(columns_of(comparison))
    about = [*verdict.copies(comparison), *legends, *verdict.models(comparison)]
    return [*_doubts(comparison), *about]


def _doubts(comparison: Comparison) -> list[str]:
    return [
        *verdict.failed(comparison),
        *verdict.differences(comparison),
        *comparison.notes,
        *verdict.uncertain(comparison),
        *verdict.inside(comparison),
        *verdict.compared_numbers(comparison),
    ]


def html(comparison: Comparison) -> str:
    """Return the headline and the table for notebooks, all else folded: static HTML."""
    notes = "".join(tag("div", line, "gm-note") for line in remarks(comparison))
    setup = f"# set-up\n{comparison.setup.strip()}\n\n" if comparison.setup else ""
    how = notes + tag("pre", setup + comparison.code.strip("\n"), "gm-code")
    if line := verdict.one_line(comparison):
        return block(folded(line, how), "table", "comparison")
    columns = columns_of(comparison)
    head = [tag("div", line, "gm-answer gm-bad") for line in _bad(comparison)]
    head += [tag("div", line, "gm-answer") for line in verdict.answer(comparison)]
    numbers = _plot(comparison, columns) if comparison.sweep else _bars(comparison, columns)
    # The first doubt is shown, so that a mistake in the line is not overlooked.
    more = folded(next(iter(_doubts(comparison)), "how it was measured"), how)
    return block("".join([*head, numbers, more]), "table", "comparison")


def panel(comparison: Comparison) -> dict[str, Any]:
    """For the monitor: the title, and a bar for each device; a sweep has none."""
    timings = [] if comparison.sweep else _rows(comparison)
    return {"title": comparison.title, "bars": bars([(t.where, t.median, "") for t in timings])}


def _bars(comparison: Comparison, columns: list[Column]) -> str:
    """Return a row for each device, with a bar as long as its time."""
    timings = _rows(comparison)
    longest = max((max(t.quartiles or (0, 0)) for t in timings), default=0.0)
    looks = plot.looks([timing.where for timing in timings])
    bars = [_race(timing, longest, looks[timing.where].color) for timing in timings]
    lane = Column("", [""] * len(bars), css="gm-lane", html=bars)
    return table.html([*columns[:1], lane, *columns[1:]])


def _race(timing: Timing, longest: float, color: str) -> str:
    """Return the bar of the median, with a line from the first quartile to the third."""
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


def _plot(comparison: Comparison, columns: list[Column]) -> str:
    """The plot, then all numbers, folded if they are many."""
    unfolded = len(comparison.points) <= _UNFOLDED
    figure = sweep_figure(comparison)
    return figure + folded("medians", table.html(columns, fold=_HTML_FOLD), unfolded=unfolded)


def columns_of(comparison: Comparison) -> list[Column]:
    """Return the columns: rows are the points of a sweep, else the devices."""
    return _of_sweep(comparison) if comparison.sweep else _of_devices(comparison)


def legend(columns: Sequence[Column]) -> list[str]:
    """Explain the columns of a table."""
    heads = {column.head for column in columns}
    said = {
        "host": "host: time until Python continued, with the device still working",
        "compiled": "compiled: in the first run, not timed",
        "peak": "peak: memory that the code added; its inputs were there before",
        "change": "change: against the earlier run; same is within the spread of both",
    }
    return [words for head, words in said.items() if head in heads]


def _rows(comparison: Comparison) -> list[Timing]:
    """Return the timings; one of several devices is followed by the same devices in turn."""
    rows = []
    for timing in comparison.timings:
        rows.append(timing)
        if timing.alone:
            where, many = timing.where.replace("+", ", then "), timing.where.count("+") + 1
            items = many * (timing.items or comparison.items or 0) or None
            rows.append(Timing(where, timing.alone, virtual=timing.virtual, items=items))
    return rows


def _of_devices(comparison: Comparison) -> list[Column]:
    timings = _rows(comparison)
    peaks = [max(t.peak.values(), default=None) for t in timings]
    numbers = [verdict.numbers(comparison, t.where) for t in timings]
    wrong = ["gm-bad gm-this" * words.startswith("DIFFERS") for words in numbers]
    number = partial(Column, number=True, css="gm-dim")
    columns = [
        Column("device", [f"{t.where}{' (virtual)' * t.virtual}" for t in timings], css="gm-code"),
        number("median", [t.error or fine(t.median) for t in timings], css="gm-this", fit="cut"),
        number("IQR", [_iqr(t) for t in timings]),
        number("speed-up", [_speedup(comparison, t) for t in timings], css="gm-this"),
        number("change", [_change(comparison, t) for t in timings], css="gm-this"),
        number("host", [_host(t) for t in timings]),
        number("throughput", [_throughput(comparison, t) for t in timings]),
        number("compiled", _if_some([t.compiled for t in timings])),
        number("first run", _if_some([t.first for t in timings])),
        number("peak", _if_any(peaks, size)),
        Column("numbers", numbers, css=wrong),
    ]
    # A speed-up needs two devices.
    return [c for c in columns if sum(map(bool, c.cells)) >= (2 if c.head == "speed-up" else 1)]


def _if_some(seconds: Sequence[float | None]) -> list[str]:
    """Return durations; nothing if all are unknown or 0."""
    return _if_any(seconds, duration) if any(seconds) else []


def _if_any(values: Sequence[Any], words: Callable[[Any], str]) -> list[str]:
    return [words(value) for value in values] if any(v is not None for v in values) else []


def _iqr(timing: Timing) -> str:
    """Return the interquartile range in percent of the median; for a few repeats, their number."""
    if timing.median is None:
        return ""
    if timing.iqr is None:
        count = len(timing.seconds)
        return f"{count} run{'s' * (count > 1)}"
    return percent(timing.iqr)


def _speedup(comparison: Comparison, timing: Timing) -> str:
    """Return the speed-up over the first device, if both are comparable."""
    first = comparison.at(comparison.alone[0], timing.values)
    known = comparison.comparable
    if first is None or len(known) < 2 or not {first.where, timing.where} <= {*known}:
        return ""
    return times((first.median or 0.0) / (timing.median or 1.0))


def _change(comparison: Comparison, timing: Timing | None) -> str:
    """Return the change from the earlier run: ``"1.32 × faster"``, ``"same"`` or ``"new"``."""
    return next((str(c) for c in comparison.change if timing and c.of(timing)), "")


def _host(timing: Timing) -> str:
    """Return the host's time if it is much shorter than the device's."""
    if timing.host_median is None or not timing.median:
        return ""
    return fine(timing.host_median) if timing.host_median < _SOONER * timing.median else ""


def _throughput(comparison: Comparison, timing: Timing | None) -> str:
    """Return items per second."""
    found = None if timing is None else timing.rate(comparison.items)
    return "" if found is None else rate(found)


def _of_sweep(comparison: Comparison) -> list[Column]:
    """Return the sweep's values, each device's median, and the fastest device."""
    points = comparison.points
    won = [_winner(comparison, point) for point in points]
    columns = [
        Column(name, [spelled(values[name]) for values in points], number=True)
        for name in comparison.sweep
    ]
    for where in comparison.devices:
        timings = [comparison.at(where, point) for point in points]
        virtual = any(t is not None and t.virtual for t in timings)
        name = f"{where} (virtual)" if virtual else where
        bold = ["gm-win" * (name == fastest) for fastest, _ in won]
        columns.append(Column(name, [_cell(t) for t in timings], number=True, css=bold))
        rates = [_throughput(comparison, t) for t in timings]
        if any(rates):
            columns.append(Column("", rates, number=True))
        changes = [_change(comparison, t) for t in timings]
        if any(changes):
            columns.append(Column("change", changes, number=True))
    if any(fastest for fastest, _ in won):
        columns.append(Column("fastest", [fastest for fastest, _ in won]))
        columns.append(Column("", [by for _, by in won], number=True))
    return columns


def _cell(timing: Timing | None) -> str:
    """Return a median, with ``~`` if it is noisy; or why there is none."""
    if timing is None:
        return "–"
    if timing.error:
        return f"✕ {spelled(timing.error)}"
    return f"{'~' * timing.unsteady}{fine(timing.median)}"


def _winner(comparison: Comparison, point: Mapping[str, Any]) -> tuple[str, str]:
    """Return ``("cuda:0", "11.3 ×")``, against the slowest comparable device; empty for one."""
    found = [t for w in comparison.comparable if (t := comparison.at(w, point)) and t.median]
    if len(found) < 2:
        return "", ""
    fastest, slowest = (pick(found, key=lambda t: t.median or 0.0) for pick in (min, max))
    if not fastest.differs(slowest):
        return "within the spread", ""
    return fastest.where, times((slowest.median or 0.0) / (fastest.median or 1.0))
