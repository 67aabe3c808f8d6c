"""Who holds memory on which GPU. The dearest question: the driver walks all its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.snapshot import ProcessSample

EVERY_S = 3.0
# Where nobody was in a list of graphics or MPS, there will hardly be anybody soon.
_SELDOM_S = 15.0

_KINDS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}


class Holders:
    """The lists of processes, each with the moment at which it was read.

    Parameters
    ----------
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lists: dict[tuple[str, str], tuple[float, tuple[Any, ...]]] = {}

    def jobs(self, gpus: Iterable[nvml.Gpu]) -> list[tuple[float, nvml.Gpu, str]]:
        """When which list is to be read: one of compute before the others."""
        return [(self._due(gpu, kind, 1.0), gpu, kind) for kind in _KINDS for gpu in gpus]

    def samples(
        self, door: nvml.Nvml, gpus: Iterable[nvml.Gpu], patience: float
    ) -> list[ProcessSample]:
        """Who holds memory on these GPUs: as last read, where that is not longer ago than so many
        times what is meant."""
        gpus = list(gpus)
        present = {gpu.uuid for gpu in gpus}
        self._lists = {key: found for key, found in self._lists.items() if key[0] in present}
        now = self._clock()
        for gpu in gpus:
            for kind in _KINDS:
                if self._due(gpu, kind, patience) <= now:
                    self.read(door, gpu, kind)
        return [sample for gpu in gpus for sample in self._merged(gpu)]

    def read(self, door: nvml.Nvml, gpu: nvml.Gpu, kind: str) -> None:
        """Ask for one list."""
        now = self._clock()
        answer = None
        # The older question where the driver is older than 510, or says no to the newer one.
        for function in (_KINDS[kind], f"{_KINDS[kind]}_v2"):
            if answer is None:
                answer = door.ask(gpu, {kind: (function,)}, alive=True)[kind]
        self._lists[gpu.uuid, kind] = (now, tuple(answer or ()))

    def _due(self, gpu: nvml.Gpu, kind: str, patience: float) -> float:
        at, found = self._lists.get((gpu.uuid, kind), (float("-inf"), ()))
        return at + patience * (EVERY_S if found or kind == "compute" else _SELDOM_S)

    def _merged(self, gpu: nvml.Gpu) -> list[ProcessSample]:
        memory: dict[int, int | None] = {}
        kinds: dict[int, list[str]] = {}
        for kind in _KINDS:
            for holder in self._lists[gpu.uuid, kind][1]:
                pid = int(holder.pid)
                kinds.setdefault(pid, []).append(kind)
                # A process in two lists holds its memory once.
                known = [m for m in (memory.get(pid), holder.usedGpuMemory) if m is not None]
                memory[pid] = max(known, default=None)
        return [ProcessSample(gpu.uuid, pid, memory[pid], "+".join(kinds[pid])) for pid in memory]
