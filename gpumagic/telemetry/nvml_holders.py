"""List who holds memory on which GPU, from the driver's lists of compute, graphics and MPS.

The most expensive thing to ask: the driver goes through all its clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.nvml_readings import Tier
from gpumagic.telemetry.snapshot import ProcessSample

# Where nobody was in a list of graphics or MPS, there will hardly be anybody soon.
LISTS = (
    Tier("compute", 3.0, {"list": ("nvmlDeviceGetComputeRunningProcesses",)}),
    Tier("graphics", 3.0, {"list": ("nvmlDeviceGetGraphicsRunningProcesses",)}, empty_s=15.0),
    Tier("mps", 3.0, {"list": ("nvmlDeviceGetMPSComputeRunningProcesses",)}, empty_s=15.0),
)


def read_list(door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier) -> tuple[Any, ...]:
    """NVML's entries of one list."""
    found = door.ask(gpu, tier.questions, alive=True)["list"]
    if found is None:
        # The older question where the driver is older than 510, or says no to the newer one.
        (function,) = tier.questions["list"]
        found = door.ask(gpu, {"list": (f"{function}_v2",)}, alive=True)["list"]
    return tuple(found or ())


def merge(gpu: nvml.Gpu, lists: Mapping[str, tuple[Any, ...]]) -> list[ProcessSample]:
    """A GPU's processes; one that is in two lists holds its memory once."""
    memory: dict[int, int | None] = {}
    kinds: dict[int, list[str]] = {}
    for kind, entries in lists.items():
        for entry in entries:
            pid = int(entry.pid)
            kinds.setdefault(pid, []).append(kind)
            known = [m for m in (memory.get(pid), entry.usedGpuMemory) if m is not None]
            memory[pid] = max(known, default=None)
    return [ProcessSample(gpu.uuid, pid, memory[pid], "+".join(kinds[pid])) for pid in memory]
