"""Record what is known of a machine's GPUs at one moment: the wire format between all parts.

Bytes, percent, degrees Celsius, watts, megahertz, seconds of Unix time. None, in JSON null, is
"not known" and never means zero. A reader takes what it knows and leaves what it does not, so that
an older one reads a newer one's snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
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


@dataclass(frozen=True)
class GpuSample:
    """A GPU, a MIG device or a virtual GPU.

    Parameters
    ----------
    uuid : str
        ``"GPU-…"`` or ``"MIG-…"``: the one name that holds everywhere.
    name : str, optional
    index : int, optional
        NVML's number, that of nvidia-smi; a MIG device has its parent's, a virtual GPU none.
    ordinal : int, optional
        CUDA's number in the process that took the snapshot; None where it cannot use this GPU.
    ordinal_certain : bool
        False where CUDA's own order could not be known.
    virtual : bool
    mig : str, optional
        The parent's UUID, where this is a MIG device.
    unified : bool
        It shares the host's memory, and the memory fields are the host's.
    memory_total, memory_used, memory_reserved : int, optional
        Bytes. ``memory_reserved`` is what the driver keeps for itself and is not in
        ``memory_used``.
    utilization : float, optional
        Percent of the last second or less in which at least one kernel ran.
    memory_utilization : float, optional
        Percent of that time in which memory was read or written: bandwidth, not occupancy.
    temperature, temperature_limit : float, optional
        °C; the limit is where it slows down.
    power, power_limit : float, optional
        Watts.
    sm_clock, memory_clock : int, optional
        Megahertz.
    throttle : tuple of str, optional
        Why it runs slower than it could; empty where nothing slows it.
    sm_clock_limit, memory_clock_limit : int, optional
        Megahertz: the most that it can do.
    fan : float, optional
        Percent of its greatest speed.
    pcie_generation, pcie_width : int, optional
        The link as it is now: generation, and lanes.
    pcie_generation_limit, pcie_width_limit : int, optional
        The most that this GPU in this slot can do.
    pcie_received, pcie_sent : float, optional
        Bytes a second into and out of the GPU.
    nvlink_received, nvlink_sent : float, optional
        Bytes a second over all its NVLinks.
    sm_activity, sm_occupancy, tensor_activity, dram_activity : float, optional
        Percent: multiprocessors at work, warps resident of those possible, tensor cores at work,
        DRAM bandwidth in use. Where the GPU can tell (Hopper and newer).
    ecc_corrected, ecc_uncorrected : int, optional
        Memory errors since the driver was loaded.
    xid, xid_time : optional
        The last critical Xid error since watching began, and when (seconds of Unix time).
    energy : float, optional
        Joules since the driver was loaded.
    virtual_ordinal : int, optional
        Of a virtual GPU: CUDA's number in the process that has it.
    lost : bool
        It was there and answers no longer; only its name, UUID and index are known.
    age : float
        Seconds since the values were read: 0 unless the driver stalls.
    """

    uuid: str
    name: str | None = None
    index: int | None = None
    ordinal: int | None = None
    ordinal_certain: bool = True
    virtual: bool = False
    mig: str | None = None
    unified: bool = False
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None
    utilization: float | None = None
    memory_utilization: float | None = None
    temperature: float | None = None
    temperature_limit: float | None = None
    power: float | None = None
    power_limit: float | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    throttle: tuple[str, ...] | None = None
    sm_clock_limit: int | None = None
    memory_clock_limit: int | None = None
    fan: float | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    pcie_generation_limit: int | None = None
    pcie_width_limit: int | None = None
    pcie_received: float | None = None
    pcie_sent: float | None = None
    nvlink_received: float | None = None
    nvlink_sent: float | None = None
    sm_activity: float | None = None
    sm_occupancy: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    xid: int | None = None
    xid_time: float | None = None
    energy: float | None = None
    virtual_ordinal: int | None = None
    lost: bool = False
    age: float = 0.0


@dataclass(frozen=True)
class ProcessSample:
    """A process that holds memory on a GPU.

    Parameters
    ----------
    uuid : str
        Of the GPU or MIG device.
    pid : int
    memory : int, optional
        Bytes on this GPU.
    kind : str, optional
        ``"compute"``, ``"graphics"``, ``"mps"``, or several joined with ``"+"``.
    user : str, optional
    name, notebook, started : optional
        The program; the notebook whose kernel it is; when it began (seconds of Unix time). Only
        of processes of the user who took the snapshot.
    mine : bool
        It is the process that took the snapshot.
    kernel : str, optional
        The id of the Jupyter kernel that it is, or whose child it is.
    child : bool
        It is not the kernel itself but was started by it, such as a DataLoader's worker.
    server : str, optional
        The address of the Jupyter server that has the kernel, where that is another one.
    idle_since : float, optional
        Since when the kernel has had nothing to do (seconds of Unix time).
    orphan : bool
        Its kernel is gone and it still runs.
    ordinal : int, optional
        CUDA's number of this GPU in that process.
    """

    uuid: str
    pid: int
    memory: int | None = None
    kind: str | None = None
    name: str | None = None
    user: str | None = None
    notebook: str | None = None
    started: float | None = None
    mine: bool = False
    kernel: str | None = None
    child: bool = False
    server: str | None = None
    idle_since: float | None = None
    orphan: bool = False
    ordinal: int | None = None


@dataclass(frozen=True)
class Problem:
    """What is wrong and how to fix it; ``uuid`` where it is one GPU's."""

    code: str
    cause: str
    cure: str
    uuid: str | None = None


@dataclass(frozen=True)
class Snapshot:
    """A machine's GPUs and who holds them at one moment.

    ``source`` says what was asked, such as ``"nvml"``, ``"virtual"`` or ``"nvml+virtual"``.
    """

    time: float
    host: Host = Host()
    driver: str | None = None
    source: str = "none"
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    problems: tuple[Problem, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers, strings and None."""
        # Not ``asdict``, which copies each value: ten times slower.
        return {
            **vars(self),
            "host": {**vars(self.host)},
            "gpus": [{**vars(g), "throttle": _list(g.throttle)} for g in self.gpus],
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
                    "gpus": tuple(_gpu(gpu) for gpu in data.get("gpus") or ()),
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
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


def _many(kind: type[T], data: Any) -> tuple[T, ...]:
    return tuple(kind(**_known(kind, item)) for item in data or ())


def _gpu(data: Mapping[str, Any]) -> GpuSample:
    reasons = data.get("throttle")
    throttle = None if reasons is None else tuple(reasons)
    return GpuSample(**{**_known(GpuSample, data), "throttle": throttle})


def _list(items: tuple[str, ...] | None) -> list[str] | None:
    return None if items is None else list(items)
