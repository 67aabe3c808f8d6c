"""Gather a sweep's curves, whoever draws them: a panel for each value of the other variable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic.display import svg
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.crossover import Crossover
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view import verdict


@dataclass(frozen=True)
class Curve:
    """One device's times along the axis, from left to right."""

    where: str
    look: svg.Look
    known: list[tuple[float, Timing]]  # x and a timing with a median
    # Those that ended in an error, and the last of `known` to their left.
    failed: list[tuple[float, Timing, tuple[float, Timing] | None]]


class Panel:
    """The curves along `Comparison.axis`, at one value of the other variable.

    Values that are no numbers lie one beside the other, and no line leads from one to the next:
    then it is `ordinal`.
    """

    def __init__(self, comparison: Comparison, fixed: Mapping[str, Any]) -> None:
        self.fixed = fixed
        self.name = comparison.axis or ""
        values = comparison.sweep[self.name]
        self.ordinal = not all(type(v) in (int, float) for v in values)
        if self.ordinal:
            self.points = [(float(n), value) for n, value in enumerate(values)]
        else:
            self.points = sorted(((float(v), v) for v in values), key=lambda point: point[0])
        looks = svg.looks(comparison.devices)
        self.curves = [self._curve(comparison, where, look) for where, look in looks.items()]
        self.crossovers: list[Crossover] = verdict.crossovers(comparison, fixed)

    def _curve(self, comparison: Comparison, where: str, look: svg.Look) -> Curve:
        curve = Curve(where, look, [], [])
        for x, value in self.points:
            timing = comparison.at(where, {**self.fixed, self.name: value})
            if timing is not None and timing.median:
                curve.known.append((x, timing))
            elif timing is not None and timing.error not in (None, "interrupted"):
                before = curve.known[-1] if curve.known else None
                curve.failed.append((x, timing, before))
        return curve
