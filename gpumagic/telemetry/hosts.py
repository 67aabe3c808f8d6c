"""Tell the machines apart from which snapshots come, and take each GPU once.

A host is its name and its boot: containers of one machine share the boot, and machines a name. What
this process sees itself is true; of others' snapshots only what it cannot see is taken.
"""

from collections.abc import Iterable
from dataclasses import replace

from gpumagic.telemetry.snapshot import Host, Snapshot


def same_host(a: Host, b: Host) -> bool:
    """Whether these are one machine, or one container of it."""
    return (a.name, a.boot) == (b.name, b.boot)


def other_hosts(own: Snapshot, told: Iterable[Snapshot]) -> list[Snapshot]:
    """One snapshot for each host that is not ``own``'s, in the order in which they are told.

    Parameters
    ----------
    own : Snapshot
        As taken here.
    told : iterable of Snapshot
        As taken by other processes, of any host, also several of one.

    Returns
    -------
    list of Snapshot
        With the GPUs and processes of all who told of that host, each once: the newest word on it,
        and of a GPU the word of one to whom CUDA shows it. None of its processes is ``mine``.
    """
    found: list[Snapshot] = []
    for snapshot in told:
        if same_host(snapshot.host, own.host):
            continue
        at = next((n for n, one in enumerate(found) if same_host(one.host, snapshot.host)), None)
        if at is None:
            found.append(snapshot)
        else:
            found[at] = _joined(found[at], snapshot)
    # A container may have other names for itself and the same GPUs.
    seen = {gpu.uuid for gpu in own.gpus}
    others = []
    for snapshot in found:
        gpus = tuple(gpu for gpu in snapshot.gpus if gpu.uuid not in seen)
        if snapshot.gpus and not gpus:
            continue
        processes = tuple(
            replace(process, mine=False)
            for process in snapshot.processes
            if process.uuid not in seen
        )
        seen |= {gpu.uuid for gpu in gpus}
        others.append(replace(snapshot, gpus=gpus, processes=processes))
    return others


def _joined(a: Snapshot, b: Snapshot) -> Snapshot:
    """Two snapshots of one host."""
    old, new = sorted((a, b), key=lambda snapshot: snapshot.time)
    gpus = {gpu.uuid: gpu for gpu in (*old.gpus, *new.gpus)}
    for gpu in old.gpus:
        if gpus[gpu.uuid].ordinal is None:
            gpus[gpu.uuid] = gpu
    processes = {(one.uuid, one.pid): one for one in (*old.processes, *new.processes)}
    return replace(new, gpus=tuple(gpus.values()), processes=tuple(processes.values()))
