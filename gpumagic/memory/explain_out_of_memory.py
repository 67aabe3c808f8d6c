"""Explain an out-of-memory error of any framework: what was needed, who holds it, what helps.

None of the user's code runs, except in dry runs. The exception stays as it is, and the result holds
no tensor and no frame. What helps is first to free what nobody needs any more, and memory that is
there and that this cell cannot have; `levers_by_trial.py` has other ways to compute the same.
"""

import ast
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from gpumagic import faults
from gpumagic.display.progress_line import ProgressLine
from gpumagic.display.units import size, some
from gpumagic.memory import holders_by_name
from gpumagic.memory.oom_state import ROUNDED, TORCH, OutOfMemoryState, read
from gpumagic.memory.out_of_memory import Lever, OutOfMemory
from gpumagic.usercode.files import UserLine, innermost_of, shell, user_namespace
from gpumagic.usercode.frames import FailedFrame, RestOfCode, failed_frames
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.oom_trials import Trials

_MOST = 4
_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_NO_POOL = {
    "JAX": '`os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"` before JAX is imported, in a '
    "new kernel",
    "TensorFlow": "`tf.config.experimental.set_memory_growth(gpu, True)` before TensorFlow starts, "
    "in a new kernel",
    "CuPy": "`cupy.get_default_memory_pool().free_all_blocks()`",
}
_SHARE = 0.95


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
            name = f"cuda:{shortage.ordinal}"
            here = any(each.device == name for each in holders_by_name.figures())
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
        adds=loop.need.grows if loop is not None and loop.need is not None else None,
        adds_to=s.adds_to(loop.rest) if loop is not None else "",
        stale=() if trial is None else trial.stale_holders,
    )


def _reason(s: OutOfMemoryState, t: "Trials | None") -> str:
    if t is not None and (trial := t.loop or t.whole) is not None and trial.need is not None:
        if t.loop is None:
            left = size(max(trial.room, 0))
            return f"the code needs {size(trial.need.most)} more, and only {left} is free for it"
        line, grows = trial.rest.loops[0].lineno, size(trial.need.grows)
        return f"each pass of the loop in line {line} keeps {grows} more"
    first = s.device.holders[0] if s.device.holders else None
    most = f", most of it by {first.path} ({size(first.nbytes)})" if first else ""
    left = f"; {size(s.short_by)} too little is left" if s.short_by > 0 else ""
    return f"{size(s.device.allocated)} are in use{most}{left}"


# -- memory that only others can use, or that nobody needs any more
def by_figures(s: OutOfMemoryState) -> tuple[str, list[Lever]] | None:
    """Return a reason that the figures alone prove, and its levers: memory only others can use."""
    total, on, device = s.device.total or 0, s.name, s.device
    short, torchs = max(s.short_by, 1), s.shortage.library == TORCH
    if total and s.wanted > total:
        return f"{size(s.wanted)} at once is more than the {size(total)} that {on} has in all", []
    if found := _limit_of_torch(s, total, short) if torchs else _limit_of_library(s, total, short):
        return found
    # Enough is unallocated, but not in one piece. The figures are rounded.
    if torchs and s.wanted and s.short_by <= -ROUNDED * s.capacity:
        unused = (device.reserved or 0) - (device.allocated or 0)
        pieces = f"in pieces too small for {size(s.wanted)} at once"
        why = f"{size(unused)} are reserved by torch but unallocated, {pieces}"
        joined = any(_EXPANDABLE in os.environ.get(name, "") for name in _CONF)
        do = f'`os.environ["{_CONF[0]}"] = "{_EXPANDABLE}"` before torch is imported joins them'
        return why, [] if joined else [Lever(do, unused)]
    for pool in device.pools:
        unused = (pool.taken or 0) - (pool.used or 0)
        if unused >= short and pool.framework != s.shortage.library:
            has = f"{size(pool.taken)} of {on}, of which it uses {size(pool.used)}"
            why = f"{pool.framework} in this process has taken {has}"
            return why, [Lever(_NO_POOL[pool.framework], unused)]
    if (held := device.others or 0) >= max(short, device.allocated or 0):
        named = some(name for name, _ in device.others_by_name)
        why = f"other processes hold {size(held)} of {on}" + (f": {named}" if named else "")
        return why, [*other_gpu(s, None)]
    return None


def _limit_of_torch(s: OutOfMemoryState, total: int, short: int) -> tuple[str, list[Lever]] | None:
    """Check for a limit on this process."""
    limit = s.shortage.total or total
    if limit >= total or short > total - limit:
        return None
    why = f"this process may have {size(limit)} of the {size(total)} that {s.name} has"
    do = "`torch.cuda.set_per_process_memory_fraction(1.0)`"
    if torch_here().cuda.mem_get_info(s.shortage.ordinal)[1] <= limit:
        why = f"{why}, by a limit of MPS, of its container or of a vGPU"
        do = "raise that limit (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, or ask who set it)"
    return why, [Lever(do, total - limit)]


def _limit_of_library(
    s: OutOfMemoryState, total: int, short: int
) -> tuple[str, list[Lever]] | None:
    """Check for the limit of JAX's or another library's own allocator."""
    limit, library = s.capacity, s.shortage.library
    own = next((pool.limit for pool in s.device.pools if pool.framework == library), None)
    if own != limit or limit + short > (s.device.free or 0) + (s.device.reserved or 0):
        return None
    why = f"{library} may take {size(limit)} of the {size(total)} that {s.name} has"
    do = f"`%env XLA_PYTHON_CLIENT_MEM_FRACTION={_SHARE}` before JAX starts, in a new kernel"
    gives = max(int(_SHARE * total) - limit, 0)
    return f"{why}: 75 % by default", [Lever(do, gives)] if library == "JAX" else []


def other_gpu(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Propose another GPU with room for the cell's need and for the variables it reads here."""
    torch = torch_here()
    if torch is None or s.shortage.library != TORCH or (t is not None and t.loop is not None):
        return
    need = t.whole.need if t is not None and t.whole is not None else None
    reads = s.read | s.rests[-1].read_anywhere
    needed = max(need.most if need else 0, s.wanted)
    needed += sum(each.nbytes for each in s.storages if each.roots & reads)
    for ordinal in range(torch.cuda.device_count()):
        free = torch.cuda.mem_get_info(ordinal)[0]
        if ordinal != s.shortage.ordinal and free >= needed:
            yield Lever(f"`%%ongpu {ordinal}`: so much is free there", free)
            return


def free_kept(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Outputs and errors of earlier cells; the error that an `except` block handles."""
    if s.worth(s.kept):
        whole = t.whole if t is not None else None
        fits = whole.fits(whole.need, s.kept) if whole is not None and whole.need else None
        yield Lever("`%gpufree` frees what outputs and earlier errors hold", s.kept, fits)
    held = s.alone([s.handled], in_frames=True)
    if s.worth(held):
        yield Lever("retry after the `except` block, which keeps the frames of its error", held)


def delete(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Propose to delete the largest variables that nothing reads any more, as many as needed."""
    for n, rest in enumerate(s.rests):
        trial = None if t is None else t.whole if rest.frame.at_top else t.every[n]
        need = trial.need if trial is not None and trial.is_short else None
        lacking = s.short_by if trial is None or need is None else need.most - trial.room
        names = _unread(s, rest, lacking)
        if not names or rest.failed is None:
            continue
        gives = s.alone([s.local(rest.frame, n) for n in names], in_frames=not rest.frame.at_top)
        if set(names) & (rest.overwritten | rest.read_anywhere):
            code = f"{' = '.join(names)} = None" if rest.loops else f"del {', '.join(names)}"
            timed = rest.frame.filename.startswith("<timed")  # `%%time` counts its own lines
            do = f"`{code}` before {'that line' if timed else f'line {rest.failed.lineno}'}"
            changed: dict[str, Any] = {"before": code}
        else:
            do = f"`%gpufree {' '.join(names)}`, which nothing reads any more"
            changed = {"gone": names}
        if trial is None or need is None:
            yield Lever(do, gives)
            continue
        freed = gives if "gone" in changed else 0  # else the dry run itself frees it
        then = trial.tried(**changed)
        if then is not None and then.most - freed < need.most:
            yield Lever(do, gives, trial.fits(then, freed))


def _unread(s: OutOfMemoryState, rest: RestOfCode, lacking: int) -> tuple[str, ...]:
    """Return a frame's variables that the rest of the code does not read, the largest first."""
    frame, at_top = rest.frame, rest.frame.at_top
    # A rerun needs the variables that this code made before, unless it assigns them again.
    needed = (s.read if at_top else rest.read) | (rest.made_before - rest.made_now)
    free = {s.local(frame, n): n for n in frame.scope.local if n not in needed}

    def gives(paths: list[str]) -> int:
        return s.alone(paths, in_frames=not at_top)

    rows = (
        [r.path, *(a for a in r.aliases if a in s.namespace and at_top)] for r in s.device.holders
    )
    groups = [paths for paths in rows if all(path in free for path in paths)]
    chosen: list[str] = []
    for paths in sorted(groups, key=gives, reverse=True):
        if gives(chosen) < max(lacking, 1) and s.worth(gives([*chosen, *paths])):
            chosen += (path for path in paths if path not in chosen)
    return tuple(free[path] for path in chosen)


def load_on_host(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Propose to read a checkpoint into the host's memory: its tensors were saved on this GPU."""
    call = s.frames[0].failed
    if torch_here() is not None and isinstance(call, ast.Call) and len(call.args) == 1:
        is_load = s.frames[0].scope.value(call.func) is torch_here().load
        if is_load and not any(key.arg in ("map_location", None) for key in call.keywords):
            do = '`map_location="cpu"` in that `torch.load`; `load_state_dict` copies from there'
            yield Lever(do, s.traceback_holds + s.wanted)


# -- the choice
_Find = Callable[[OutOfMemoryState, Any], Iterator[Lever]]
_FREE: tuple[_Find, ...] = (load_on_host, free_kept, delete)


def _levers(t: "Trials | None") -> Iterator[tuple[_Find, ...]]:
    """Yield groups of levers; later ones cost the user more."""
    if t is None:
        yield from (_FREE, (other_gpu,))
        return
    from gpumagic.memory.levers_by_trial import keep_less, no_graph, otherwise, rewritten, smaller

    # Where each pass keeps more, what is freed lets the loop run longer, and no more than that.
    less = rewritten, keep_less, no_graph
    yield from (_FREE, less) if t.loop is None else (less, _FREE)
    yield (smaller, otherwise, other_gpu)


def _chosen(s: OutOfMemoryState, t: "Trials | None") -> list[Lever]:
    """Return the levers that let the cell fit, the cheapest first; if none, all that help."""
    found: list[Lever] = []
    for group in _levers(t):
        for lever in (each for find in group for each in find(s, t)):
            found.append(lever)
            # One thing to free is enough, and of other code there is a choice.
            if sum(_is_enough(s, each) for each in found) == (1 if group == _FREE else 2):
                break
        if any(_is_enough(s, each) for each in found):
            found = [each for each in found if _is_enough(s, each)]
            break
    return found[:_MOST]


def _is_enough(s: OutOfMemoryState, lever: Lever) -> bool:
    return lever.fits is True or (lever.fits is None and (lever.gives or 0) >= s.short_by)
