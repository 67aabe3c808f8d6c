"""Define the records that kernels, the Jupyter server and the browser exchange as snapshots.

Units: bytes, percent, °C, watts, megahertz, seconds of Unix time. None means "unknown" unless a
comment says otherwise. A host is identified by its name and its boot id together.
"""

import json
from dataclasses import dataclass
from typing import Any

from gpumagic.errors import Problem


@dataclass(frozen=True)
class Host:
    """The machine; memory in bytes, ``cpu_utilization`` in percent of all cores."""

    name: str | None = None
    cpu_count: int | None = None
    cpu_utilization: float | None = None
    memory_total: int | None = None
    memory_used: int | None = None
    boot: str | None = None  # random id that Linux creates at each boot
    memory_limit: int | None = None  # bytes; None if this container has no limit
    limit_used: int | None = None  # used bytes that count towards the limit

    @property
    def ram(self) -> tuple[int | None, int | None]:
        """The used and total bytes: the container's if a limit exists, else the machine's."""
        if self.memory_limit is None:
            return self.memory_used, self.memory_total
        return self.limit_used, self.memory_limit


@dataclass(frozen=True)
class GpuSample:
    """A GPU, a MIG device or a virtual GPU."""

    uuid: str  # "GPU-…", "MIG-…", "PCI-…" or "MPS-…": the same in all processes
    name: str | None = None
    index: int | None = None  # the driver's index, as in nvidia-smi; for MIG, the parent's index
    ordinal: int | None = None  # torch's ordinal in the process that took the snapshot
    ordinal_certain: bool = True  # False if the order of CUDA's devices is unknown
    virtual: bool = False
    mig: str | None = None  # for a MIG device, the UUID of its parent
    unified: bool = False  # the GPU uses the host's memory, and memory_total is the host's
    memory_total: int | None = None
    memory_used: int | None = None
    memory_reserved: int | None = None  # bytes that the driver reserves; not part of memory_used
    utilization: float | None = None  # percent of the last second (or less) spent computing
    memory_utilization: float | None = None  # percent of the time in which memory was accessed
    temperature: float | None = None
    temperature_limit: float | None = None  # the temperature at which the GPU throttles
    power: float | None = None
    power_limit: float | None = None
    sm_clock: int | None = None
    memory_clock: int | None = None
    throttle: tuple[str, ...] | None = None  # throttling reasons; () if none
    sm_clock_limit: int | None = None  # the maximum of sm_clock
    fan: float | None = None  # percent of the fan's maximum speed
    pcie_generation: int | None = None  # of the current link
    pcie_width: int | None = None  # lanes
    pcie_generation_limit: int | None = None
    pcie_width_limit: int | None = None
    ecc_corrected: int | None = None  # memory errors since the driver was loaded
    ecc_uncorrected: int | None = None
    virtual_ordinal: int | None = None  # for a virtual GPU: the ordinal in its process
    xid: int | None = None  # NVIDIA's number (Xid) of the last critical error since sampling began
    xid_time: float | None = None
    lost: bool = False  # the GPU no longer answers; only name, UUID, index and Xid are known
    age: float = 0.0  # seconds since the values were read: 0 unless the driver stalls
    vendor: str | None = "nvidia"  # or "amd", "intel", "apple"

    @property
    def kind(self) -> str:
        """torch's device type: "cuda" (AMD too), "xpu" or "mps"."""
        return {"intel": "xpu", "apple": "mps"}.get(self.vendor or "", "cuda")

    def called(self, ordinal: int) -> str:
        """Return torch's name of the device: "cuda:1", "xpu:1", or "mps"."""
        return self.kind if self.kind == "mps" else f"{self.kind}:{ordinal}"


@dataclass(frozen=True)
class ProcessSample:
    """A process that holds memory on a GPU; another user's process has few known fields."""

    uuid: str  # the UUID of the GPU or MIG device
    pid: int
    memory: int | None = None
    name: str | None = None  # the program's name; None for another user's process
    user: str | None = None
    notebook: str | None = None  # the notebook of the Jupyter kernel
    started: float | None = None
    mine: bool = False  # whether this process took the snapshot
    kernel: str | None = None  # id of the Jupyter kernel, which is this process or its ancestor
    child: bool = False  # whether the process is a descendant of the kernel, not the kernel itself
    server: str | None = None  # "process 42" if another Jupyter server runs the kernel
    idle_since: float | None = None  # Unix time at which the kernel became idle
    orphan: bool = False  # the process still runs, but its kernel has ended
    ordinal: int | None = None  # the GPU's CUDA ordinal in this process
    utilization: float | None = None  # percent of the last seconds spent computing

    @property
    def owner(self) -> str:
        """One of "mine" (this process), "books" (my other notebooks), "left" (orphan), "others"."""
        if self.orphan:
            return "left"
        if self.mine:
            return "mine"
        return "books" if self.kernel or self.notebook else "others"


@dataclass(frozen=True)
class KernelSample:
    """The CPU and RAM use of a kernel of the Jupyter server, including its child processes."""

    kernel: str  # the kernel's id
    pid: int
    notebook: str | None = None
    idle_since: float | None = None  # Unix time at which the kernel became idle; None while busy
    cpu: float | None = None  # percent of one core
    host_memory: int | None = None  # bytes of RAM
    growth: float | None = None  # bytes of RAM per second, over the last seconds


@dataclass(frozen=True)
class KernelDeath:
    """The unexpected end of a kernel: nobody stopped or restarted the kernel."""

    id: str
    time: float
    kernel: str
    notebook: str | None
    count: int | None  # the number of the cell that ran
    code: str | None  # the beginning of that cell's source
    cause: str  # "out-of-memory", "perhaps-out-of-memory", "killed", "crashed" or "exited"
    exit_code: int  # the negated number of the signal, if a signal ended the kernel
    title: str  # one line: which kernel died, why, and during which cell
    details: tuple[str, ...] = ()  # further lines: evidence for the cause, and the lost data
    advice: str = ""  # what the user can do


@dataclass(frozen=True)
class Snapshot:
    """A machine's GPUs and the processes on them at one moment."""

    time: float
    host: Host = Host()
    driver: str | None = None
    source: str = "none"  # the sources that list a GPU: "nvml", "amd+virtual"
    gpus: tuple[GpuSample, ...] = ()
    processes: tuple[ProcessSample, ...] = ()
    problems: tuple[Problem, ...] = ()
    cuda: str | None = None  # the newest CUDA that the driver supports: "13.0"
    software: tuple[str, ...] = ()  # other vendors' software: "ROCm 6.2.4", "amdgpu"
    kernels: tuple[KernelSample, ...] = ()  # of the Jupyter server; () in a kernel's snapshot
    events: tuple[KernelDeath, ...] = ()  # deaths of the server's kernels, the oldest first

    def to_dict(self) -> dict[str, Any]:
        """Return the snapshot as plain dicts, lists, tuples, numbers, strings and None."""
        records = ("gpus", "processes", "problems", "kernels", "events")
        # ``asdict`` would copy each value, which takes ten times as long.
        many = {name: [dict(vars(one)) for one in getattr(self, name)] for name in records}
        return {**vars(self), "host": dict(vars(self.host)), **many}

    def to_json(self) -> str:
        """Return the snapshot as one line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)
