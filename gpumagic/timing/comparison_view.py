"""Show a comparison as text, HTML, or an SVG figure: first the faster device, then the numbers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from typing import Any

from gpumagic.display import plot, table
from gpumagic.display.plot import Curve, Look, Plot, Point
from gpumagic.display.table import Column, Fold, block, folded, tag
from gpumagic.display.units import NOT_KNOWN, both, duration, fine, many, rate, size, times
from gpumagic.timing.comparison import Comparison, Crossover, Timing, of_virtual
from gpumagic.usercode.sweep import label, number

_FOLD = Fold(36, "… {} more; to_pandas() has all")  # maximum rows of a sweep as text
_HTML_FOLD = Fold(200, "{} more; to_pandas() has all")  # limited: a notebook saves the HTML
_REMARKS = 3  # maximum number of remarks in the text; `Comparison.remarks` has all
_SOONER = 0.9  # show the host's time if it is below this fraction of the device's time
_SLOW, _SLOW_S = 5, 0.01  # show a first run longer than 5 medians, and longer than 0.01 s
_LEGEND = {
    "host": "host: time until Python continued, with the device still working",
    "first run": "first run: not in the median, may have compiled",
    "peak": "peak: memory that the code allocated, without its inputs",
    "change": 'change: from the earlier run; "same": the spreads overlap',
}


def text(comparison: Comparison) -> str:
    """Return the headline, the table and the first remarks, for terminals of 100 columns."""
    head = [*(f"! {line}" for line in _wrong(comparison)), *_answer(comparison)]
    rows = [] if _is_one_line(comparison) else table.lines(_columns(comparison), "  ", _FOLD)
    doubts = _warnings(comparison)[:_REMARKS]
    above = [part for line in head for part in table.wrapped(line)]
    below = [part for line in doubts for part in table.wrapped(line, "  " * bool(rows))]
    parts = ("\n".join(lines) for lines in (above, rows, below) if lines)
    return ("\n\n" if rows else "\n").join(parts)


def html(comparison: Comparison) -> str:
    """Return static HTML for notebooks: the headline, the table, and folded details."""
    notes = "".join(tag("div", line, "gm-note") for line in remarks(comparison))
    setup = f"# set-up\n{comparison.setup.strip()}\n\n" if comparison.setup else ""
    how = notes + tag("pre", setup + comparison.code.strip("\n"), "gm-code")
    answer = _answer(comparison)
    parts = [tag("div", line, "gm-answer gm-bad") for line in _wrong(comparison)]
    if _is_one_line(comparison):
        return block("".join([*parts, folded(answer[0], how)]), "table", "comparison")
    parts += [tag("div", line, "gm-answer") for line in answer]
    if comparison.sweep:
        rows = table.html(_of_sweep(comparison), fold=_HTML_FOLD)
        parts += [sweep_figure(comparison), folded("medians", rows, unfolded=True)]
    else:
        parts.append(_bars(comparison))
    # The first warning is the title of the folded details, so that the user sees the warning.
    parts.append(folded(next(iter(_warnings(comparison)), "how it was measured"), how))
    return block("".join(parts), "table", "comparison")


def panel(comparison: Comparison) -> dict[str, Any]:
    """Return data for the monitor: a title, and a bar for each device unless there is a sweep."""
    timings = () if comparison.sweep else comparison.timings
    return {"title": comparison.title, "bars": bars([(t.where, t.median, "") for t in timings])}


def bars(medians: Sequence[tuple[str, float | None, str]]) -> list[dict[str, Any]]:
    """Return each device's bar: a name, the median as a share of the slowest median, and a text."""
    slowest = max((seconds for _, seconds, _ in medians if seconds), default=0.0)
    return [
        {
            "where": where,
            "share": seconds / slowest if seconds else 0.0,
            "text": duration(seconds) if seconds is not None else state,
        }
        for where, seconds, state in medians
    ]


def _is_one_line(comparison: Comparison) -> bool:
    whole = len(comparison.timings) == 1 and not (comparison.sweep or comparison.interrupted)
    return whole and not (comparison.timings[0].alone or comparison.timings[0].error)


def _wrong(comparison: Comparison) -> list[str]:
    said = list(dict.fromkeys(t.elsewhere for t in comparison.timings if t.elsewhere))
    said += [
        f"{f.where} gives different numbers from {f.reference}{_at(f.values)}: {f.reason}"
        for f in filter(None, map(comparison.disagreement, comparison.devices))
    ]
    if comparison.interrupted:
        done = sum(1 for t in comparison.timings if t.seconds)
        said.append(f"interrupted: {many(done, 'timing')} finished")
    return said


def _answer(comparison: Comparison) -> list[str]:
    real, said = comparison.comparable, []
    if _is_one_line(comparison):
        return [_single(comparison)]
    if not any(t.median for t in comparison.timings):
        return ["nothing was measured"]
    if len(real) > 1 and comparison.sweep:
        said = [_pair(comparison, real[0], other) for other in real[1:]]
    elif len(real) > 1:
        fastest, by, slowest = _winner(comparison, {})
        alike = f"{both(real)} do not differ by more than the spread"
        said = [f"{fastest} is {by} faster than {slowest}" if by else alike]
    if comparison.virtual:
        return [*said, of_virtual(comparison.virtual)]
    for where, scale in {t.where: t.scaling for t in comparison.timings if t.scaling}.items():
        by, names = times(scale).removesuffix(" ×"), where.replace("+", " + ")
        said.append(f"{names} at the same time: {by} times as fast as one after the other")
    return said


def _single(comparison: Comparison) -> str:
    """Describe the only timing: ``"cpu takes 1.23 ms (IQR 1.0 %, throughput 168 k/s)"``."""
    (timing,) = comparison.timings
    name = f"{timing.where}{' (virtual)' * timing.virtual}"
    columns = [(column.head, column.cells[0]) for column in _of_devices(comparison)[2:]]
    about = [cell if cell.endswith(("run", "runs")) else f"{head} {cell}" for head, cell in columns]
    return f"{name} takes {fine(timing.median)} ({', '.join(about)})"


def _pair(comparison: Comparison, first: str, other: str) -> str:
    """Return a sentence about the last crossover of two devices, or about their speed-up."""
    ((axis, values),) = comparison.sweep.items()
    if flips := [c for c in comparison.crossovers if {c.faster, c.slower} == {first, other}]:
        return _crossing(axis, flips[-1]).tip
    pairs = [[comparison.at(where, {axis: v}) for where in (first, other)] for v in values]
    if not (apart := [(a, b) for a, b in pairs if a and b and a.differs(b)]):
        return f"{first} and {other} do not differ by more than the spread"
    fast, slow = sorted(apart[-1], key=lambda t: t.median or 0.0)
    return f"{fast.where} is {times(slow.ratio(fast))} faster than {slow.where}{_at(fast.values)}"


def _spelled(value: object) -> str:
    """Format a value of a sweep: ``"16,384"``, ``"0.001"``, ``"float16"``."""
    return f"{value:,}" if type(value) is int else label(value, 24)


def _at(values: Mapping[str, Any], before: str = " at ") -> str:
    """Return a point of the sweep as text: ``" at n = 256"``; empty without a sweep."""
    return "".join(f"{before}{name} = {_spelled(value)}" for name, value in values.items())


def _percent(part: float) -> str:
    return f"{100 * part:.{1 if part < 0.0995 else 0}f} %"


def remarks(comparison: Comparison) -> list[str]:
    """Return all remarks that are not in the table, the most important first."""
    heads = {column.head for column in _columns(comparison)}
    legend = [words for head, words in _LEGEND.items() if head in heads]
    models = {
        f"{t.where}: {t.name}": None
        for t in comparison.timings
        if t.name and t.where.startswith("cuda") and not t.virtual
    }
    # In a sweep, show only the timing that copied the most bytes to each device.
    most = {t.where: t for t in sorted(comparison.timings, key=lambda t: t.copied) if t.copied}
    each = [f"{size(t.copied)} to {w} in {duration(t.copy_seconds)}" for w, t in most.items()]
    copies = [f"not timed: copying the inputs ({', '.join(each)})"] * bool(each)
    return [*_warnings(comparison), *copies, *legend, *models]


def _warnings(comparison: Comparison) -> list[str]:
    failed = [t for t in comparison.timings if t.error not in (None, "interrupted")]
    said, earlier = [f"{t.where}: {t.error}{_at(t.values)}" for t in failed], comparison.earlier
    for name in ("code", "setup") if earlier is not None else ():
        if getattr(comparison, name).strip() != getattr(earlier, name).strip():
            said.append(f"differs from the earlier run: the {name}")
    return [*said, *comparison.notes, *_doubts(comparison)]


def _doubts(comparison: Comparison) -> Iterator[str]:
    """Yield remarks on noisy times, on copies in each run, and on how well the results agree."""
    if noisy := [t for t in comparison.timings if t.noisy]:
        wheres, worst = both(t.where for t in noisy), max(t.iqr or 0.0 for t in noisy)
        why = "other work on the machine, or a changing clock"
        yield f"{wheres}: noisy (IQR {_percent(worst)} of the median): {why}"
    last = {t.where: t.transfers for t in comparison.timings}  # in a sweep, of the last value
    yield from (f"in each run on {where}: {words}" for where, words in last.items() if words)
    yield from _on_numbers(comparison)


def _on_numbers(comparison: Comparison) -> Iterator[str]:
    """Yield why results were not compared and, in a sweep, which devices' results agree."""
    reasons = dict.fromkeys(a.reason for a in comparison.agreements if a.same is None)
    yield from (f"numbers not compared: {reason}" for reason in reasons)
    known = [(where, _numbers(comparison, where)) for where in comparison.devices]
    same = [f"{where} {words}" for where, words in known if words.startswith("same")]
    if same and comparison.sweep:
        yield f"numbers: {', '.join(same)}"


def _numbers(comparison: Comparison, where: str) -> str:
    """Return the agreement with the first device: ``"same to 3e-07"``, ``"DIFFERS"``."""
    found = [a for a in comparison.agreements if a.where == where]
    if any(a.same is False for a in found):
        return "DIFFERS"
    if any(a.same is None for a in found):
        return "not compared"
    if not found:
        return "reference" if any(a.reference == where for a in comparison.agreements) else ""
    largest = max(a.largest or 0.0 for a in found)
    return f"same to {largest:.0e}" if largest else "same"


def _columns(comparison: Comparison) -> list[Column]:
    return _of_sweep(comparison) if comparison.sweep else _of_devices(comparison)


def _iqr(timing: Timing) -> str:
    """Return the IQR in percent of the median; for under four repeats, the number of repeats."""
    few = many(len(timing.seconds), "run") if timing.seconds else ""
    return few if timing.iqr is None else _percent(timing.iqr)


def _speedup(comparison: Comparison, timing: Timing) -> str:
    """Return the speed-up over the first device; empty if one device is not comparable."""
    known = comparison.comparable
    first = comparison.at(comparison.alone[0], timing.values)
    if len(known) < 2 or first is None or not {first.where, timing.where} <= {*known}:
        return ""
    return times(first.ratio(timing))


def _change(comparison: Comparison, timing: Timing | None) -> str:
    """Return the change from the earlier run: ``"1.32 × faster"``, ``"same"`` or ``"new"``."""
    earlier = comparison.earlier
    if earlier is None or timing is None or not timing.median:
        return ""
    if (before := earlier.at(timing.where, timing.values)) is None or not before.median:
        return "new"
    if not timing.differs(before):
        return "same"
    ratio = before.ratio(timing)
    return f"{times(max(ratio, 1 / ratio))} {'faster' if ratio > 1 else 'slower'}"


def _host(timing: Timing) -> str:
    host, median = timing.host_median, timing.median
    return fine(host) if host is not None and median and host < _SOONER * median else ""


def _rate(timing: Timing | None) -> str:
    return rate(timing.rate) if timing is not None and timing.rate else ""


def _first(timing: Timing) -> str:
    slow = timing.first and timing.median and timing.first > max(_SLOW * timing.median, _SLOW_S)
    return duration(timing.first) if slow else ""


def _cell(timing: Timing | None) -> str:
    """Return a timing's median, with ``~`` if it is noisy, or the error."""
    if timing is None:
        return "–"
    if timing.error:
        return f"✕ {_spelled(timing.error)}"
    return f"{'~' * timing.noisy}{fine(timing.median)}"


def _winner(comparison: Comparison, point: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the fastest device, its speed-up over the slowest, and the slowest; or empty texts."""
    found = [t for w in comparison.comparable if (t := comparison.at(w, point)) and t.median]
    if len(found) < 2:
        return "", "", ""
    fastest, slowest = (pick(found, key=lambda t: t.median or 0.0) for pick in (min, max))
    if not fastest.differs(slowest):
        return "within the spread", "", ""  # shown in place of the fastest device
    return fastest.where, times(slowest.ratio(fastest)), slowest.where


_DIM: dict[str, Any] = {"number": True, "css": "gm-dim"}
_BRIGHT: dict[str, Any] = {"number": True, "css": "gm-this"}
_CELLS: tuple[tuple[str, Callable[[Comparison, Timing], str], dict[str, Any]], ...] = (
    ("device", lambda c, t: f"{t.where}{' (virtual)' * t.virtual}", {"css": "gm-code"}),
    ("median", lambda c, t: t.error or fine(t.median), _BRIGHT | {"fit": "cut"}),
    ("IQR", lambda c, t: _iqr(t), _DIM),
    ("speed-up", _speedup, _BRIGHT),
    ("change", _change, _BRIGHT),
    ("host", lambda c, t: _host(t), _DIM),
    ("throughput", lambda c, t: _rate(t), _DIM),
    ("first run", lambda c, t: _first(t), _DIM),
    ("peak", lambda c, t: size(max(t.peak.values(), default=None)), _DIM),
    ("numbers", lambda c, t: _numbers(c, t.where), {}),
)


def _of_devices(comparison: Comparison) -> list[Column]:
    columns = [
        Column(head, [cell(comparison, t) for t in comparison.timings], **look)
        for head, cell, look in _CELLS
    ]
    return [column for column in columns if {*column.cells} - {"", NOT_KNOWN}]


def _of_sweep(comparison: Comparison) -> list[Column]:
    points, number = comparison.points, partial(Column, number=True)
    columns = [number(name, [_spelled(p[name]) for p in points]) for name in comparison.sweep]
    for where in comparison.devices:
        timings = [comparison.at(where, point) for point in points]
        name = f"{where} (virtual)" if {*where.split("+")} & {*comparison.virtual} else where
        for head, cell in ((name, _cell), ("", _rate), ("change", partial(_change, comparison))):
            columns.append(number(head, list(map(cell, timings))))
    won = [_winner(comparison, point) for point in points]
    columns += [Column("fastest", [w[0] for w in won]), number("", [w[1] for w in won])]
    return [column for column in columns if any(column.cells)]


def _bars(comparison: Comparison) -> str:
    timings, columns = comparison.timings, _of_devices(comparison)
    longest = max((max(t.quartiles or (0, 0)) for t in timings), default=0.0)
    looks = plot.looks([timing.where for timing in timings])
    races = [_bar(timing, longest, looks[timing.where].color) for timing in timings]
    lane = Column("", [""] * len(races), css="gm-lane", html=races)
    return table.html([*columns[:1], lane, *columns[1:]])


def _bar(timing: Timing, longest: float, color: str) -> str:
    if not timing.median or not timing.quartiles or not longest:
        return ""
    low, high = (100 * edge / longest for edge in timing.quartiles)
    first, third = map(fine, timing.quartiles)
    words = f"{timing.where}: median {fine(timing.median)}, half of the repeats"
    tip = escape(f"{words} from {first} to {third}")
    bar = f'<i style="width:{100 * timing.median / longest:.2f}%;background:{color}"></i>'
    half = f'<u style="left:{low:.2f}%;width:{high - low:.2f}%"></u>'
    return f'<span class="gm-race" role="img" aria-label="{tip}" title="{tip}">{bar}{half}</span>'


def sweep_figure(comparison: Comparison) -> str:
    """Return an SVG element with the curves of a sweep; empty if a value is not a number."""
    ((name, values),) = comparison.sweep.items()
    xs = sorted((x, value) for value in values if (x := number(value)) is not None)
    if len(xs) < len(values):
        return ""
    looks = plot.looks(comparison.devices)
    curves = [_curve(comparison, where, look, xs) for where, look in looks.items()]
    if not (drawn := [curve for curve in curves if curve.heights]):
        return ""  # nothing was measured
    ends = [f"{c.name} from {fine(c.heights[0])} to {fine(c.heights[-1])}" for c in drawn]
    crossings = [_crossing(name, crossover) for crossover in comparison.crossovers]
    made = Plot({x: _spelled(v) for x, v in xs}, curves)
    return made.svg(name, crossings, f"median time over {name}: {'; '.join(ends)}")


def _crossing(name: str, found: Crossover) -> Point:
    rounded = float(f"{found.at:.2g}")
    words = f"{name} ≈ {f'{rounded:,.0f}' if abs(rounded) >= 10 else f'{rounded:g}'}"
    tip = f"{found.faster} is faster than {found.slower} from {words}"
    return Point(found.at, found.seconds, tip, words)


def _curve(comparison: Comparison, where: str, look: Look, xs: list[tuple[float, Any]]) -> Curve:
    points: list[Point] = []
    (name,) = comparison.sweep
    for x, value in xs:
        if (timing := comparison.at(where, {name: value})) is None:
            continue
        tip = f"{where}{_at(timing.values, ' · ')}"
        if timing.median:
            low, high = timing.quartiles or (0.0, 0.0)
            spread = f" · IQR {_percent(timing.iqr)}" if timing.iqr is not None else ""
            tip = f"{tip} · {fine(timing.median)}{spread}"
            points.append(Point(x, timing.median, tip, low=low, high=high))
        elif timing.error not in (None, "interrupted"):
            words = _spelled(timing.error)
            points.append(Point(x, None, f"{tip} · {words}", words))
    return Curve(where, look, points)
