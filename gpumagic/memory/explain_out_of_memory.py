"""Explain an out-of-memory error: what was needed, who holds memory, why, what helps.

None of the user's code runs, except in dry runs, which find the largest number in the cell that
fits. The exception stays as it is, and the result holds no tensor and no frame.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from gpumagic import faults
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import size, some
from gpumagic.memory.allocator import read
from gpumagic.memory.causes import CERTAIN, LIKELY, Cause, full, graphs
from gpumagic.memory.causes_by_trial import DOING, by_dry_run, tried
from gpumagic.memory.out_of_memory import OutOfMemory, Remedy
from gpumagic.memory.shortage import LIMIT_S, DryPeaks, Situation, largest_that_fits
from gpumagic.mismatch.syntax import stored
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.frames import FailedFrame, failed_frames
from gpumagic.usercode.lines import innermost_of
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


_REMEDIES = 5


def explain_out_of_memory(
    error: BaseException, *, earlier: Iterable[BaseException] = ()
) -> OutOfMemory | None:
    """Say what an error of torch's is about; see `gpumagic.explain_out_of_memory`."""
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error for want of memory"):
        found = read(error)
        if found is not None:
            said, shortage = found
            frames = _frames(said, error)
            where = innermost_of(said.__traceback__) or innermost_of(error.__traceback__)
            if frames and where is not None:
                failed = frames[0].failed
                text = where.source if failed is None else frames[0].text(failed)
                with ProgressLine(shell()) as line:
                    s = Situation(shortage, said, error, frames, user_namespace(), earlier, line)
                    return _told(s, text, where.line, where.label)
    return None


def _frames(said: BaseException, error: BaseException) -> list[FailedFrame]:
    """The user's frames, from the deepest to that of the cell."""
    found = failed_frames(said.__traceback__)
    if error is not said and not any(frame.at_top for frame in found):
        # It was caught, and another raised from it.
        found += [frame for frame in failed_frames(error.__traceback__) if frame.at_top]
    return found


def _told(s: Situation, expression: str, line: int, label: str) -> OutOfMemory:
    cause, others = _cause(s)
    every = [remedy for each in (cause, *others) for remedy in each.remedies]
    remedies = sorted(every, key=lambda remedy: -(remedy.gives or 0))
    return OutOfMemory(
        expression=expression,
        line=line,
        label=label,
        wanted=s.shortage.wanted,
        device=s.device,
        cause=cause.kind,
        reason=cause.reason,
        remedies=tuple(remedies[:_REMEDIES]),
        traceback_holds=s.traceback_holds,
    )


def _cause(s: Situation) -> tuple[Cause, list[Cause]]:
    """The cause, and others whose remedies would help too."""
    for certain in CERTAIN:
        if (found := certain(s)) is not None:
            also = (*DOING, by_number) if found.kind == "too large" else ()
            return found, [more for each in also if (more := each(s)) is not None]
    idle = [found for each in (graphs, *LIKELY) if (found := each(s)) is not None]
    enough = next((n for n, found in enumerate(idle) if found.gives >= s.short_by), None)
    if enough is not None:
        idle.insert(0, tried(s, idle.pop(enough)))
    fits = idle[0].remedies[0].fits if enough is not None else False
    sought = DOING if fits else (*DOING, by_dry_run)
    doing = [found for each in sought if (found := each(s)) is not None]
    shown = any(remedy.fits for found in (*doing, *idle) for remedy in found.remedies)
    # Of a loop that keeps more each time two passes say nothing.
    if not shown and not any(found.kind == "loop" for found in doing):
        doing += filter(None, [by_number(s)])
    # What is no longer needed, unless more than that is wanted.
    causes = [*doing, *idle] if fits is False else [*idle, *doing]
    # What each pass of a loop needs tells no name; and what is little by the side of another is
    # not why.
    most = max((row.nbytes for row in s.device.holders), default=0)
    minor = [each for each in idle if not each.remedies[0].fits and 2 * each.gives < most]
    causes.sort(key=lambda cause: 2 * (cause in minor) + (cause.kind == "loop"))
    return (causes[0], causes[1:]) if causes and causes[0] not in minor else (full(s), causes)
