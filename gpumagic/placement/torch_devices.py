"""Find the devices that torch can use in this process."""

from functools import lru_cache
from typing import Any

import torch

from gpumagic import device as names
from gpumagic.device import Device, cuda_state
from gpumagic.errors import GpuError


def devices(*, memory: bool = True) -> list[Device]:
    """Return the GPUs that torch can use, ordered by ordinal; if `memory`, with free memory."""
    tell_cuda_order()
    known = names.here(memory=memory)
    kind: Any = "xpu" if any(device.kind == "xpu" for device in known) else "cuda"
    space = getattr(torch, kind)
    if len(known) == space.device_count() and all(device.uuid for device in known):
        return known
    # Use torch's list, because the driver's list is empty (as on a Jetson) or has other GPUs.
    return [
        Device(
            kind,
            ordinal=index,
            name=space.get_device_name(index),
            memory_free=space.mem_get_info(index)[0] if memory else None,
        )
        for index in range(space.device_count())
    ]


def tell_cuda_order() -> None:
    """Tell `gpumagic.device` which GPU has each CUDA ordinal, as far as torch knows."""
    if torch.cuda.is_initialized():
        every = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        known = all(hasattr(properties, "uuid") for properties in every)
        found = [
            Device("cuda", n, f"GPU-{p.uuid}", None, p.name, p.total_memory)
            for n, p in enumerate(every if known else ())
        ]
    else:  # do not initialize CUDA; use torch's count of GPUs only if the driver lists none
        ask = torch.version.cuda and not names.has_virtual() and not names.physical_gpus()
        found = [Device("cuda", n) for n in range(torch.cuda.device_count() if ask else 0)]
    names.set_cuda_order(found or None, _free)


def _free(ordinal: int) -> int | None:
    """Return a GPU's free bytes; None without a CUDA context, because a query would create one."""
    return torch.cuda.mem_get_info(ordinal)[0] if ordinal in cuda_state.started() else None


def find(where: object) -> Device:
    """Return the one device that `where` names; raise GpuError if torch cannot use it."""
    here = devices(memory="free" in str(where))
    unusable = [] if here else names.here(memory=False)
    current = torch.cuda.current_device() if here and cuda_state.live_cuda() else 0
    target = names.resolve_one(where, here or unusable, current=current)
    if unusable and target.kind in ("cuda", "xpu"):
        cure = "type cpu, or install a build of torch for it: %gpus --doctor"
        raise GpuError(f"{target} is there, but torch {torch.__version__} cannot use it; {cure}")
    if target.kind == "cuda":
        cuda_state.check()
    elif target.kind == "mps" and not torch.backends.mps.is_available():
        raise GpuError(f"{where} is mps, but this torch has no mps device; type cpu")
    return target


def find_several(where: object) -> list[Device]:
    """Return the devices that `where` names, such as ``"0,1"`` or ``"all"``."""
    cuda_state.check()
    return names.resolve(where, devices(memory="free" in str(where)))


@lru_cache
def as_torch(device: Device) -> torch.device:
    """Return a `Device` as a `torch.device`, equal to the `.device` of tensors on it."""
    return torch.device("mps", 0) if device.kind == "mps" else torch.device(str(device))
