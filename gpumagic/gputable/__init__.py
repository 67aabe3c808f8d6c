"""Attribute GPU memory to its holders: notebooks, programs and the system."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gpumagic.telemetry.snapshot import GpuSample, ProcessSample

SYSTEM = "system"  # holder of the memory that belongs to no visible process

# Character and label of each owner, in the order of the bars here and in js/src/monitor/bars.ts.
OWNERS = {
    "mine": ("█", "this notebook"),
    "books": ("▓", "my other notebooks"),
    "others": ("▒", "everyone else"),
    "left": ("×", "orphaned"),
    "system": ("░", SYSTEM),
}


@dataclass(frozen=True)
class Holder:
    """A notebook, a program, or the system, with the bytes held on each GPU (None if unknown)."""

    name: str
    user: str | None
    pids: tuple[int, ...]
    memory: dict[str, int | None]
    mine: bool = False
    started: float | None = None
    utilization: float | None = None  # percent, on the GPU that the holder uses most

    @property
    def total(self) -> int | None:
        """The sum of the known bytes; None if no bytes are known."""
        known = [count for count in self.memory.values() if count is not None]
        return sum(known) if known else None


def split(
    gpu: GpuSample, processes: Iterable[ProcessSample], gpus: Iterable[GpuSample] = ()
) -> dict[str, int] | None:
    """Return the bytes used and reserved on a GPU and its MIG devices by owner; None if unknown."""
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    parts = dict.fromkeys(OWNERS, 0)
    uuids = {gpu.uuid, *(one.uuid for one in gpus if one.mig == gpu.uuid)}
    for process in processes:
        if process.uuid in uuids:
            parts[process.owner] += process.memory or 0
    rest = gpu.memory_used
    for name in OWNERS:
        parts[name] = min(parts[name], rest)
        rest -= parts[name]
    parts["system"] = rest + (gpu.memory_reserved or 0)
    return parts


def holders(
    gpus: Sequence[GpuSample], processes: Iterable[ProcessSample], *, each: bool
) -> list[Holder]:
    """Return a holder for each process if `each`, else for each notebook and each program."""
    shown = {gpu.uuid for gpu in gpus}
    groups: dict[tuple[object, ...], list[ProcessSample]] = {}
    for process in processes:
        if process.uuid in shown:
            who = process.notebook or process.name or process.user or process.pid
            key = (process.pid,) if each else (process.mine, who, process.user)
            groups.setdefault(key, []).append(process)
    every = (_holder(group, each) for group in groups.values())
    found = [holder for holder in every if each or holder.total != 0]
    found.sort(key=lambda one: (not one.mine, -(one.total or 0), one.name))
    system = _of_no_process(gpus, found)
    return [*found, *[Holder(SYSTEM, None, (), system)] * bool(system)]


def _holder(group: Sequence[ProcessSample], each: bool) -> Holder:
    first, pids = group[0], tuple(sorted({process.pid for process in group}))
    memory: dict[str, int | None] = {}
    busy: dict[str, float] = {}
    for process in group:
        uuid, before = process.uuid, memory.get(process.uuid)
        memory[uuid] = before if process.memory is None else (before or 0) + process.memory
        if process.utilization is not None:
            busy[uuid] = busy.get(uuid, 0.0) + process.utilization
    return Holder(
        name=_holder_name(first, () if each else pids),
        user=first.user,
        pids=pids,
        memory=memory,
        mine=first.mine,
        started=first.started,
        utilization=min(max(busy.values()), 100.0) if busy else None,
    )


def _holder_name(process: ProcessSample, pids: Sequence[int]) -> str:
    name = PurePath(process.notebook).name if process.notebook else None
    if process.mine:
        return f"this notebook ({name})" if name else "this process"
    if name is None and process.name:  # add the PID, because "python" is not unique
        which = f", pid {pids[0]}" if len(pids) == 1 else f", {len(pids)} processes"
        return process.name + which * bool(pids)
    return name or process.user or f"exited (PID {process.pid})"


def _of_no_process(gpus: Sequence[GpuSample], holders: Sequence[Holder]) -> dict[str, int | None]:
    """Return the bytes by GPU that no visible process holds; omit unknown and small numbers."""
    # Skip GPUs with MIG devices, because their memory includes the memory of the MIG devices.
    parents = {gpu.mig for gpu in gpus}
    found: dict[str, int | None] = {}
    for gpu in gpus:
        if gpu.memory_used is None or gpu.unified or gpu.uuid in parents:
            continue
        held = [holder.memory.get(gpu.uuid, 0) for holder in holders]
        rest = gpu.memory_used - sum(count or 0 for count in held)
        if None not in held and rest > 32 * 2**20:  # a smaller rest may be rounding or the driver
            found[gpu.uuid] = rest
    return found
