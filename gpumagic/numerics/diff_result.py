"""Record and show the operations at which two runs of the same code part."""

from dataclasses import dataclass
from typing import Any

from gpumagic.display import table
from gpumagic.display.table import Shown, block, coded
from gpumagic.display.units import duration, many

_MOST_ROWS = 4


@dataclass(frozen=True)
class Gap:
    """The largest difference between two results."""

    excess: float = 0.0  # in units of the tolerance
    rtol: float = 0.0  # the relative tolerance, of the loosest dtype on the way here
    largest: float = 0.0  # infinite if only one is a number
    scale: float = 0.0  # the largest finite magnitude
    at: tuple[int, ...] = ()
    values: tuple[Any, ...] = ()  # there, on each side
    exact: bool = False  # integers or bools
    choice: bool = False  # integers that choose among equal values
    noise: bool = False  # rounding errors of cancelled terms are all that is left

    @property
    def relative(self) -> float:
        """The largest difference relative to the largest magnitude."""
        return self.largest / self.scale if self.scale else self.largest

    def __str__(self) -> str:
        return f"{self.largest:.2g} of {self.scale:.2g}"


@dataclass(frozen=True)
class Divergence:
    """Record one operation whose results differ though its inputs agree."""

    where: str  # "In [3], line 7: `x.softmax(-1)` (aten._softmax)"
    line: int | None
    why: str  # in words; empty if the operation itself makes the difference
    gap: Gap
    inputs: float  # how far the inputs differ, relative to their largest magnitude
    choice: bool  # among numbers that are equal within the tolerance

    def on(self, side: int) -> str:
        """The value on one side, at the largest difference."""
        value = self.gap.values[side]
        return f"{value:.6g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, repr=False)
class NumericDiff(Shown):
    """Record where two devices, or two dtypes, part."""

    sides: tuple[str, ...]  # the devices or dtypes
    code: str
    found: tuple[Divergence, ...]  # in the order in which they ran
    recorded: int  # operations of the longer run
    operations: int  # that were compared: the others are of one side alone
    largest: Gap  # the largest one within the tolerance
    notes: tuple[str, ...]
    seconds: float

    @property
    def first(self) -> Divergence | None:
        """The first divergence; a choice only if there is nothing else."""
        return min(self.found, key=lambda each: each.choice, default=None)

    @property
    def agree(self) -> bool:
        """Whether at most choices among equal numbers differ."""
        return all(each.choice for each in self.found)


def text(diff: NumericDiff) -> str:
    """For terminals."""
    first, *others = _lines(diff)
    below = [line for each in others for line in table.wrapped(each, "  ")]
    return "\n".join([first, *below, *table.lines(_others(diff), "  ")])


def html(diff: NumericDiff) -> str:
    """For notebooks."""
    first, *others = map(coded, _lines(diff))
    notes = "".join(f'<div class="gm-note">{line}</div>' for line in others)
    answer = f'<div class="gm-answer{"" if diff.agree else " gm-bad"}">{first}</div>'
    more = table.html(_others(diff)) if len(diff.found) > 1 else ""
    return block(answer + notes + more, "table", "comparison")


def _lines(diff: NumericDiff) -> list[str]:
    """Return the headline, the numbers, and the notes."""
    said, found, largest = " and ".join(diff.sides), diff.first, diff.largest
    count = f"{diff.operations:,} of {many(diff.recorded, 'operation')}"
    ran = f"{count} compared in {duration(diff.seconds)}, on copies"
    if found is None:
        words = f"largest difference {largest.relative:.0e}, tolerance {largest.rtol:.2g}"
        return [f"{said} agree: {words if largest.largest else 'equal'}", *diff.notes, ran]
    values = ", ".join(f"{found.on(n)} on {side}" for n, side in enumerate(diff.sides))
    values += f" at {list(found.gap.at)}" * bool(found.gap.at)
    inputs = f"inputs agreed to {found.inputs:.0e}" if found.inputs else "inputs were equal"
    numbers = [found.why, f"max. difference {found.gap}: {values}", inputs]
    how = "agree but for a choice" if diff.agree else "part"
    return [f"{said} {how} at {found.where}", "; ".join(filter(None, numbers)), *diff.notes, ran]


def _others(diff: NumericDiff) -> list[table.Column]:
    """Return a table of the divergences that are not in the headline."""
    rows = [each for each in diff.found if each is not diff.first][:_MOST_ROWS]
    wheres = [each.where.replace("`", "") for each in rows]
    columns = [
        table.Column("also at", wheres, fit="cut", notes=[each.why for each in rows]),
        table.Column("difference", [str(each.gap) for each in rows]),
        *(table.Column(side, [each.on(n) for each in rows]) for n, side in enumerate(diff.sides)),
    ]
    return columns if rows else []
