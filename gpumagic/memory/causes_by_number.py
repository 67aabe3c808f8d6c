"""Tell by dry runs of the cell which of its numbers decides the peak, and the largest that fits."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from gpumagic.display.units import size, some
from gpumagic.memory.causes import Cause, full
from gpumagic.memory.dry_peaks import LIMIT_S, DryPeaks, largest_that_fits
from gpumagic.memory.out_of_memory import Remedy
from gpumagic.memory.shortage import Situation
from gpumagic.mismatch.read.syntax import stored
from gpumagic.usercode.variables import names_read

# A smaller number is hardly that of samples; so many are tried, the largest first, and so many
# told: which of them can be another, who wrote them knows.
_LEAST, _MOST, _TOLD = 10, 4, 2
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
        lines = sorted({node.lineno for node in self.nodes})
        each = "each " if len(self.nodes) > 1 else ""
        return f"{each}{self.value:,} in line{'s' * (len(lines) > 1)} {some(map(str, lines))}"


def by_number(s: Situation) -> Cause | None:
    """A number of the cell, or of the notebook, is larger than fits."""
    peaks = DryPeaks(s, s.rests[-1]) if s.rests and s.rests[-1].frame.at_top else None
    needs = peaks.needed() if peaks is not None and peaks.possible else None
    if peaks is None or needs is None or needs <= (room := peaks.room_to_spare()):
        return None
    found: list[tuple[_Number, Remedy]] = []
    for number in sorted(_numbers(peaks, s.rests[-1].loops), key=lambda n: -n.value)[:_MOST]:
        half = number.needed(peaks, number.value // 2)
        if half is not None and needs - half >= _DECIDES * needs:
            remedy = _largest(number, peaks, needs, room)
            found += [(number, remedy)] if remedy is not None else []
        if found and (len(found) == _TOLD or s.tried_s > LIMIT_S):
            break
    if not found:
        return None
    remedies = tuple(remedy for _, remedy in found)
    if needs < s.held():  # then that is rather why
        all_in_use = full(s)
        return replace(all_in_use, remedies=(*all_in_use.remedies, *remedies))
    why = f"{found[0][0]} needs {size(needs)} beside what is held, and {size(room)} are left for it"
    return Cause("number", why, remedies)


def _numbers(peaks: DryPeaks, loops: Iterable[ast.stmt]) -> Iterator[_Number]:
    code = ast.Module(peaks.code, [])
    for name in set(names_read(code)).difference(*map(stored, loops)):
        value = peaks.frame.scope.name(name)
        if type(value) is int and value >= _LEAST:
            yield _Number(value, name, [])
    standing: dict[int, list[ast.Constant]] = {}
    # `x[i:i + 512]`: a shorter part alone would leave out what lies between it and the next.
    slices = [node for node in ast.walk(code) if isinstance(node, ast.Slice)]
    bounds = [end for each in slices for end in (each.lower, each.upper) if type(end) is ast.BinOp]
    apart = {getattr(node, "value", None) for end in bounds for node in ast.walk(end)}
    for node in ast.walk(code):
        if not isinstance(node, ast.Constant) or node.value in apart:
            continue
        if type(node.value) is int and node.value >= _LEAST:
            standing.setdefault(node.value, []).append(node)
    for value, nodes in standing.items():
        yield _Number(value, "", nodes)


def _largest(number: _Number, peaks: DryPeaks, needs: int, room: int) -> Remedy | None:
    # One sample alone is often refused: by a layer that normalizes over them.
    values = range(2, number.value + 1)
    found = largest_that_fits(values, partial(number.needed, peaks), needs, room)
    if found is None:
        return None
    fits, then = found
    do = f"`{number.name} = {fits}`" if number.name else f"{fits:,}"
    was = f"{number.value:,}" if number.name else str(number)
    # What is followed of a loop is two passes.
    shown = None if peaks.loops else True
    return Remedy(f"{do} instead of {was} saves", needs - then, shown)
