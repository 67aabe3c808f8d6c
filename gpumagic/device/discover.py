"""List the CUDA devices of this process: its virtual ones, or those that CUDA would show it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from gpumagic import nvml
from gpumagic.device.cuda_visible import visible
from gpumagic.device.device import Device

VirtualDevices = Sequence[Device] | Callable[[], Sequence[Device]]

_virtual: VirtualDevices | None = None
_cuda_order: tuple[str, ...] | None = None
devices_changed: list[Callable[[], None]] = []
"""Called when virtual GPUs come or go: what was made for the devices before is stale."""


def set_virtual(devices: VirtualDevices | None) -> None:
    """Register this process's virtual GPUs; None takes them back.

    A function is asked at each use, so that ``memory_free`` is that of the moment.
    """
    global _virtual, _cuda_order
    _cuda_order = None  # of the devices that these replace, or that go now
    _virtual = devices if devices is None or callable(devices) else tuple(devices)
    for forget in devices_changed:
        forget()


def set_cuda_order(uuids: Sequence[str] | None) -> None:
    """Tell what CUDA itself reports: its devices' UUIDs, by ordinal. None forgets it.

    Once CUDA has started, it does not read the environment again and its own order is the truth.
    A UUID may lack its prefix, as torch gives it.
    """
    global _cuda_order
    _cuda_order = None if uuids is None else tuple(uuids)


def here(env: Mapping[str, str] | None = None, *, memory: bool = True) -> list[Device]:
    """The CUDA devices of this process, by ordinal: never an exception, empty without a driver.

    The virtual ones where they are on; else those that NVML knows and CUDA would show by `env`.
    With `memory`, how much is free too, which is a driver call per GPU.
    """
    if _virtual is not None:
        return list(_virtual() if callable(_virtual) else _virtual)
    physical = [
        Device("cuda", None, gpu.uuid, gpu.index, gpu.name, gpu.memory_total)
        for gpu in nvml.door().gpus()
    ]
    if _cuda_order is not None:
        found = _in_cuda_order(physical, _cuda_order)
    else:
        found = visible(physical, os.environ if env is None else env)
    if not memory:
        return found
    free = nvml.door().memory_free([device.uuid for device in found if device.uuid])
    return [replace(device, memory_free=free.get(device.uuid or "")) for device in found]


def _in_cuda_order(physical: Iterable[Device], order: Sequence[str]) -> list[Device]:
    by_uuid = {_bare(device.uuid): device for device in physical}
    return [
        replace(by_uuid.get(_bare(uuid), Device("cuda", uuid=uuid)), ordinal=ordinal)
        for ordinal, uuid in enumerate(order)
    ]


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()
