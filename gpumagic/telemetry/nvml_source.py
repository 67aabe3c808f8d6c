"""Sample NVIDIA's GPUs by NVML, each reading as often as its kind needs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.nvml_holders import LISTS, merge, read_list
from gpumagic.telemetry.nvml_readings import STILL, TIERS, Tier, fast, read
from gpumagic.telemetry.rates import Rates
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample
from gpumagic.telemetry.xid import XidLog

# A tick may come a little early.
_EARLY_S = 0.05


class NvmlSource:
    """Samples of NVIDIA's GPUs; ``door`` is asked anew each time, for a fork closes it."""

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
        # By UUID and tier: when it was read, and what.
        self._kept: dict[tuple[str, str], tuple[float, Any]] = {}
        self._present: tuple[nvml.Gpu, ...] = ()
        self._samples: list[GpuSample] = []

    def driver(self) -> str | None:
        """The driver's version."""
        if self._driver is None:
            version = self._door().system("nvmlSystemGetDriverVersion")
            self._driver = None if version is None else str(version)
        return self._driver

    def gpus(self, host: Host, patience: float = 0.0) -> list[GpuSample]:
        """All GPUs, also lost ones; the host's memory stands for that of one that shares it.

        ``patience``: how many times its interval a reading may be old; unless 0, Xid errors are
        watched.
        """
        door = self._door()
        gpus = door.gpus()
        if not gpus:
            self._driver = None
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
            found += merge(gpu, lists)
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
        if tier in LISTS:
            found = read_list(door, gpu, tier)
        else:
            _, limits = self._kept.get((gpu.uuid, STILL.name), (now, {}))
            found = read(door, gpu, tier, self._rates, limits)
        self._kept[gpu.uuid, tier.name] = (now, found)

    def _due(self, gpu: nvml.Gpu, tier: Tier, patience: float) -> float:
        kept = self._kept.get((gpu.uuid, tier.name))
        if kept is None:
            return float("-inf")
        at, found = kept
        return at + patience * ((not found and tier.empty_s) or tier.every_s)


def _uncut(gpus: tuple[nvml.Gpu, ...]) -> list[nvml.Gpu]:
    """A GPU that is cut into MIG devices lists theirs once more."""
    cut = {gpu.parent for gpu in gpus}
    return [gpu for gpu in gpus if gpu.uuid not in cut]


def _problem(fault: nvml.DriverFault, uuid: str | None = None) -> Problem:
    # A lost GPU whose UUID was never seen is known by its index only.
    known = uuid if uuid and not uuid.startswith("index ") else None
    return Problem(fault.code, fault.cause, fault.cure, known)
