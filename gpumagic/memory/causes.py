"""Find why there was too little memory: the causes that can be told for certain, the surest first.

Each is a function of a `Situation` that gives a cause with what would help against it, or None.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gpumagic.display.units import size, some
from gpumagic.memory.autograd_graph import GRAPH
from gpumagic.memory.out_of_memory import Remedy
from gpumagic.memory.shortage import Situation

_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_NO_POOL = {
    "JAX": '`os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"` before JAX is imported, in a '
    "new kernel, leaves",
    "TensorFlow": "`tf.config.experimental.set_memory_growth(gpu, True)` before TensorFlow starts, "
    "in a new kernel, leaves",
    "CuPy": "`cupy.get_default_memory_pool().free_all_blocks()` gives",
}
# A holder below this part of what is allocated is not worth a line.
_WORTH = 0.05
_ROUNDED = 0.01
_SEVERAL = 4  # tensors in a list or dict: fewer are hardly a collection


@dataclass(frozen=True)
class Cause:
    """Why, in a word and in a sentence, and what would help."""

    kind: str
    reason: str
    remedies: tuple[Remedy, ...] = ()
    gone: tuple[str, ...] | None = None  # variables that its first remedy deletes; None: no such

    @property
    def gives(self) -> int:
        """What its best remedy gives."""
        return max((remedy.gives or 0 for remedy in self.remedies), default=0)


def too_large(s: Situation) -> Cause | None:
    """What was wanted is more than the GPU has, whoever holds the rest."""
    total = s.device.total
    if total is None or s.wanted <= total:
        return None
    why = f"{size(s.wanted)} at once is more than the {size(total)} that {s.name} has in all"
    return Cause("too large", why, tuple(_halved(s)))


def _halved(s: Situation) -> Iterator[Remedy]:
    narrower = {torch.float64: "32 bits a number (`.float()`)"}
    narrower[torch.float32] = "16 bits a number (`dtype=torch.bfloat16`)"
    if s.dtype in narrower and s.wanted // 2 <= s.capacity - s.held():
        yield Remedy(f"{narrower[s.dtype]} save", s.wanted - s.wanted // 2)


def limited(s: Situation) -> Cause | None:
    """It would fit, but for a limit that was set for this process, by its code or outside."""
    total, limit = s.device.total, s.shortage.total
    if total is None or limit is None or limit >= total or s.short_by > total - limit:
        return None
    why = f"this process may have {size(limit)} of the {size(total)} that {s.name} has"
    do = "`torch.cuda.set_per_process_memory_fraction(1.0)` allows"
    if torch.cuda.mem_get_info(s.shortage.ordinal)[1] <= limit:
        why = f"{why}, by a limit of MPS, of its container or of a vGPU"
        do = "to raise that limit (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, or ask who set it) allows"
    return Cause("limit", why, (Remedy(do, total - limit),))


def torn_up(s: Situation) -> Cause | None:
    """Enough is free in all, but not in one piece."""
    # Figures read from a text are rounded.
    margin = 0 if s.shortage.exact else _ROUNDED * s.capacity
    if s.short_by > -margin or not s.wanted:
        return None
    unused = (s.device.reserved or 0) - (s.device.allocated or 0)
    why = (
        f"{size(unused)} that torch has reserved are unused, in pieces too small for "
        f"{size(s.wanted)} at once"
    )
    if any(_EXPANDABLE in os.environ.get(name, "") for name in _CONF):
        return Cause("torn", why)
    do = f'`os.environ["{_CONF[0]}"] = "{_EXPANDABLE}"` before torch is imported joins them:'
    return Cause("torn", why, (Remedy(do, unused),))


def pooled(s: Situation) -> Cause | None:
    """Another framework in this process has taken more for itself than it uses, and than lacks."""
    for pool in s.device.pools:
        unused = (pool.taken or 0) - (pool.used or 0)
        if unused < max(s.short_by, 1):
            continue
        has = f"{size(pool.taken)} of {s.name}, of which it uses {size(pool.used)}"
        why = f"{pool.framework} in this process has taken {has}"
        return Cause("pool", why, (Remedy(_NO_POOL[pool.framework], unused),))
    return None


def others(s: Situation) -> Cause | None:
    """Other processes hold more than this one lacks, and more than it has."""
    held = s.device.others or 0
    if held < max(s.short_by, s.device.allocated or 0, 1):
        return None
    named = some(name for name, _ in s.device.others_by_name)
    why = f"other processes hold {size(held)} of {s.name}" + (f": {named}" if named else "")
    return Cause("others", why, tuple(_elsewhere(s)))


def _elsewhere(s: Situation) -> Iterator[Remedy]:
    """Another GPU on which all that this cell has on its own would have room."""
    needed = s.wanted + (s.device.allocated or 0)
    for ordinal in range(torch.cuda.device_count()):
        free = torch.cuda.mem_get_info(ordinal)[0]
        if ordinal != s.shortage.ordinal and free >= needed:
            yield Remedy(f"`%%ongpu {ordinal}`: that GPU has free", free)


def kept(s: Situation) -> Cause | None:
    """Outputs, and errors of earlier cells, hold what no variable does."""
    if not _worth(s, s.kept):
        return None
    outputs = [name for name in s.outputs if name in s.holding]
    parts = [f"{some(outputs)} of IPython's outputs"] if outputs else []
    parts += ["the exception of an earlier cell"] if s.alone(s.earlier_errors) else []
    parts = parts or ["what earlier cells left"]
    why = f"{' and '.join(parts)} held {size(s.kept)} that no variable does"
    return Cause("kept", why, (Remedy("`%gpufree` gives back", s.kept),), ())


def handled(s: Situation) -> Cause | None:
    """An `except` block tries again while the error that it handles keeps its frames."""
    held = s.alone([s.handled], in_frames=True)
    if not _worth(s, held):
        return None
    why = f"the error that an `except` block was handling held {size(held)}, until the block ends"
    return Cause(
        "handled", why, (Remedy("to try again after the block, not inside it, gives", held),)
    )


def twice(s: Situation) -> Cause | None:
    """What a name held was still alive while the new value was made."""
    for rest in s.rests:
        # Else it may have been made by this very code, and needed until now.
        older = rest.made_now | (rest.overwritten - rest.made_before)
        names = sorted(rest.overwritten & older & set(rest.frame.scope.local))
        if rest.frame.at_top:
            names = [name for name in names if name in s.holding]
        held = [s.local(rest.frame, name) for name in names]
        gives = s.alone(held, in_frames=not rest.frame.at_top)
        if not _worth(s, gives):
            continue
        now = sorted(rest.made_now & set(names)) or names
        verb = "was" if len(now) == 1 else "were"
        why = f"{_named(s, now)} {verb} still alive while {s.label} made a new one"
        made = "it is" if len(names) == 1 else "they are"
        do = f"`del {', '.join(names)}` before {made} made anew gives"
        gone = tuple(names) if rest.frame.at_top else None
        return Cause("twice", why, (Remedy(do, gives),), gone)
    return None


def _named(s: Situation, names: list[str]) -> str:
    """``"`model` of In [3], 4.1 GiB,"``."""
    rows = {row.path: row for row in s.device.holders}
    words = []
    for name in names:
        row = rows.get(name)
        made = f" of {row.made.cell}" if row is not None and row.made else ""
        words.append(f"`{name}`{made}" + (f", {size(row.nbytes)}," if row is not None else ""))
    return " and ".join(words)


def graphs(s: Situation) -> Cause | None:
    """Results are kept with the graph of each, and so with all that a backward pass needs."""
    if any(rest.backward for rest in s.rests):
        return None  # it may be what these graphs are for
    names = ((rest, name) for rest in s.rests for name in rest.frame.scope.local)
    gives, name = max((_kept_with_graphs(s, *each) for each in names), default=(0, ""))
    if not _worth(s, gives):
        return None
    why = f"`{name}` keeps each result with its graph, {size(gives)} in all"
    do = (
        "`.item()` or `.detach()` on what is kept there, or `torch.no_grad()` around it, if no "
        "backward pass follows, gives"
    )
    return Cause("graphs", why, (Remedy(do, gives),))


def _kept_with_graphs(s: Situation, rest: Any, name: str) -> tuple[int, str]:
    """The bytes that a name keeps with the graphs of results, or of one that they add to."""
    frame = rest.frame
    results, gives = s.graphs(s.local(frame, name), in_frames=not frame.at_top)
    lists = Counter(re.sub(r"\[\d+\]$", "[]", result) for result in results)
    several = max((n for place, n in lists.items() if place.endswith("[]")), default=0) > 1
    return (gives, name) if several or name in rest.added_up else (0, "")


def not_read(s: Situation) -> Cause | None:
    """Variables hold much that the rest of the cell does not read."""
    top = s.frames[-1].scope.local if s.frames and s.frames[-1].at_top else {}
    new = {name for rest in s.rests for name in rest.overwritten}
    named: dict[int, list[str]] = {}
    for name, value in top.items():
        named.setdefault(id(value), []).append(name)
    rows = (row.path for row in s.device.holders if row.path in top)
    groups = {id(top[path]): named[id(top[path])] for path in rows}
    # What this very cell made would be made again.
    needed = s.read.union(*(rest.made_before for rest in s.rests[-1:]))
    idle = [g for g in groups.values() if not needed & set(g) and not set(g) <= new]
    found = [(s.alone(names), names) for names in idle]
    worth = sorted(((g, n) for g, n in found if g and _worth(s, g)), reverse=True)[:3]
    if not worth:
        return None
    why = f"{_named(s, [worth[0][1][0]])} is read by nothing that was still to run"
    remedies = tuple(Remedy(_without(s, names), gives) for gives, names in worth)
    first = worth[0][1]
    return Cause("not read", why, remedies, None if _is_read_again(s, first) else tuple(first))


def _without(s: Situation, names: list[str]) -> str:
    """What lets go of variables of which the rest of the cell needs none."""
    failed = s.rests[-1].failed
    if failed is not None and _is_read_again(s, names):
        return f"`del {', '.join(names)}` before line {failed.lineno} gives"
    return f"`%gpufree {' '.join(names)}` gives back"


def _is_read_again(s: Situation, names: list[str]) -> bool:
    """Whether the cell, when it is run again, needs one of these."""
    return not s.rests[-1].read_anywhere.isdisjoint(names)


def full(s: Situation) -> Cause:
    """All of it is in use."""
    if 2 * s.traceback_holds > (s.device.allocated or 0):
        made, wanted = size(s.traceback_holds), size(s.wanted)
        why = f"what failed had itself made {made}, and wanted {wanted} more"
        return Cause("full", f"{why}; {size(s.short_by)} too little is left")
    largest = s.device.holders[0] if s.device.holders else None
    most = f", most of it by {largest.path} ({size(largest.nbytes)})" if largest else ""
    remedies: tuple[Remedy, ...] = ()
    place, count, kept = _collection(s, largest.path) if largest else ("", 0, 0)
    if largest and 3 * kept > largest.nbytes and _worth(s, kept):
        most = f": `{place}` keeps {count:,} tensors, {size(kept)}"
        remedies = (Remedy(f"what `{place}` keeps, on the CPU (`.cpu()`), gives", kept),)
    why = f"{size(s.device.allocated)} are in use{most}; {size(s.short_by)} too little is left"
    return Cause("full", why, remedies)


def _collection(s: Situation, holder: str) -> tuple[str, int, int]:
    """The list or dict below a holder that has the most bytes, of several tensors each its own."""
    found: dict[str, list[int]] = {}
    for each in s.storages:
        for path in each.paths:
            place, bracket, _ = path.path.rpartition("[")
            item = bracket and path.path.endswith("]") and GRAPH not in path.path
            if item and path.root == holder:
                found.setdefault(place, []).append(each.nbytes)
    several = {place: sizes for place, sizes in found.items() if len(sizes) >= _SEVERAL}
    place = max(several, key=lambda place: sum(several[place]), default="")
    return place, len(several.get(place, ())), sum(several.get(place, ()))


def _worth(s: Situation, gives: int) -> bool:
    return gives >= min(max(s.short_by, 1), _WORTH * s.capacity) and gives > 0


CERTAIN: tuple[Callable[[Situation], Cause | None], ...] = (
    too_large,
    limited,
    torn_up,
    pooled,
    others,
)
LIKELY: tuple[Callable[[Situation], Cause | None], ...] = (handled, twice, kept, not_read)
