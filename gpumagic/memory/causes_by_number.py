"""Tell by dry runs of the cell which of its numbers decides the peak, and the largest that fits."""

import ast
import math
from collections.abc import Iterator
from dataclasses import replace

from gpumagic.display.units import size
from gpumagic.fitting.fit_search import largest
from gpumagic.memory.causes import Cause, full
from gpumagic.memory.dry_peaks import DryPeaks
from gpumagic.memory.out_of_memory import Remedy
from gpumagic.memory.shortage import Situation
from gpumagic.usercode.variables import names_read

# A smaller number is hardly that of samples; and so many are tried, the largest first.
_LEAST, _MOST = 10, 3
# It decides if with half of it so much less is needed.
_DECIDES = 0.2


class _Number:
    """A variable that is an int, or an int that stands in the code; both by its value."""

    def __init__(self, value: int, name: str, nodes: list[ast.Constant]) -> None:
        self.value, self.name, self.nodes = value, name, nodes

    def needed(self, peaks: DryPeaks, value: int) -> int | None:
        """What the code needs with another value in its place."""
        try:
            for node in self.nodes:
                node.value = value
            return peaks.needed({self.name: value} if self.name else None)
        finally:
            for node in self.nodes:
                node.value = self.value

    def __str__(self) -> str:
        if self.name:
            return f"`{self.name}` = {self.value:,}"
        return f"{self.value:,} in line {self.nodes[0].lineno}"


def by_number(s: Situation) -> Cause | None:
    """A number of the cell, or of the notebook, is larger than fits."""
    peaks = DryPeaks(s, s.rests[-1]) if s.rests and s.rests[-1].frame.at_top else None
    needs = peaks.needed() if peaks is not None and peaks.possible else None
    if peaks is None or needs is None or needs <= (room := peaks.room_to_spare()):
        return None
    for number in sorted(_numbers(peaks), key=lambda n: -n.value)[:_MOST]:
        half = number.needed(peaks, number.value // 2)
        if half is not None and needs - half >= _DECIDES * needs:
            remedy = _largest(number, peaks, needs, room)
            if remedy is not None:
                return _cause(s, f"{number} needs {size(needs)}", remedy, needs, room)
    return None


def _cause(s: Situation, needs_it: str, remedy: Remedy, needs: int, room: int) -> Cause:
    if needs < s.held():  # then that is rather why
        return replace(full(s), remedies=(remedy,))
    why = f"{needs_it} beside what is held, and {size(room)} are left for it"
    return Cause("number", why, (remedy,))


def _numbers(peaks: DryPeaks) -> Iterator[_Number]:
    code = ast.Module(peaks.code, [])
    for name in names_read(code):
        value = peaks.frame.scope.name(name)
        if type(value) is int and value >= _LEAST:
            yield _Number(value, name, [])
    standing: dict[int, list[ast.Constant]] = {}
    for node in ast.walk(code):
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value >= _LEAST:
            standing.setdefault(node.value, []).append(node)
    for value, nodes in standing.items():
        yield _Number(value, "", nodes)


def _largest(number: _Number, peaks: DryPeaks, needs: int, room: int) -> Remedy | None:
    found: dict[float, float] = {number.value: needs}

    def need(value: float) -> float:
        if value not in found:
            needed = number.needed(peaks, int(value))
            found[value] = math.inf if needed is None else needed
        return found[value]

    # One sample alone is often refused: by a layer that normalizes over them.
    fits = largest(range(2, number.value + 1), need, room)
    if fits is None:
        return None
    do = f"`{number.name} = {int(fits)}`" if number.name else f"{int(fits):,}"
    was = f"{number.value:,}" if number.name else str(number)
    # What is followed of a loop is two passes.
    shown = None if peaks.loops else True
    return Remedy(f"{do} instead of {was} saves", needs - int(need(fits)), shown)
