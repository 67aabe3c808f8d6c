"""Compare what a dry run would hold with what each device has."""

import time
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from gpumagic.device import here as devices_here
from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.dryrun.result import Peak


@dataclass(frozen=True)
class Before:
    """What there is before the code, measured where the devices may be used."""

    time: float  # seconds, by a clock that only grows
    memory: dict[str, tuple[int, int | None]]  # bytes allocated and free, by device
    virtual: bool
    real: list[tuple[Any, int]]  # properties and bytes allocated, where a driver is in use


def measure(target: torch.device | None) -> Before:
    """Measure each device that this process uses, or will use for `target`."""
    memory: dict[str, tuple[int, int | None]]
    memory, real = {"cpu": (0, int(psutil.virtual_memory().available))}, []
    virtual = any(device.virtual for device in devices_here(memory=False))
    if target is not None and target.type == "cuda":
        torch.cuda.init()
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            allocated = torch.cuda.memory_allocated(index)
            # What torch keeps for later is free for torch, though not to the driver.
            unused = torch.cuda.memory_reserved(index) - allocated
            memory[f"cuda:{index}"] = allocated, torch.cuda.mem_get_info(index)[0] + unused
            if not virtual:
                real.append((torch.cuda.get_device_properties(index), allocated))
    return Before(time.monotonic(), memory, virtual, real)


def peaks(held: HeldMemory, before: Before) -> dict[str, Peak]:
    """The peak of every device on which the code had tensors."""
    found = {}
    for device in sorted(held.most):
        start = held.start.get(device, 0)
        most = max(held.most[device], held.now.get(device, 0))
        allocated, free = before.memory.get(device, (start, None))
        base = start if device == "cpu" else allocated
        if device == "meta" or (most == 0 and start == 0):
            continue
        found[device] = Peak(
            device, base + most - start, max(most - start, 0), free, held.at.get(device)
        )
    return found
