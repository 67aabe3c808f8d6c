"""List the devices of this process: virtual GPUs, or the GPUs of CUDA, HIP or Level Zero.

CUDA_VISIBLE_DEVICES is parsed as in torch's ``_parse_visible_devices``. For HIP,
``ROCR_VISIBLE_DEVICES`` first selects and orders the GPUs. ``HIP_VISIBLE_DEVICES``, or else
``CUDA_VISIBLE_DEVICES``, then selects among these GPUs
(https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html).
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import util
from itertools import takewhile
from pathlib import Path
from typing import Literal, NamedTuple

from gpumagic import drm, nvml


class TorchBuild(NamedTuple):
    """Version of the platform that torch was built for. The other platforms' fields are None."""

    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


@cache
def torch_build() -> TorchBuild:
    """Return the build of the installed torch, without importing torch."""
    with suppress(OSError, ValueError, ImportError):
        spec = util.find_spec("torch")
        for folder in (spec and spec.submodule_search_locations) or ():
            return read_build((Path(folder) / "version.py").read_text())
    return TorchBuild()


def read_build(text: str) -> TorchBuild:
    """Parse torch's ``version.py``, which has lines like ``hip: Optional[str] = '6.4.43482'``."""
    found = dict(re.findall(r"^(cuda|hip|xpu)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return TorchBuild(**found)


Kind = Literal["cpu", "cuda", "xpu", "mps"]


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on."""

    kind: Kind  # torch's name, which is "cuda" also for AMD GPUs
    ordinal: int | None = None  # number in this process: the 1 of cuda:1 or xpu:1
    uuid: str | None = None  # "GPU-…" or "MIG-…"; "PCI-…" if the GPU has no UUID
    index: int | None = None  # number in nvidia-smi; for AMD and Intel, counted by PCI address
    name: str | None = None
    memory_total: int | None = None  # bytes
    memory_free: int | None = field(default=None, compare=False)
    virtual: bool = False
    note: str | None = field(default=None, compare=False)  # why the CPU replaces a missing GPU
    ordinal_certain: bool = field(default=True, compare=False)  # False if torch's number may differ

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}" if self.kind in ("cuda", "xpu") else self.kind

    @property
    def label(self) -> str:
        """The name to show: ``"cuda:1"``, or ``"cuda:1 (virtual)"``."""
        return f"{self} (virtual)" if self.virtual else str(self)


CPU = Device("cpu")
_virtual: Callable[[], Sequence[Device]] | None = None
_cuda_order: tuple[Device, ...] | None = None
_cuda_free: Callable[[int], int | None] | None = None
devices_changed: list[Callable[[], None]] = []
"""Functions that drop data about old devices when virtual GPUs are turned on or off."""


def set_virtual(devices: Callable[[], Sequence[Device]] | None) -> None:
    """Register a function that lists this process's virtual GPUs; None removes it."""
    global _virtual, _cuda_order
    _cuda_order = None  # the recorded order lists the former devices
    _virtual = devices
    for forget in devices_changed:
        forget()


def has_virtual() -> bool:
    return _virtual is not None


def set_cuda_order(
    devices: Sequence[Device] | None, free: Callable[[int], int | None] | None = None
) -> None:
    """Record CUDA's devices in CUDA's order. `free` returns the free bytes of an ordinal's GPU."""
    # Once CUDA has started, changed environment variables no longer change CUDA's order.
    global _cuda_order, _cuda_free
    _cuda_order, _cuda_free = None if devices is None else tuple(devices), free


def physical_gpus(driver: nvml.Nvml | None = None) -> list[Device]:
    """Return NVIDIA's GPUs in NVML's order, each followed by its MIG devices."""
    return [
        Device("cuda", None, gpu.uuid, gpu.index, gpu.name, gpu.memory_total)
        for gpu in (driver or nvml.shared_nvml()).gpus()
    ]


def amd_gpus(env: Mapping[str, str], root: Path = Path("/")) -> list[Device]:
    """Return the GPUs that torch for ROCm calls ``cuda``, sorted by ordinal, with free memory."""
    cards = enumerate(drm.graphics_cards(root, "amd"))
    known = {card.address: _of_card("cuda", index, card) for index, card in cards}
    gpus = [known[address] for address in drm.kfd_gpus(root) if address in known]
    left = _listed(gpus, env.get("ROCR_VISIBLE_DEVICES"))
    by_hip = env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))
    return _numbered(_listed(left, by_hip))


def intel_gpus(env: Mapping[str, str], root: Path = Path("/")) -> list[Device]:
    """Return the GPUs that torch calls ``xpu``. Omit integrated GPUs if any GPU is discrete."""
    known = list(enumerate(drm.graphics_cards(root, "intel")))
    cards = [(index, card) for index, card in known if not card.integrated] or known
    gpus = [_of_card("xpu", index, card) for index, card in cards]
    # In ZE_AFFINITY_MASK, ``1.0`` is tile 0 of GPU 1. Delete the tile numbers.
    mask = re.sub(r"\.[^,]*", "", env["ZE_AFFINITY_MASK"]) if "ZE_AFFINITY_MASK" in env else None
    # Level Zero does not document how it orders GPUs of different models.
    return _numbered(_listed(gpus, mask), certain=len({gpu.name for gpu in gpus}) <= 1)


def _of_card(kind: Kind, index: int, card: drm.GraphicsCard) -> Device:
    total, used = card.memory("total"), card.memory("used")
    free = None if total is None or used is None else total - used
    return Device(kind, None, card.uuid, index, card.name, total, free)


def _listed(gpus: list[Device], listed: str | None) -> list[Device]:
    """Return the GPUs that `listed` names, up to an invalid entry; all if `listed` is None."""
    found: list[Device] = []
    for entry in (part.strip() for part in listed.split(",")) if listed is not None else ():
        if re.fullmatch("[0-9]{1,8}", entry):
            match = gpus[int(entry) : int(entry) + 1]
        else:
            match = [gpu for gpu in gpus if entry and (gpu.uuid or "").startswith(entry)]
        if len(match) != 1:
            break
        found += [gpu for gpu in match if gpu not in found]
    return gpus if listed is None else found


def _numbered(gpus: Iterable[Device], certain: bool = True) -> list[Device]:
    return [replace(gpu, ordinal=n, ordinal_certain=certain) for n, gpu in enumerate(gpus)]


def here(*, memory: bool = True) -> list[Device]:
    """Return this process's GPUs in torch's order; `memory` adds their free bytes. Never raises."""
    if _virtual is not None:
        return list(_virtual())
    build = torch_build()
    if build.xpu is not None:
        return intel_gpus(os.environ)
    if build.hip is not None:
        return amd_gpus(os.environ)
    found = physical_gpus()
    if _cuda_order is not None:
        by_uuid = {_bare(device.uuid): device for device in found}
        found = [
            replace(known, ordinal=ordinal)
            if (known := by_uuid.get(_bare(device.uuid)))
            else replace(device, ordinal=ordinal, memory_free=_cuda_free and _cuda_free(ordinal))
            for ordinal, device in enumerate(_cuda_order)
        ]
    else:
        found = visible(found, os.environ)
    if not memory:
        return found
    free = nvml.shared_nvml().memory_free()
    return [replace(d, memory_free=free.get(d.uuid or "", d.memory_free)) for d in found]


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-").lower()


def visible(physical: Sequence[Device], env: Mapping[str, str]) -> list[Device]:
    """Return the devices that CUDA_VISIBLE_DEVICES in `env` selects, sorted by ordinal."""
    gpus = [device for device in physical if not _is_mig(device)]
    text = env.get("CUDA_VISIBLE_DEVICES")
    by_uuid = text is not None and text.startswith(("GPU-", "MIG-"))
    if text is None:
        chosen: Sequence[Device] = gpus
    elif by_uuid:
        chosen = _by_uuid(text, [d for d in physical if _is_mig(d) == text.startswith("MIG-")])
    else:
        chosen = _by_number(text, gpus)
    # CUDA's default order, FASTEST_FIRST, is known only if all GPUs are of one model.
    in_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    certain = by_uuid or in_order or len({device.name for device in gpus}) <= 1
    return _numbered(_one_mig(chosen, physical), certain)


def _is_mig(device: Device) -> bool:
    return (device.uuid or "").startswith("MIG-")


def _one_mig(chosen: Sequence[Device], physical: Sequence[Device]) -> Sequence[Device]:
    """Return `chosen`, or one MIG device if MIG splits a GPU in `chosen`: CUDA shows only one."""
    for device in chosen:
        if its := [other for other in physical if _is_mig(other) and other.index == device.index]:
            return [device if _is_mig(device) else its[0]]
    return chosen


def _by_number(text: str, gpus: Sequence[Device]) -> list[Device]:
    numbers: list[int] = []
    for entry in text.split(","):
        # Like strtoul, ignore text after the digits: "1gpu" is 1.
        digits = re.match(r"[+-]?[0-9]{1,9}", entry.strip())
        if digits is None or int(digits[0]) < 0:
            break
        if int(digits[0]) in numbers:
            return []
        numbers.append(int(digits[0]))
    return [gpus[n] for n in takewhile(lambda n: n < len(gpus), numbers)]


def _by_uuid(text: str, candidates: Sequence[Device]) -> list[Device]:
    entries = list(takewhile(lambda entry: entry.startswith(text[:4]), text.split(",")))
    chosen: list[Device] = []
    for entry in entries:
        matches = [d for d in candidates if (d.uuid or "").startswith(entry)]
        if len(matches) != 1:
            break
        chosen += matches
    named_twice = len(set(entries)) < len(entries) or len(set(chosen)) < len(chosen)
    return [] if named_twice else chosen
