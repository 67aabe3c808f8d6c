"""Find what would help against an out-of-memory error without computing otherwise.

That is: to free what nobody needs any more, and memory that is there and that this cell cannot
have. Dry runs confirm it where the code can be followed; else the bytes are told alone.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from gpumagic.display.units import size, some
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.shortage import ROUNDED, TORCH
from gpumagic.usercode.syntax import RestOfCode
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.oom_trials import Trials

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


def by_figures(s: OutOfMemoryState) -> tuple[str, list[Lever]] | None:
    """Return a reason that the figures alone prove, and its levers: memory only others can use."""
    total, on, short = s.device.total, s.name, s.short_by
    if total is not None and s.wanted > total:
        return f"{size(s.wanted)} at once is more than the {size(total)} that {on} has in all", []
    for find in (_limit, _pieces, _pools, _processes):
        if (found := find(s, total or 0, max(short, 1))) is not None:
            return found
    return None


def _limit(s: OutOfMemoryState, total: int, short: int) -> tuple[str, list[Lever]] | None:
    """Check for a limit on this process, or on its framework."""
    on, limit, library = s.name, s.capacity, s.shortage.library
    room = (s.device.free or 0) + (s.device.reserved or 0)
    if library != TORCH:
        own = next((p.limit for p in s.device.pools if p.framework == library), None)
        if own is None or own != limit or limit + short > room:
            return None
        why = f"{library} may take {size(limit)} of the {size(total)} that {on} has"
        do = f"`%env XLA_PYTHON_CLIENT_MEM_FRACTION={_SHARE}` before JAX starts, in a new kernel"
        gives = max(int(_SHARE * total) - limit, 0)
        return f"{why}: 75 % by default", [Lever(do, gives)] * (library == "JAX")
    limit = s.shortage.total or total
    if limit >= total or short > total - limit:
        return None
    why = f"this process may have {size(limit)} of the {size(total)} that {on} has"
    do = "`torch.cuda.set_per_process_memory_fraction(1.0)`"
    if torch_here().cuda.mem_get_info(s.shortage.ordinal)[1] <= limit:
        why = f"{why}, by a limit of MPS, of its container or of a vGPU"
        do = "raise that limit (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, or ask who set it)"
    return why, [Lever(do, total - limit)]


def _pieces(s: OutOfMemoryState, total: int, short: int) -> tuple[str, list[Lever]] | None:
    """Enough is unallocated, but not in one piece."""
    # Figures read from a text are rounded.
    margin = 0 if s.shortage.exact else ROUNDED * s.capacity
    if s.short_by > -margin or not s.wanted or s.shortage.library != TORCH:
        return None
    unused = (s.device.reserved or 0) - (s.device.allocated or 0)
    why = (
        f"{size(unused)} are reserved by torch but unallocated, in pieces too small for "
        f"{size(s.wanted)} at once"
    )
    if any(_EXPANDABLE in os.environ.get(name, "") for name in _CONF):
        return why, []
    do = f'`os.environ["{_CONF[0]}"] = "{_EXPANDABLE}"` before torch is imported joins them'
    return why, [Lever(do, unused)]


def _pools(s: OutOfMemoryState, total: int, short: int) -> tuple[str, list[Lever]] | None:
    """Check whether another framework in this process has reserved more than it uses."""
    for pool in s.device.pools:
        unused = (pool.taken or 0) - (pool.used or 0)
        if unused >= short and pool.framework != s.shortage.library:
            has = f"{size(pool.taken)} of {s.name}, of which it uses {size(pool.used)}"
            why = f"{pool.framework} in this process has taken {has}"
            return why, [Lever(_NO_POOL[pool.framework], unused)]
    return None


def _processes(s: OutOfMemoryState, total: int, short: int) -> tuple[str, list[Lever]] | None:
    """Other processes hold more than this one lacks, and more than it has."""
    held = s.device.others or 0
    if held < max(short, s.device.allocated or 0):
        return None
    named = some(name for name, _ in s.device.others_by_name)
    why = f"other processes hold {size(held)} of {s.name}"
    return why + (f": {named}" if named else ""), [*other_gpu(s, None)]


def other_gpu(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Propose another GPU with room for the cell's need and for the variables it reads here."""
    torch = torch_here()
    if torch is None or s.shortage.library != TORCH or (t is not None and t.loop is not None):
        return
    whole = t.whole if t is not None else None
    reads = s.read | s.rests[-1].read_anywhere
    brought = sum(each.nbytes for each in s.storages if each.roots & reads)
    needed = max(whole.needs or 0 if whole is not None else 0, s.wanted) + brought
    for ordinal in range(torch.cuda.device_count()):
        free = torch.cuda.mem_get_info(ordinal)[0]
        if ordinal != s.shortage.ordinal and free >= needed:
            yield Lever(f"`%%ongpu {ordinal}`: so much is free there", free)
            return


def free_kept(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Outputs and errors of earlier cells; the error that an `except` block handles."""
    if s.worth(s.kept):
        do = "`%gpufree` frees what outputs and earlier errors hold"
        yield Lever(do, s.kept, _fits(t, s.kept))
    held = s.alone([s.handled], in_frames=True)
    if s.worth(held):
        yield Lever("retry after the `except` block, which keeps the frames of its error", held)


def _fits(t: "Trials | None", gives: int) -> bool | None:
    whole = t.whole if t is not None else None
    return None if whole is None or whole.needs is None else whole.fits(whole.needs, gives)


def delete(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """Propose to delete the largest variables that nothing reads any more, as many as needed."""
    for n, rest in enumerate(s.rests):
        trial = None if t is None else t.whole if rest.frame.at_top else t.every[n]
        needs = trial.needs if trial is not None and trial.is_short else None
        lacking = s.short_by if trial is None or needs is None else needs - trial.room
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
        if trial is None or needs is None:
            yield Lever(do, gives)
            continue
        freed = gives if "gone" in changed else 0  # else the dry run itself frees it
        then = trial.needed(**changed)
        if then is not None and then - freed < needs:
            yield Lever(do, gives, trial.fits(then, freed))


def _unread(s: OutOfMemoryState, rest: RestOfCode, lacking: int) -> tuple[str, ...]:
    """Return a frame's variables that the rest of the code does not read, the largest first."""
    frame, at_top = rest.frame, rest.frame.at_top
    # A rerun needs the variables that this code made before, unless it assigns them again.
    needed = (s.read if at_top else rest.read) | (rest.made_before - rest.made_now)
    free = {s.local(frame, n): n for n in frame.scope.local if n not in needed}
    groups: list[list[str]] = []
    for row in s.device.holders:
        paths = [row.path, *(a for a in row.aliases if at_top and a in s.namespace)]
        if all(path in free for path in paths):
            groups.append(paths)
    sizes = sorted(((s.alone(g, in_frames=not at_top), g) for g in groups), reverse=True)
    chosen: list[str] = []
    for _, paths in sizes:
        enough = s.alone(chosen, in_frames=not at_top) >= max(lacking, 1)
        if not enough and s.worth(s.alone([*chosen, *paths], in_frames=not at_top)):
            chosen += (path for path in paths if path not in chosen)
    return tuple(free[path] for path in chosen)
