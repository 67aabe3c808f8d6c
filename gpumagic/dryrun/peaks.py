"""Compare what a dry run would hold with what each device has."""

import psutil
import torch

from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.dryrun.result import Peak

Room = dict[str, tuple[int, int | None]]


def room(target: torch.device | None) -> Room:
    """Bytes allocated now and bytes free, of each device that this process uses."""
    found: Room = {"cpu": (0, int(psutil.virtual_memory().available))}
    if target is not None and target.type == "cuda":
        torch.cuda.init()
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            allocated = torch.cuda.memory_allocated(index)
            # What torch keeps for later is free for torch, though not to the driver.
            unused = torch.cuda.memory_reserved(index) - allocated
            found[f"cuda:{index}"] = allocated, torch.cuda.mem_get_info(index)[0] + unused
    return found


def peaks(held: HeldMemory, before: Room) -> dict[str, Peak]:
    """The peak of every device on which the code had tensors."""
    found = {}
    for device in sorted(held.most):
        start = held.start.get(device, 0)
        most = max(held.most[device], held.now.get(device, 0))
        allocated, free = before.get(device, (start, None))
        base = start if device == "cpu" else allocated
        if device == "meta" or (most == 0 and start == 0):
            continue
        found[device] = Peak(
            device, base + most - start, max(most - start, 0), free, held.at.get(device)
        )
    return found
