"""A comparison as text: the answer first, then a table, then how it was measured."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from gpumagic.display.units import NOT_KNOWN, energy, fine, rate, size, times
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view import remarks, verdict
from gpumagic.timing.view.verdict import shown

Column = tuple[str, list[str], bool]
"""Its heading, a cell for each row, and whether they are numbers."""

_WIDTH = 100
_GAP = "  "
# Of a sweep, rows at its beginning and at its end.
_FIRST, _LAST = 24, 12
# Python goes on this much sooner than the device: worth a column.
_SOONER = 0.9


def text(comparison: Comparison) -> str:
    """For terminals, 100 columns."""
    table = sweep_table(comparison) if comparison.sweep else table_of(comparison)
    notes = [*legend(table), *remarks.measured(comparison), remarks.machine(comparison)]
    wrong = [f"! {line}" for line in verdict.wrong(comparison)]
    changed = [
        f"{where.ljust(_longest(comparison))}  {by}" for where, by in remarks.change(comparison)
    ]
    changed += filter(None, [remarks.differences(comparison)])
    parts = [
        _lines([*wrong, *verdict.answer(comparison)], ""),
        f"  {comparison.title}",
        _lines([f"! {line}" for line in remarks.problems(comparison)], "  "),
        _indented(_columns(table)),
        "  against the earlier run\n" + _lines(changed, "    ") if changed else "",
        _lines(notes, "  "),
    ]
    # The code belongs to the answer.
    return "\n\n".join(filter(None, ["\n".join(parts[:2]), *parts[2:]]))


def _longest(comparison: Comparison) -> int:
    return max(map(len, comparison.devices), default=0)


def legend(table: Sequence[Column]) -> list[str]:
    """What a table does not say of itself."""
    said = []
    if any(name == "host" for name, _, _ in table):
        said.append("host: until Python went on, the device still at work")
    if any(cell.startswith("~") for _, cells, _ in table for cell in cells):
        said.append("~: the repeats are spread widely")
    return said


def _lines(lines: Sequence[str], margin: str) -> str:
    return "\n".join(_wrapped(line, margin) for line in lines)


def _wrapped(line: str, margin: str) -> str:
    more = margin + "  "
    # Spaces within align columns, and stay.
    return "\n".join(
        wrap(line, _WIDTH, initial_indent=margin, subsequent_indent=more, break_on_hyphens=False)
    )


def _indented(table: str) -> str:
    return "\n".join(f"  {line}".rstrip() for line in table.splitlines())


def table_of(comparison: Comparison) -> list[Column]:
    """A comparison at one point as columns: heading, a cell for each timing, and whether numbers.

    A column that says nothing of any device is left out.
    """
    timings = comparison.timings
    columns: list[Column] = [
        ("device", [f"{t.where}{' (virtual)' * t.virtual}" for t in timings], False),
        ("median", [t.error or fine(t.median) for t in timings], True),
        ("IQR", [spread(t) for t in timings], True),
        ("speed-up", [speedup(comparison, t) for t in timings], True),
        ("host", [host(t) for t in timings], True),
        ("throughput", [throughput(comparison, t) for t in timings], True),
        ("energy", [_or(t.energy, energy(t.energy)) for t in timings], True),
        ("peak", [_or(peak(t), size(peak(t))) for t in timings], True),
        ("numbers", [remarks.numbers(comparison, t.where) for t in timings], False),
    ]
    # A speed-up is of two.
    least = {"speed-up": 2}
    return [_filled(c) for c in columns if sum(map(bool, c[1])) >= least.get(c[0], 1)]


def _filled(column: Column) -> Column:
    """What is known of one device and not of another is N/A there."""
    name, cells, right = column
    if name in ("energy", "peak"):
        cells = [cell or NOT_KNOWN for cell in cells]
    return name, cells, right


def _or(value: Any, words: str) -> str:
    return "" if value is None else words


def spread(timing: Timing) -> str:
    """From the first quartile to the third, out of the median; of a few repeats their number."""
    if timing.median is None:
        return ""
    if timing.iqr is None:
        count = len(timing.seconds)
        return f"{count} run{'s' * (count > 1)}"
    return remarks.percent(timing.iqr)


def speedup(comparison: Comparison, timing: Timing) -> str:
    """Against the first device; nothing for virtual GPUs, and for several at the same time."""
    first = comparison.at(comparison.alone[0], timing.values)
    if timing.together or timing.virtual or first is None or first.virtual:
        return ""
    if not timing.median or not first.median or len(comparison.alone) < 2:
        return ""
    if comparison.wrong(timing.where):
        return ""
    return times(first.median / timing.median)


def host(timing: Timing) -> str:
    """Until Python went on, where that is much sooner."""
    if timing.host_median is None or not timing.median:
        return ""
    return fine(timing.host_median) if timing.host_median < _SOONER * timing.median else ""


def throughput(comparison: Comparison, timing: Timing) -> str:
    """Items a second."""
    found = timing.rate(comparison.items)
    return "" if found is None else rate(found)


def peak(timing: Timing) -> int | None:
    """The most bytes on any of its devices."""
    return max(timing.peak.values(), default=None)


def sweep_table(comparison: Comparison) -> list[Column]:
    """A sweep as columns: its variables, each device's median, and which is the fastest."""
    points = points_of(comparison)
    columns: list[Column] = [
        (name, [shown(point[name]) for point in points], True) for name in comparison.sweep
    ]
    for where in comparison.devices:
        timings = [comparison.at(where, point) for point in points]
        name = f"{where} (virtual)" if any(t is not None and t.virtual for t in timings) else where
        columns.append((name, [cell(t) for t in timings], True))
        rates = ["" if t is None else throughput(comparison, t) for t in timings]
        if any(rates):
            columns.append(("", rates, True))
    fastest = [winner(comparison, point) for point in points]
    if any(name for name, _ in fastest):
        columns.append(("fastest", [name for name, _ in fastest], False))
        columns.append(("", [by for _, by in fastest], True))
    return columns


def points_of(comparison: Comparison) -> list[dict[str, Any]]:
    """The points of which something is known, in the order of measuring."""
    return list({id_of(t): dict(t.values) for t in comparison.timings}.values())


def id_of(timing: Timing) -> tuple[str, ...]:
    """A point as what can be looked up, whatever its values are."""
    return tuple(f"{name}={value!r}" for name, value in timing.values.items())


def cell(timing: Timing | None) -> str:
    """A median, with a ``~`` where it is spread widely; or why there is none."""
    if timing is None:
        return "–"
    if timing.error:
        return f"✕ {shown(timing.error)}"
    return f"{'~' * timing.unsteady}{fine(timing.median)}"


def winner(comparison: Comparison, point: dict[str, Any]) -> tuple[str, str]:
    """``("cuda:0", "11.3 ×")``, against the slowest of those alone; nothing of virtual GPUs."""
    timed = [comparison.at(where, point) for where in comparison.alone]
    known = [t for t in timed if t is not None and t.median and not t.virtual]
    fastest = comparison.fastest(point)
    if fastest is None or fastest not in known or len(known) < 2:
        return "", ""
    slowest = max(known, key=lambda t: t.median or 0.0)
    if not fastest.differs(slowest):
        return "within the spread", ""
    return fastest.where, times((slowest.median or 0.0) / (fastest.median or 1.0))


def _columns(columns: Sequence[Column]) -> str:
    """Side by side; what is too wide goes into a table of its own, below."""
    if not columns:
        return ""
    widths = [max(map(len, [name, *cells])) for name, cells, _ in columns]
    room, used, count = _WIDTH - 2, widths[0], 1
    while count < len(columns) and used + len(_GAP) + widths[count] <= room:
        used += len(_GAP) + widths[count]
        count += 1
    count = max(count, 2)
    rows = [[name for name, _, _ in columns[:count]]]
    rows += [list(row) for row in zip(*(cells for _, cells, _ in columns[:count]), strict=True)]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if right else c.ljust(w)
            for c, w, (_, _, right) in zip(row, widths, columns, strict=False)
        ]
        lines.append(_GAP.join(cells).rstrip())
    if len(lines) > _FIRST + _LAST + 2:
        left = len(lines) - 1 - _FIRST - _LAST
        lines[1 + _FIRST : -_LAST] = [f"… {left} more; to_pandas() has all"]
    rest = columns[count:]
    return "\n".join(lines) + (f"\n\n{_columns([columns[0], *rest])}" if rest else "")
