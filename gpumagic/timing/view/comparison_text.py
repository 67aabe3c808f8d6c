"""Show a comparison as text: the answer first, then a table, then how it was measured."""

from __future__ import annotations

from collections.abc import Iterable

from gpumagic.display import table
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.view import remarks, verdict
from gpumagic.timing.view.columns import columns_of, legend

# Of a sweep, rows at its beginning and at its end.
_FOLD = table.Fold(24, 12, "… {} more; to_pandas() has all")


def text(comparison: Comparison) -> str:
    """For terminals, 100 columns."""
    columns = columns_of(comparison)
    longest = max(map(len, comparison.devices), default=0)
    wrong = [f"! {line}" for line in verdict.wrong(comparison)]
    answer = _lines([*wrong, *verdict.answer(comparison)], "")
    changed = [f"{where.ljust(longest)}  {by}" for where, by in remarks.change(comparison)]
    changed += filter(None, [remarks.differences(comparison)])
    notes = [*legend(columns), *remarks.measured(comparison), remarks.machine(comparison)]
    parts = [
        # The code belongs to the answer.
        f"{answer}\n  {comparison.title}",
        _lines((f"! {line}" for line in remarks.problems(comparison)), "  "),
        "\n".join(table.lines(columns, "  ", _FOLD)),
        "  against the earlier run\n" + _lines(changed, "    ") if changed else "",
        _lines(notes, "  "),
    ]
    return "\n\n".join(filter(None, parts))


def _lines(lines: Iterable[str], margin: str) -> str:
    return "\n".join("\n".join(table.wrapped(line, margin)) for line in lines)
