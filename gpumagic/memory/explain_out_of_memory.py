"""Explain an error for want of GPU memory: from its frames to who holds what, why, and what helps.

None of the user's code is run, the exception stays as it is, and what is returned holds no tensor
and no frame.
"""

from collections.abc import Iterable

from gpumagic import faults
from gpumagic.display.progress_line import ProgressLine
from gpumagic.memory.causes import CERTAIN, LIKELY, Cause, full, graphs
from gpumagic.memory.causes_by_dry_run import by_dry_run, tried
from gpumagic.memory.causes_by_number import by_number
from gpumagic.memory.causes_by_operation import DOING
from gpumagic.memory.out_of_memory import OutOfMemory
from gpumagic.memory.out_of_memory_message import read
from gpumagic.memory.shortage import Situation
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.frames import FailedFrame, failed_frames
from gpumagic.usercode.lines import innermost_of

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
