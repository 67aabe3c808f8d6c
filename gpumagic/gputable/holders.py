"""Sum up who holds how much of which GPU."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gpumagic.telemetry.snapshot import GpuSample, ProcessSample

# A driver's own rounding, and what it holds without a process, is not somebody's memory.
_NOBODYS = 32 * 2**20
UNSEEN = "unaccounted"
# Whose memory it can be, in the order of bars, as js/src/monitor/bars.ts calls them.
OWNERS = {
    "mine": "this notebook",
    "books": "my other notebooks",
    "others": "other processes",
    "left": "left behind",
    "unseen": UNSEEN,
    "driver": "driver",
}


@dataclass(frozen=True)
class Split:
    """One GPU's memory in bytes, by whose it is (`OWNERS`), and free."""

    mine: int = 0
    books: int = 0
    others: int = 0
    left: int = 0
    unseen: int = 0
    driver: int = 0
    free: int = 0


@dataclass(frozen=True)
class Holder:
    """A notebook, a program, or whoever cannot be seen; bytes by GPU (None: not known)."""

    name: str
    user: str | None
    pids: tuple[int, ...]
    memory: dict[str, int | None]
    mine: bool = False
    kind: str | None = None
    started: float | None = None
    utilization: float | None = None  # percent, of the GPU that it keeps busiest


def split(gpu: GpuSample, processes: Iterable[ProcessSample]) -> Split | None:
    """How one GPU's memory is shared out; None where it does not tell how much is used."""
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    parts = dict.fromkeys(OWNERS, 0)
    for process in processes:
        if process.uuid == gpu.uuid:
            parts[process.owner] += process.memory or 0
    rest = gpu.memory_used
    for name in OWNERS:
        parts[name] = min(parts[name], rest)
        rest -= parts[name]
    parts["unseen" if rest > _NOBODYS else "driver"] = rest
    reserved = gpu.memory_reserved or 0
    parts["driver"] += reserved
    return Split(**parts, free=max(gpu.memory_total - gpu.memory_used - reserved, 0))


def holders(
    gpus: Sequence[GpuSample], processes: Iterable[ProcessSample], *, each: bool
) -> list[Holder]:
    """This kernel first, then by memory, last who cannot be seen: `each` process by itself, or
    those of a notebook, or of a program and user where there is none, together."""
    shown = {gpu.uuid for gpu in gpus}
    groups: dict[tuple[object, ...], list[ProcessSample]] = {}
    for process in processes:
        if process.uuid in shown:
            who = process.notebook or process.name or process.user or process.pid
            key = (process.pid,) if each else (process.mine, who, process.user)
            groups.setdefault(key, []).append(process)
    found = [_holder(group) for group in groups.values()]
    found.sort(key=lambda one: (not one.mine, -sum(filter(None, one.memory.values())), one.name))
    unseen = _unseen(gpus, found)
    return [*found, Holder(UNSEEN, None, (), unseen)] if unseen else found


def _holder(group: Sequence[ProcessSample]) -> Holder:
    first = group[0]
    memory: dict[str, int | None] = {}
    for process in group:
        before = memory.get(process.uuid)
        known = [count for count in (before, process.memory) if count is not None]
        memory[process.uuid] = sum(known) if known else None
    return Holder(
        name=_name(first),
        user=first.user,
        pids=tuple(sorted({process.pid for process in group})),
        memory=memory,
        mine=first.mine,
        kind=first.kind,
        started=first.started,
        utilization=_busiest(group),
    )


def _busiest(group: Sequence[ProcessSample]) -> float | None:
    busy: dict[str, float] = {}
    for process in group:
        if process.utilization is not None:
            busy[process.uuid] = busy.get(process.uuid, 0.0) + process.utilization
    return min(max(busy.values()), 100.0) if busy else None


def _name(process: ProcessSample) -> str:
    name = PurePath(process.notebook).name if process.notebook else None
    if process.mine:
        return f"{OWNERS['mine']} ({name})" if name else "this process"
    if name is None and process.name:
        return f"you · {process.name}"
    return name or process.user or f"gone (pid {process.pid})"


def _unseen(gpus: Sequence[GpuSample], holders: Sequence[Holder]) -> dict[str, int | None]:
    """What is used beyond what those seen hold; a pid of another container is not seen."""
    # A parent's memory is that of its MIG devices, told once.
    cut = {gpu.mig for gpu in gpus}
    unseen: dict[str, int | None] = {}
    for gpu in gpus:
        if gpu.memory_used is None or gpu.unified or gpu.uuid in cut:
            continue
        held = [holder.memory.get(gpu.uuid, 0) for holder in holders]
        rest = gpu.memory_used - sum(count or 0 for count in held)
        if None not in held and rest > _NOBODYS:
            unseen[gpu.uuid] = rest
    return unseen
