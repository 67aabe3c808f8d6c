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
    """The snapshots of hosts that are not ``own``'s, in the order in which they are told.

    Parameters
    ----------
    own : Snapshot
        As taken here.
    told : iterable of Snapshot
        As taken by other processes, of any host.

    Returns
    -------
    list of Snapshot
        With the GPUs that nobody told of before, and their processes; none of these is ``mine``.
    """
    # A container may have other names for itself and the same GPUs.
    seen = {gpu.uuid for gpu in own.gpus}
    others = []
    for snapshot in told:
        if same_host(snapshot.host, own.host):
            continue
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
