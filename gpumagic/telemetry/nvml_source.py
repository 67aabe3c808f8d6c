"""Sample NVIDIA's GPUs by NVML, each reading as often as its kind needs."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.nvml_readings import (
    BUSY,
    LISTS,
    TIERS,
    Rates,
    Tier,
    fast,
    merge,
    read,
    read_list,
)
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample

# A tick may come a little early.
_EARLY_S = 0.05
# How long an Xid error stays among the problems.
_XID_TOLD_S = 600.0

# Meanings and cures after NVIDIA's "XID Errors", https://docs.nvidia.com/deploy/xid-errors/.
_PROGRAM = "find the fault in the program: run it under compute-sanitizer, or with " + (
    "CUDA_LAUNCH_BLOCKING=1"
)
_RESET = "stop what runs on it and reset it (sudo nvidia-smi --gpu-reset -i {index})"
_REPLACE = f"{_RESET}; if it comes again, the GPU has to be replaced"
_GSP = f"{_RESET}, or restart the machine; if it comes again, update the driver"

_MEANINGS = {
    13: ("a program made an illegal memory access or instruction", _PROGRAM),
    31: ("a program read or wrote memory that is not its own (page fault)", _PROGRAM),
    43: ("a program's work on the GPU was stopped after a fault of its own", _PROGRAM),
    45: ("work was cleaned up after a program had ended or failed", "see the error before it"),
    48: ("an ECC error in memory that could not be corrected", _REPLACE),
    63: ("a faulty row of memory is to be replaced by a spare one", _RESET),
    64: ("a faulty row of memory could not be replaced by a spare one", _REPLACE),
    74: ("an error on an NVLink", f"{_RESET}; if it comes again, check bridge and cables"),
    79: ("the GPU has fallen off the bus", "restart the machine; check power, heat and seating"),
    92: ("very many ECC errors that were corrected", _REPLACE),
    94: ("an ECC error that struck only the program that used that memory", "restart the program"),
    95: ("an ECC error that may have struck every program on the GPU", _RESET),
    119: ("the GPU's own processor (GSP) did not answer the driver in time", _GSP),
    120: ("the GPU's own processor (GSP) reported an error", _GSP),
}
_UNKNOWN = ("a critical error of the driver", "look the number up in NVIDIA's list of Xid errors")


class NvmlSource:
    """Samples of NVIDIA's GPUs; ``door`` is asked anew each time, for a fork closes it."""

    name = "nvml"

    def __init__(
        self,
        door: Callable[[], nvml.Nvml] = nvml.door,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._door = door
        self._clock = clock
        self._monotonic = monotonic
        self._rates = Rates(monotonic)
        self._xids = XidLog()
        self._driver: str | None = None
        self._cuda: str | None = None
        # By UUID and tier: when it was read, and what.
        self._kept: dict[tuple[str, str], tuple[float, Any]] = {}
        self._present: tuple[nvml.Gpu, ...] = ()
        self._samples: list[GpuSample] = []

    def software(self) -> dict[str, str]:
        """The driver's version, and the newest CUDA that it can run: ``"13.0"``."""
        if self._driver is None:
            version = self._door().system("nvmlSystemGetDriverVersion")
            self._driver = None if version is None else str(version)
        if self._cuda is None:
            number = self._door().system("nvmlSystemGetCudaDriverVersion")
            self._cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
        told = {"driver": self._driver, "cuda": self._cuda}
        return {name: version for name, version in told.items() if version}

    def gpus(self, host: Host, patience: float = 0.0) -> list[GpuSample]:
        """All GPUs, also lost ones; ``patience``: how many times its interval a reading may be old,
        and unless 0, Xid errors are watched."""
        door = self._door()
        gpus = door.gpus()
        if not gpus:
            self._driver = self._cuda = None
        if patience:
            self._xids.add(door.xids(), self._clock())
        self._present = ()
        samples = [self._sample(door, gpu, host, patience) for gpu in gpus]
        known = {gpu.uuid for gpu in gpus}
        samples += [self._lost(gpu) for gpu in door.gone if gpu.uuid not in known]
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] in known}
        # A stable sort: MIG devices stay behind their parent.
        self._samples = sorted(samples, key=lambda sample: sample.index or 0)
        return self._samples

    def processes(self, patience: float = 0.0) -> list[ProcessSample]:
        """Who holds memory where; `patience` as in :meth:`gpus`. Takes some ms per GPU."""
        door = self._door()
        found: list[ProcessSample] = []
        for gpu in _uncut(door.gpus()):
            lists = {tier.name: self._reading(door, gpu, tier, patience) for tier in LISTS}
            busy = None if gpu.parent else self._reading(door, gpu, BUSY, patience)
            found += merge(gpu, lists, busy)
        return found

    def problems(self) -> list[Problem]:
        """The driver that cannot be asked; the GPUs that are lost or silent; late Xid errors."""
        door = self._door()
        found = [] if door.fault is None else [_problem(door.fault)]
        found += [_problem(fault, uuid) for uuid, fault in door.lost.items()]
        lost = door.lost
        found += [_problem(f, uuid) for uuid, f in door.silent.items() if uuid not in lost]
        return found + self._xids.problems(self._samples, self._clock())

    def chore(self, *, processes: bool, seconds: float) -> None:
        """Read ahead what is due, the longest overdue first, for at most so long."""
        door = self._door()
        end = self._monotonic() + seconds
        jobs = [(gpu, tier) for gpu in self._present for tier in TIERS]
        if processes:
            jobs += [(gpu, tier) for tier in LISTS for gpu in _uncut(self._present)]
            jobs += [(gpu, BUSY) for gpu in _uncut(self._present) if not gpu.parent]
        for gpu, tier in sorted(jobs, key=lambda job: self._due(job[0], job[1], 1.0)):
            now = self._monotonic()
            if now >= end or self._due(gpu, tier, 1.0) > now + _EARLY_S:
                return
            self._read(door, gpu, tier)

    def _sample(self, door: nvml.Nvml, gpu: nvml.Gpu, host: Host, patience: float) -> GpuSample:
        values, alive = fast(door, gpu)
        if gpu.uuid in door.lost:
            return self._lost(gpu)
        if alive:
            self._present = (*self._present, gpu)
            for tier in TIERS:
                values.update(self._reading(door, gpu, tier, patience))
        unified = (
            gpu.memory_total is None and gpu.parent is None and values["utilization"] is not None
        )
        if unified:
            values.update(memory_total=host.memory_total, memory_used=host.memory_used)
        xid, xid_time = self._xids.last(gpu.uuid)
        return GpuSample(
            uuid=gpu.uuid,
            name=gpu.name,
            index=gpu.index,
            mig=gpu.parent,
            unified=unified,
            xid=xid,
            xid_time=xid_time,
            **values,
        )

    def _lost(self, gpu: nvml.Gpu) -> GpuSample:
        return GpuSample(gpu.uuid, gpu.name, gpu.index, lost=True)

    def _reading(self, door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier, patience: float) -> Any:
        """What a tier told of a GPU, read anew if that is too old."""
        if self._due(gpu, tier, patience) <= self._monotonic():
            self._read(door, gpu, tier)
        return self._kept[gpu.uuid, tier.name][1]

    def _read(self, door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier) -> None:
        now = self._monotonic()
        found: Any
        if tier is BUSY:
            found = door.busy(gpu, 2 * tier.every_s)
        elif tier in LISTS:
            found = read_list(door, gpu, tier)
        else:
            found = read(door, gpu, tier, self._rates)
        self._kept[gpu.uuid, tier.name] = (now, found)

    def _due(self, gpu: nvml.Gpu, tier: Tier, patience: float) -> float:
        kept = self._kept.get((gpu.uuid, tier.name))
        if kept is None:
            return float("-inf")
        at, found = kept
        return at + patience * ((not found and tier.empty_s) or tier.every_s)


class XidLog:
    """Errors with the seconds of Unix time at which they were seen."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, float]] = {}
        self._seen: dict[tuple[str, int], float] = {}

    def add(self, found: Iterable[tuple[str, int]], time: float) -> None:
        """UUID and number of each error that came since the last time."""
        for uuid, number in found:
            self._last[uuid] = (number, time)
            self._seen[uuid, number] = time

    def last(self, uuid: str) -> tuple[int | None, float | None]:
        """The last error of a GPU since watching began, and when."""
        return self._last.get(uuid, (None, None))

    def problems(self, gpus: Iterable[GpuSample], time: float) -> list[Problem]:
        """One for each number that a GPU reported in the last ten minutes."""
        # A clock that was set back must not keep them for ever.
        self._seen = {key: at for key, at in self._seen.items() if 0 <= time - at <= _XID_TOLD_S}
        known = {gpu.uuid: gpu for gpu in gpus}
        return [_xid_problem(known[uuid], number) for uuid, number in self._seen if uuid in known]


def _xid_problem(gpu: GpuSample, number: int) -> Problem:
    meaning, cure = _MEANINGS.get(number, _UNKNOWN)
    who = f"{gpu.name or 'a GPU'} (NVML {gpu.index})"
    cause = f"{who} reported Xid {number}: {meaning}"
    return Problem("xid", cause, cure.format(index=gpu.index), gpu.uuid)


def _uncut(gpus: tuple[nvml.Gpu, ...]) -> list[nvml.Gpu]:
    """A GPU that is cut into MIG devices lists theirs once more."""
    cut = {gpu.parent for gpu in gpus}
    return [gpu for gpu in gpus if gpu.uuid not in cut]


def _problem(fault: nvml.DriverFault, uuid: str | None = None) -> Problem:
    # A lost GPU whose UUID was never seen is known by its index only.
    known = uuid if uuid and not uuid.startswith("index ") else None
    return Problem(fault.code, fault.cause, fault.cure, known)
