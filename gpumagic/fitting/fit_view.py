"""Show a fit: the answer first, then the curve of what each value needs."""

from collections.abc import Iterator
from itertools import groupby

from gpumagic.display import plot, table
from gpumagic.display.plot import Curve, Frame, Plot, Point
from gpumagic.display.table import block, folded, tag
from gpumagic.display.units import duration, size
from gpumagic.fitting.fit_result import Fit, Largest, Steps, Tried

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_LIMIT = plot.Look("#7d8590", "7 3", "circle")


def text(fit: Fit) -> str:
    """For terminals."""
    lines = [*answer(fit), "", *table.lines(_columns(fit), "  ")]
    return "\n".join([*lines, *(f"  {note}" for note in _notes(fit))])


def html(fit: Fit) -> str:
    """For notebooks."""
    first, *rest = answer(fit)
    bad = any(found.value is None for found in fit.largest)
    parts = [tag("div", first, f"gm-answer{' gm-bad' * bad}"), *(tag("div", each) for each in rest)]
    parts += [tag("div", fit.title, "gm-code gm-title"), curve(fit)]
    parts.append(folded("what each value needs", table.html(_columns(fit))))
    parts += [tag("div", note, "gm-note") for note in _notes(fit)]
    return block("".join(parts), "table", "comparison")


def panel(fit: Fit) -> dict[str, object]:
    """For the monitor; the text has the numbers."""
    return {"title": fit.title, "bars": []}


def answer(fit: Fit) -> Iterator[str]:
    """``batch = 384 is the largest that fits on cuda:0: it needs 14.2 GiB of 15.0 GiB free``."""
    for found in fit.largest:
        yield _answer(fit, found)
    if fit.steps is not None:
        yield _steps(fit.steps)
    elif fit.target is not None:
        yield f"{fit.target:,} in all cannot be reached: no {fit.name} fits"


def _answer(fit: Fit, found: Largest) -> str:
    where = f"{found.where} (virtual)" if found.virtual else found.where
    spare = f"of {size(found.free)} free"
    smallest = fit.tried[0] if fit.tried else None
    if found.value is None:
        least = f": {fit.name} = {smallest.value} needs {_need(smallest)}" if smallest else ""
        return f"no {fit.name} fits on {where}{least} {spare}"
    best = fit.at(found.value)
    how = "a run confirms it" if found.confirmed else "predicted, not run"
    kind = {True: ", with its backward pass", False: ", without a backward pass", None: ""}
    needs = f"it needs {_need(best)} {spare}"
    if fit.values and found.value == fit.values[-1]:
        named = f"the largest that you named is {found.value}"
        return f"all fit on {where}{kind[fit.trains]}: {named}, {needs}; {how}"
    words = "is the largest known to fit" if fit.stopped else "is the largest that fits"
    return f"{fit.name} = {found.value} {words} on {where}{kind[fit.trains]}: {needs}; {how}"


def _need(tried: Tried | None) -> str:
    return size(None if tried is None else tried.needed)


def _steps(steps: Steps) -> str:
    if steps.count == 1:
        return f"{steps.target:,} in all fit at once"
    last = f", the last of {steps.last}" if steps.last != steps.size else ""
    steps_of = f"{steps.count} steps of {steps.size}{last}"
    return f"{steps.target:,} in all: accumulate gradients over {steps_of}"


def _columns(fit: Fit) -> list[table.Column]:
    tried = _telling(fit)
    known = [size(t.predicted) if t.predicted is not None else "" for t in tried]
    measured = ["out of memory" if t.ran is False else _measured(t) for t in tried]
    columns = [
        table.Column(fit.name, [f"{t.value}" for t in tried], number=True, css="gm-code"),
        table.Column("dry run", known, number=True),
        table.Column("run", measured, number=True),
    ]
    for found in fit.largest:
        head = "" if len(fit.largest) == 1 else found.where
        columns.append(table.Column(head, [_verdict(t, found) for t in tried], css="gm-dim"))
    return [column for column in columns if any(column.cells)]


def _telling(fit: Fit) -> list[Tried]:
    """The values that ran, and of others with the same verdicts in a row the first and last."""
    groups = groupby(fit.tried, key=lambda t: [_verdict(t, found) for found in fit.largest])
    rows = [[*group] for _, group in groups]
    return [t for row in rows for t in row if t.ran is not None or t in (row[0], row[-1])]


def _measured(tried: Tried) -> str:
    return "" if tried.measured is None else size(tried.measured)


def _verdict(tried: Tried, found: Largest) -> str:
    if found.value == tried.value:
        return "largest"
    if found.value is not None and tried.value < found.value:
        return "fits"
    need = tried.needed
    return "too large" if need is None or need > found.free else "within the margin"


def _notes(fit: Fit) -> Iterator[str]:
    if fit.stopped:
        yield fit.stopped
    yield from fit.notes
    ran = [t.value for t in fit.tried if t.ran is not None]
    if ran:
        times = "once" if len(ran) == 1 else f"{len(ran)} times"
        yield (
            f"the cell ran {times} ({fit.name} = {', '.join(map(str, ran))}): files that it writes "
            "are written; --dry foretells only"
        )
    dry = sum(t.predicted is not None for t in fit.tried)
    kept = f"{100 * fit.margin:.3g} % of what is free is kept free"
    yield f"{_many(dry, 'dry run')}, {_many(len(ran), 'run')}, {duration(fit.seconds)}; {kept}"


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count != 1)}"


def curve(fit: Fit) -> str:
    """What each value needs, over the values, in SVG; nothing where fewer than two are known."""
    # Far above what there is, nothing is to be seen but a longer line.
    top = 2 * max(found.room for found in fit.largest)
    known = [t for t in fit.tried if t.needed and t.needed <= top]
    if len(known) < 2:
        return ""
    most = max([t.needed or 0 for t in known] + [found.room for found in fit.largest])
    unit, scale = next(u for u in _UNITS if most >= u[1] or u[1] == 2**10)
    ends = known[0].value, known[-1].value
    curves = [_needed(fit, known, scale)]
    for found in fit.largest:
        limit = found.room / scale
        tip = f"{found.where}: {size(found.room)}"
        points = [Point(float(x), limit, limit, limit, tip) for x in ends]
        curves.append(Curve(found.where, _LIMIT, points, []))
    heights = [point.y for one in curves for point in one.points]
    words = {float(t.value): f"{t.value}" for t in known}
    plot = Plot(Frame(), words, heights, curves, ordinal=False, quantity="memory", linear=True)
    label = f"memory that {fit.name} needs: {'; '.join(answer(fit))}"
    return plot.svg(fit.name, lambda y: f"{y:g} {unit}", [], label)


def _needed(fit: Fit, known: list[Tried], scale: int) -> Curve:
    look = next(iter(plot.looks([fit.largest[0].where]).values()))
    points = []
    for tried in known:
        y = (tried.needed or 0) / scale
        by = "a run" if tried.measured is not None else "a dry run"
        tip = f"{fit.name} = {tried.value}: {size(tried.needed)} by {by}"
        points.append(Point(float(tried.value), y, y, y, tip))
    return Curve("needed", look, points, [])
