"""NVIDIA's GPUs, as NVML sees them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.nvml_holders import Holders
from gpumagic.telemetry.nvml_readings import SLOW, STILL, TIERS, Tier, fast, read
from gpumagic.telemetry.pace import patience
from gpumagic.telemetry.rates import Rates
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample
from gpumagic.telemetry.xid import XidLog

# How long chores are done in one go, and how much sooner than due, so that one wakes seldom.
_CHORES_S = 0.002
_EARLY_S = 0.05


class NvmlSource:
    """Samples of NVIDIA's GPUs.

    Parameters
    ----------
    door : callable
        Returns the door to NVML; asked anew each time, for a fork closes it.
    clock, monotonic : callable
        Seconds of Unix time; seconds that only grow.
    """

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
        self._holders = Holders(monotonic)
        self._xids = XidLog()
        self._driver: str | None = None
        # By UUID and tier: when it was read, by which handle, and what.
        self._kept: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
        self._present: tuple[nvml.Gpu, ...] = ()
        self._samples: list[GpuSample] = []
        self._helped_at = float("-inf")
        self._patience = 0.0

    def driver(self) -> str | None:
        """The driver's version."""
        if self._driver is None:
            version = self._door().system("nvmlSystemGetDriverVersion")
            self._driver = None if version is None else str(version)
        return self._driver

    def gpus(self, host: Host, *, paced: bool = False) -> list[GpuSample]:
        """All GPUs, those that are lost too.

        Parameters
        ----------
        host : Host
            Its memory stands for that of a GPU that shares it.
        paced : bool
            Read each thing as often as its tier says, and watch for Xid errors.
        """
        door = self._door()
        gpus = door.gpus()
        if not gpus:
            self._driver = None
        if paced:
            self._xids.add(door.xids(), self._clock())
            self._patience = patience(self._helped_at, self._monotonic())
        self._present = ()
        samples = [self._sample(door, gpu, host, paced) for gpu in gpus]
        known = {gpu.uuid for gpu in gpus}
        samples += [self._lost(gpu) for gpu in door.gone if gpu.uuid not in known]
        self._kept = {key: kept for key, kept in self._kept.items() if key[0] in known}
        # A stable sort: MIG devices stay behind their parent.
        self._samples = sorted(samples, key=lambda sample: sample.index or 0)
        return self._samples

    def processes(self, *, paced: bool = False) -> list[ProcessSample]:
        """Who holds memory where: pid and bytes. Walks the driver's clients: some ms per GPU."""
        door = self._door()
        return self._holders.samples(door, _uncut(door.gpus()), self._patience if paced else 0.0)

    def problems(self) -> list[Problem]:
        """The driver that cannot be asked; the GPUs that are lost or silent; late Xid errors."""
        door = self._door()
        found = [] if door.fault is None else [_problem(door.fault)]
        found += [_problem(fault, uuid) for uuid, fault in door.lost.items()]
        lost = door.lost
        found += [_problem(f, uuid) for uuid, f in door.silent.items() if uuid not in lost]
        return found + self._xids.problems(self._samples, self._clock())

    def chore(self, *, processes: bool) -> float:
        """Read ahead what will soon be due; in how many seconds there is more to read."""
        door = self._door()
        began = self._helped_at = self._monotonic()
        jobs: list[tuple[float, nvml.Gpu, Tier | str]] = []
        for gpu in self._present:
            jobs += [(self._due(gpu, tier, 1.0), gpu, tier) for tier in TIERS]
        if processes:
            jobs += self._holders.jobs(_uncut(self._present))
        jobs.sort(key=lambda job: job[0])
        for due, gpu, what in jobs:
            now = self._monotonic()
            if due > now + _EARLY_S:
                return due - now
            if now - began >= _CHORES_S:
                return 0.0
            if isinstance(what, Tier):
                self._read(door, gpu, what)
            else:
                self._holders.read(door, gpu, what)
        return SLOW.every_s or 0.0 if jobs else float("inf")

    def _sample(self, door: nvml.Nvml, gpu: nvml.Gpu, host: Host, paced: bool) -> GpuSample:
        values, alive = fast(door, gpu)
        if gpu.uuid in door.lost:
            return self._lost(gpu)
        if alive:
            self._present = (*self._present, gpu)
            for tier in TIERS:
                if not paced or self._due(gpu, tier, self._patience) <= self._monotonic():
                    self._read(door, gpu, tier)
                values.update(self._kept[gpu.uuid, tier.name][1])
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

    def _read(self, door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier) -> None:
        now = self._monotonic()
        _, limits = self._kept.get((gpu.uuid, STILL.name), (now, {}))
        self._kept[gpu.uuid, tier.name] = (now, read(door, gpu, tier, self._rates, limits))

    def _due(self, gpu: nvml.Gpu, tier: Tier, patience: float) -> float:
        kept = self._kept.get((gpu.uuid, tier.name))
        if kept is None:
            return float("-inf")
        return float("inf") if tier.every_s is None else kept[0] + patience * tier.every_s


def _uncut(gpus: tuple[nvml.Gpu, ...]) -> list[nvml.Gpu]:
    """A GPU that is cut into MIG devices lists theirs once more."""
    cut = {gpu.parent for gpu in gpus}
    return [gpu for gpu in gpus if gpu.uuid not in cut]


def _problem(fault: nvml.DriverFault, uuid: str | None = None) -> Problem:
    # A lost GPU whose UUID was never seen is known by its index only.
    known = uuid if uuid and not uuid.startswith("index ") else None
    return Problem(fault.code, fault.cause, fault.cure, known)
