"""Explain an out-of-memory error of any framework: what was needed, who holds it, what helps.

None of the user's code runs, except in dry runs. The exception stays as it is, and the result holds
no tensor and no frame.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpumagic import faults
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import size
from gpumagic.memory import holders_by_name
from gpumagic.memory.levers import by_figures, delete, free_kept, other_gpu
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.out_of_memory import Lever, OutOfMemory
from gpumagic.memory.shortage import TORCH, read
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.frames import FailedFrame, failed_frames
from gpumagic.usercode.lines import UserLine, innermost_of

if TYPE_CHECKING:
    from gpumagic.memory.oom_trials import Trials

_MOST = 4


def explain_out_of_memory(
    error: BaseException, *, earlier: Iterable[BaseException] = ()
) -> OutOfMemory | None:
    """Explain an error for want of GPU memory, and what would help.

    Parameters
    ----------
    error : BaseException
        As it was caught, from torch, JAX, TensorFlow or CuPy: its traceback is read, while its
        frames are there.
    earlier : iterable of BaseException
        Earlier exceptions that held memory when it was raised.

    Returns
    -------
    OutOfMemory or None
        None for any other error.
    """
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error for want of memory"):
        found = read(error)
        if found is not None:
            said, shortage = found
            frames = _frames(said, error)
            where = innermost_of(said.__traceback__) or innermost_of(error.__traceback__)
            here = any(
                each.device == f"cuda:{shortage.ordinal}" for each in holders_by_name.figures()
            )
            if frames and where is not None and here:
                state = OutOfMemoryState(shortage, said, error, frames, user_namespace(), earlier)
                with ProgressLine(shell()) as line:
                    return _explained(state, where, _trials(state, line))
    return None


def _frames(said: BaseException, error: BaseException) -> list[FailedFrame]:
    """Return the user's frames, from the deepest to the cell's."""
    found = failed_frames(said.__traceback__)
    if error is not said and not any(frame.at_top for frame in found):
        # It was caught, and another raised from it.
        found += [frame for frame in failed_frames(error.__traceback__) if frame.at_top]
    return found


def _trials(state: OutOfMemoryState, line: ProgressLine) -> "Trials | None":
    """Return the dry runs; None for frameworks other than torch, which they cannot follow."""
    if state.shortage.library != TORCH:
        return None
    from gpumagic.memory.oom_trials import Trials

    return Trials(state, line)


def _explained(s: OutOfMemoryState, where: UserLine, t: "Trials | None") -> OutOfMemory:
    failed, settled = s.frames[0].failed, by_figures(s)
    if settled is None or (t is not None and s.wanted > (s.device.total or s.wanted)):
        levers = _chosen(s, t)
    else:
        levers = settled[1]
    loop = t.loop if t is not None else None
    trial = loop or (t.whole if t is not None else None)
    return OutOfMemory(
        expression=where.source if failed is None else s.frames[0].text(failed),
        line=where.line,
        label=where.label,
        wanted=s.shortage.wanted,
        device=s.device,
        reason=settled[0] if settled is not None else _reason(s, t),
        levers=tuple(levers),
        traceback_holds=s.traceback_holds,
        adds=loop.grows if loop is not None else None,
        adds_to=s.adds_to(loop.rest) if loop is not None else "",
        stale=() if trial is None else trial.stale_holders,
    )


def _chosen(s: OutOfMemoryState, t: "Trials | None") -> list[Lever]:
    """Return the levers that let the cell fit, the cheapest first; if none, all that help."""
    found: list[Lever] = []

    def enough(lever: Lever) -> bool:
        return lever.fits is True or (lever.fits is None and (lever.gives or 0) >= s.short_by)

    for group, most in _levers(t):
        for find in group if not any(map(enough, found)) else ():
            for lever in find(s, t) if sum(map(enough, found)) < most else ():
                found.append(lever)
                if sum(map(enough, found)) >= most:
                    break
    if any(map(enough, found)):
        found = [lever for lever in found if enough(lever)]
    return found[:_MOST]


_Find = Callable[[OutOfMemoryState, Any], Iterator[Lever]]


def _levers(t: "Trials | None") -> Iterator[tuple[tuple[_Find, ...], int]]:
    """Yield groups of levers, and how many of each are enough; later ones cost the user more."""
    free = (free_kept, delete), 1
    if t is None:
        yield from (free, ((other_gpu,), 1))
        return
    from gpumagic.memory.levers_by_trial import (
        aligned,
        keep_less,
        no_graph,
        otherwise,
        smaller,
    )

    # Where each pass keeps more, what is freed lets the loop run longer, and no more than that.
    yield (aligned,), 1
    less = (keep_less, no_graph), 2
    yield from (free, less) if t.loop is None else (less, free)
    yield (smaller, otherwise, other_gpu), 2


def _reason(s: OutOfMemoryState, t: "Trials | None") -> str:
    if t is not None and t.loop is not None:
        line = t.loop.rest.loops[0].lineno
        return f"each pass of the loop in line {line} keeps {size(t.loop.grows)} more"
    if t is not None and t.whole is not None:
        left = size(max(t.whole.room, 0))
        return f"the code needs {size(t.whole.needs)} more, and only {left} is free for it"
    first = s.device.holders[0] if s.device.holders else None
    most = f", most of it by {first.path} ({size(first.nbytes)})" if first else ""
    left = f"; {size(s.short_by)} too little is left" if s.short_by > 0 else ""
    return f"{size(s.device.allocated)} are in use{most}{left}"
