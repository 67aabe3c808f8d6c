"""Set out a comparison's timings as columns, for text and for HTML alike.

A column that says nothing of any device is left out; what is known of one and not of another is
N/A there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gpumagic.display.table import Column
from gpumagic.display.units import energy, fine, rate, size, times
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view import remarks
from gpumagic.timing.view.words import percent, shown

# Python goes on this much sooner than the device: worth a column.
_SOONER = 0.9


def columns_of(comparison: Comparison) -> list[Column]:
    """Of a sweep a row for each point, else one for each device."""
    return _of_sweep(comparison) if comparison.sweep else _of_devices(comparison)


def legend(columns: Sequence[Column]) -> list[str]:
    """What a table does not say of itself."""
    said = []
    if any(column.head == "host" for column in columns):
        said.append("host: until Python went on, the device still at work")
    if any(cell.startswith("~") for column in columns for cell in column.cells):
        said.append("~: the repeats are spread widely")
    return said


def _of_devices(comparison: Comparison) -> list[Column]:
    timings = comparison.timings
    peaks = [max(t.peak.values(), default=None) for t in timings]
    numbers = [remarks.numbers(comparison, t.where) for t in timings]
    wrong = ["gm-bad gm-this" * words.startswith("DIFFERS") for words in numbers]
    columns = [
        Column("device", [f"{t.where}{' (virtual)' * t.virtual}" for t in timings], css="gm-code"),
        _number("median", [t.error or fine(t.median) for t in timings], "gm-this", fit="cut"),
        _number("IQR", [_iqr(t) for t in timings]),
        _number("speed-up", [_speedup(comparison, t) for t in timings], "gm-this"),
        _number("host", [_host(t) for t in timings]),
        _number("throughput", [_throughput(comparison, t) for t in timings]),
        _number("energy", _if_any([t.energy for t in timings], energy)),
        _number("peak", _if_any(peaks, size)),
        Column("numbers", numbers, css=wrong),
    ]
    # A speed-up is of two.
    return [c for c in columns if sum(map(bool, c.cells)) >= (2 if c.head == "speed-up" else 1)]


def _number(head: str, cells: Sequence[str], css: str = "gm-dim", fit: str = "") -> Column:
    return Column(head, cells, number=True, fit=fit, css=css)


def _if_any(values: Sequence[Any], words: Callable[[Any], str]) -> list[str]:
    return [words(value) for value in values] if any(v is not None for v in values) else []


def _iqr(timing: Timing) -> str:
    """From the first quartile to the third, out of the median; of a few repeats their number."""
    if timing.median is None:
        return ""
    if timing.iqr is None:
        count = len(timing.seconds)
        return f"{count} run{'s' * (count > 1)}"
    return percent(timing.iqr)


def _speedup(comparison: Comparison, timing: Timing) -> str:
    """Against the first device; nothing for virtual GPUs, and for several at the same time."""
    first = comparison.at(comparison.alone[0], timing.values)
    if timing.together or timing.virtual or first is None or first.virtual:
        return ""
    if len(comparison.alone) < 2 or comparison.wrong(timing.where):
        return ""
    return times(first.median / timing.median) if first.median and timing.median else ""


def _host(timing: Timing) -> str:
    """Until Python went on, where that is much sooner."""
    if timing.host_median is None or not timing.median:
        return ""
    return fine(timing.host_median) if timing.host_median < _SOONER * timing.median else ""


def _throughput(comparison: Comparison, timing: Timing | None) -> str:
    """Items a second."""
    found = None if timing is None else timing.rate(comparison.items)
    return "" if found is None else rate(found)


def _of_sweep(comparison: Comparison) -> list[Column]:
    """Its variables, each device's median, and which is the fastest."""
    points = comparison.points
    won = [_winner(comparison, point) for point in points]
    columns = [
        Column(name, [shown(point[name]) for point in points], number=True)
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
    if any(fastest for fastest, _ in won):
        columns.append(Column("fastest", [fastest for fastest, _ in won]))
        columns.append(Column("", [by for _, by in won], number=True))
    return columns


def _cell(timing: Timing | None) -> str:
    """A median, with a ``~`` where it is spread widely; or why there is none."""
    if timing is None:
        return "–"
    if timing.error:
        return f"✕ {shown(timing.error)}"
    return f"{'~' * timing.unsteady}{fine(timing.median)}"


def _winner(comparison: Comparison, point: Mapping[str, Any]) -> tuple[str, str]:
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
