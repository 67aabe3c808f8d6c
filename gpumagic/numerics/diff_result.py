"""Record and show the operations at which two runs of the same code part."""

from dataclasses import dataclass

from gpumagic.display import table
from gpumagic.display.table import Shown, block, coded
from gpumagic.display.units import duration, many


@dataclass(frozen=True)
class Divergence:
    """Record one operation whose results differ though its inputs agree."""

    where: str  # "In [3], line 7: `x.softmax(-1)` (aten._softmax)"
    line: int | None
    why: str  # in words; empty if the operation itself makes the difference
    largest: float  # the largest difference; infinite if only one is a number
    scale: float  # the largest magnitude of the results
    at: tuple[int, ...]  # the index of that difference
    values: tuple[str, ...]  # there, on each side
    inputs: float  # how far the inputs differ, relative to their largest magnitude
    choice: bool  # among numbers that are equal within the tolerance

    @property
    def difference(self) -> str:
        """``"0.31 of 0.92"``."""
        return f"{self.largest:.2g} of {self.scale:.2g}"


@dataclass(frozen=True, repr=False)
class NumericDiff(Shown):
    """Record where two devices, or two dtypes, part."""

    sides: tuple[str, ...]  # the devices or dtypes
    code: str
    found: tuple[Divergence, ...]  # in the order in which they ran
    operations: int  # that were compared
    closest: float  # the largest relative difference within the tolerance
    allowed: float  # that tolerance
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

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
    said, found = " and ".join(diff.sides), diff.first
    ran = f"{many(diff.operations, 'operation')} compared in {duration(diff.seconds)}, on copies"
    if found is None:
        largest = f"largest difference {diff.closest:.0e}, tolerance {diff.allowed:.2g}"
        return [f"{said} agree: {largest if diff.closest else 'equal'}", *diff.notes, ran]
    values = ", ".join(f"{v} on {side}" for v, side in zip(found.values, diff.sides, strict=True))
    values += f" at {list(found.at)}" * bool(found.at)
    inputs = f"inputs agreed to {found.inputs:.0e}" if found.inputs else "inputs were equal"
    numbers = [found.why, f"max. difference {found.difference}: {values}", inputs]
    how = "agree but for a choice" if diff.agree else "part"
    return [f"{said} {how} at {found.where}", "; ".join(filter(None, numbers)), *diff.notes, ran]


def _others(diff: NumericDiff) -> list[table.Column]:
    """Return a table of the divergences that are not in the headline."""
    rows = [each for each in diff.found if each is not diff.first]
    wheres = [each.where.replace("`", "") for each in rows]
    columns = [
        table.Column("also at", wheres, fit="cut", notes=[each.why for each in rows]),
        table.Column("difference", [each.difference for each in rows]),
        *(table.Column(s, [each.values[n] for each in rows]) for n, s in enumerate(diff.sides)),
    ]
    return columns if rows else []
