"""Find what would help against an out-of-memory error without computing otherwise.

That is: to free what nobody needs any more, and memory that is there and that this cell cannot
have. Dry runs confirm it where the code can be followed; else the bytes are told alone.
"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpumagic.display.units import size, some
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.shortage import ROUNDED, TORCH
from gpumagic.mismatch.syntax import RestOfCode
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.oom_trials import Trial, Trials

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
    """Why the figures alone settle it, and what helps: memory that is there for others only."""
    total, on, short = s.device.total, s.name, s.short_by
    if total is not None and s.wanted > total:
        return f"{size(s.wanted)} at once is more than the {size(total)} that {on} has in all", []
    for find in (_limit, _pieces, _pools, _processes):
        if (found := find(s, total or 0, max(short, 1))) is not None:
            return found
    return None


def _limit(s: OutOfMemoryState, total: int, short: int) -> tuple[str, list[Lever]] | None:
    """A limit for this process, or for its framework."""
    on, limit, library = s.name, s.capacity, s.shortage.library
    room = (s.device.free or 0) + (s.device.reserved or 0)
    if library != TORCH:
        own = next((p.limit for p in s.device.pools if p.framework == library), None)
        if own is None or own != limit or limit + short > room:
            return None
        why = f"{library} may take {size(limit)} of the {size(total)} that {on} has"
        do = f"`%env XLA_PYTHON_CLIENT_MEM_FRACTION={_SHARE}` before JAX starts, in a new kernel"
        gives = max(int(_SHARE * total) - limit, 0)
        return f"{why}: 75 %, unless it is told otherwise", [Lever(do, gives)] * (library == "JAX")
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
    """Another framework in this process has taken more for itself than it uses."""
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
    """Another GPU with room for what the cell needs and for what it reads here."""
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
    """The old value of a name that is made anew; variables that nothing reads any more."""
    for n, rest in enumerate(s.rests):
        # Else it may have been made by this very code, and needed until now.
        older = rest.made_now | (rest.overwritten - rest.made_before)
        names = tuple(sorted(rest.overwritten & older & set(rest.frame.scope.local)))
        at_top = rest.frame.at_top
        held = {name: s.local(rest.frame, name) for name in names}
        names = tuple(name for name in names if not at_top or name in s.holding)
        gives = s.alone([held[name] for name in names], in_frames=not at_top)
        if not s.worth(gives) or rest.failed is None:
            continue
        code = f"{' = '.join(names)} = None" if rest.loops else f"del {', '.join(names)}"
        trial = t.every[n] if t is not None else None
        found = _before(rest, code, gives, trial)
        if found is not None:
            yield found
            return
    if t is None or t.loop is None:
        yield from _idle(s, t)


def _before(rest: RestOfCode, code: str, gives: int, trial: "Trial | None") -> Lever | None:
    """A line before the failing one, unless a dry run refutes it."""
    timed = rest.frame.filename.startswith("<timed")  # by `%%time`, which counts lines of its own
    line = "that line" if timed else f"line {getattr(rest.failed, 'lineno', '')}"
    do = f"`{code}` before {line}"
    if trial is None or not trial.is_short:
        return Lever(do, gives)
    needs = trial.needed(before=code)
    if needs is None or needs >= (trial.needs or 0):
        return None
    return Lever(do, gives, trial.fits(needs))


def _idle(s: OutOfMemoryState, t: "Trials | None") -> Iterator[Lever]:
    """The largest variables that the rest of the cell does not read: as many as it takes."""
    rest, whole = s.rests[-1], t.whole if t is not None else None
    top = rest.frame.scope.local if rest.frame.at_top else {}
    named: dict[int, list[str]] = {}
    for name in top:  # no value may be held here while a dry run follows
        named.setdefault(id(top[name]), []).append(name)
    new = {name for each in s.rests for name in each.overwritten}
    # What this very cell made would be made again.
    needed = s.read | rest.made_before
    groups = {
        id(top[row.path]): named[id(top[row.path])] for row in s.device.holders if row.path in top
    }
    idle = [g for g in groups.values() if not needed & set(g) and not set(g) <= new]
    sizes = sorted(((s.alone(names), names) for names in idle), reverse=True)
    lacking = (whole.needs or 0) - whole.room if whole is not None else s.short_by
    chosen: list[str] = []
    for gives, names in sizes:
        if s.worth(gives) and s.alone(chosen) < max(lacking, 1):
            chosen += names
    if not chosen or rest.failed is None:
        return
    gives, names = s.alone(chosen), tuple(chosen)
    if rest.read_anywhere & set(names):  # by what has run, and will run again
        code = f"del {', '.join(names)}"
        found = _before(rest, code, gives, whole)
        if found is not None:
            yield found
        return
    needs = whole.needed(gone=names) if whole is not None else None
    if whole is None or needs is not None:
        fits = None if whole is None or needs is None else whole.fits(needs, gives)
        yield Lever(f"`%gpufree {' '.join(names)}`, which nothing reads any more", gives, fits)
