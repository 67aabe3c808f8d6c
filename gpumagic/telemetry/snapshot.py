"""Record the state of a machine's GPUs at one moment: the wire format of all parts.

Bytes, percent, degrees Celsius, watts, megahertz, seconds of Unix time. None, null in JSON, means
"not known", never zero. A reader ignores fields that it does not know, so it can read the snapshots
of a newer version.

A host is identified by its name and its boot: containers of one machine share the boot, and
different machines may share a name. GPUs that this process sees itself are not taken from other
hosts' snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Host:
    """The machine; memory in bytes, ``cpu_utilization`` in percent of all cores."""

    name: str | None = None
    cpu_count: int | None = None
    cpu_utilization: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    boot: str | None = None  # Linux's id of this boot, of which no other machine has the same


@dataclass(frozen=True)
class GpuSample:
    """A GPU, a MIG device or a virtual GPU."""

    uuid: str  # "GPU-…", "MIG-…" or "PCI-…": the one name that holds everywhere
    name: str | None = None
    index: int | None = None  # its driver's, that of nvidia-smi; a MIG device has its parent's
    ordinal: int | None = None  # torch's, in the process that took the snapshot
    ordinal_certain: bool = True  # False where CUDA's own order could not be known
    virtual: bool = False
    mig: str | None = None  # the parent's UUID, where this is a MIG device
    unified: bool = False  # it shares the host's memory, and memory_total is the host's
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None  # what the driver keeps for itself; not in memory_used
    utilization: float | None = None  # of the last second or less, the part in which a kernel ran
    memory_utilization: float | None = None  # the part in which memory was used: bandwidth
    temperature: float | None = None
    temperature_limit: float | None = None  # where it slows down
    power: float | None = None
    power_limit: float | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    throttle: tuple[str, ...] | None = None  # what slows it down; () where nothing does
    sm_clock_limit: int | None = None  # the most that it can do, as all limits below
    memory_clock_limit: int | None = None
    fan: float | None = None  # percent of its greatest speed
    pcie_generation: int | None = None  # of the link as it is now
    pcie_width: int | None = None  # lanes
    pcie_generation_limit: int | None = None
    pcie_width_limit: int | None = None
    pcie_received: float | None = None  # bytes a second into the GPU, and out of it
    pcie_sent: float | None = None
    nvlink_received: float | None = None  # bytes a second over all its NVLinks
    nvlink_sent: float | None = None
    sm_activity: float | None = None  # Hopper and newer, as the next: multiprocessors at work
    sm_occupancy: float | None = None  # warps resident of those possible
    tensor_activity: float | None = None  # tensor cores at work
    dram_activity: float | None = None  # DRAM bandwidth in use
    ecc_corrected: int | None = None  # memory errors since the driver was loaded
    ecc_uncorrected: int | None = None
    xid: int | None = None  # the last critical Xid error since watching began, and when
    xid_time: float | None = None
    energy: float | None = None  # joules since the driver was loaded
    virtual_ordinal: int | None = None  # of a virtual GPU: CUDA's, in the process that has it
    lost: bool = False  # it was there and answers no longer; only name, UUID and index are known
    age: float = 0.0  # seconds since the values were read: 0 unless the driver stalls
    vendor: str | None = "nvidia"  # or "amd", "intel", "apple"

    @property
    def kind(self) -> str:
        """What torch calls its like: "cuda", also AMD's, "xpu" or "mps"."""
        return _KINDS.get(self.vendor or "", "cuda")

    def called(self, ordinal: int) -> str:
        """ "cuda:1", "xpu:1"; "mps" of the one that Macs have."""
        return self.kind if self.kind == "mps" else f"{self.kind}:{ordinal}"


_KINDS = {"intel": "xpu", "apple": "mps"}


@dataclass(frozen=True)
class ProcessSample:
    """A process that holds memory on a GPU."""

    uuid: str  # of the GPU or MIG device
    pid: int
    memory: int | None = None
    kind: str | None = None  # "compute", "graphics", "mps", or several joined with "+"
    name: str | None = None  # as all below, known only of the user who took the snapshot
    user: str | None = None  # known of all
    notebook: str | None = None  # whose kernel it is
    started: float | None = None
    mine: bool = False  # it is the process that took the snapshot
    kernel: str | None = None  # the id of the Jupyter kernel that it is, or whose child it is
    child: bool = False  # it was started by the kernel, such as a DataLoader's worker
    server: str | None = None  # the address of the Jupyter server that has the kernel, if another
    idle_since: float | None = None  # since when the kernel has had nothing to do
    orphan: bool = False  # its kernel is gone and it still runs
    ordinal: int | None = None  # CUDA's number of this GPU in that process
    host_memory: int | None = None  # bytes of RAM that it has resident
    utilization: float | None = None  # of the last seconds, the part in which its kernels ran

    @property
    def owner(self) -> str:
        """Whose it is: ``"mine"``, ``"books"`` (another notebook of mine), ``"left"`` (its kernel
        has gone), ``"others"``."""
        if self.orphan:
            return "left"
        if self.mine:
            return "mine"
        return "books" if self.kernel or self.notebook else "others"


@dataclass(frozen=True)
class Problem:
    """What is wrong and how to fix it; ``uuid`` where it is one GPU's."""

    code: str
    cause: str
    cure: str
    uuid: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A machine's GPUs and who holds them at one moment."""

    time: float
    host: Host = Host()
    driver: str | None = None
    source: str = "none"  # or who told of GPUs: "nvml", "amd+virtual"
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    problems: tuple[Problem, ...] = ()
    cuda: str | None = None  # the newest that the driver can run, "13.0"
    software: tuple[str, ...] = ()  # what others' GPUs run on: "ROCm 6.2.4", "amdgpu"

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and tuples, numbers, strings and None."""
        # Not ``asdict``, which copies each value: ten times slower.
        return {
            **vars(self),
            "host": {**vars(self.host)},
            "gpus": [{**vars(gpu)} for gpu in self.gpus],
            "processes": [{**vars(process)} for process in self.processes],
            "problems": [{**vars(problem)} for problem in self.problems],
        }

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Snapshot:
        """What ``to_dict`` made, of any version; ValueError where what is needed is missing."""
        try:
            return cls(
                **{
                    **_known(cls, data),
                    "host": Host(**_known(Host, data.get("host") or {})),
                    "gpus": _many(GpuSample, data.get("gpus")),
                    "processes": _many(ProcessSample, data.get("processes")),
                    "problems": _many(Problem, data.get("problems")),
                }
            )
        except (TypeError, AttributeError) as error:
            raise ValueError(f"not a snapshot: {error}") from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Snapshot:
        """What ``to_json`` wrote, of any version; ValueError where it is no JSON or no snapshot."""
        return cls.from_dict(json.loads(text))


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that this version has, with tuples for JSON's lists."""
    known = {field.name: data[field.name] for field in fields(kind) if field.name in data}
    return {n: tuple(value) if isinstance(value, list) else value for n, value in known.items()}


def _many(kind: type[T], data: Any) -> tuple[T, ...]:
    return tuple(kind(**_known(kind, item)) for item in data or ())


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
