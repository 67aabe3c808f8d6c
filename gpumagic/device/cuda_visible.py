"""Find which GPUs CUDA shows to a process, and in which order, from its environment.

The rules are those of CUDA as torch reads them (``torch.cuda._parse_visible_devices``), so that
``cuda:1`` here is torch's ``cuda:1``: numbers and UUIDs are not mixed, the list ends at its first
invalid entry, and a device named twice leaves none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpumagic.device.device import Device


def visible(physical: Sequence[Device], env: Mapping[str, str]) -> list[Device]:
    """CUDA's devices by ordinal, with ``ordinal`` and ``ordinal_certain`` set.

    `physical` has all GPUs in NVML's order, each followed by its MIG devices (which have its
    ``index``); `env` has ``CUDA_VISIBLE_DEVICES`` and ``CUDA_DEVICE_ORDER``. A process sees one MIG
    device at most, and no other GPU beside it.
    """
    gpus = [device for device in physical if not _is_mig(device)]
    text = env.get("CUDA_VISIBLE_DEVICES")
    by_uuid = text is not None and text.startswith(("GPU-", "MIG-"))
    if text is None:
        chosen: Sequence[Device] = gpus
    elif by_uuid:
        chosen = _by_uuid(text, [d for d in physical if _is_mig(d) == text.startswith("MIG-")])
    else:
        chosen = _by_number(text, gpus)
    # FASTEST_FIRST, the default, is NVML's order for certain only where all are equally fast.
    in_order = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    certain = by_uuid or in_order or len({device.name for device in gpus}) <= 1
    return [
        replace(device, ordinal=ordinal, ordinal_certain=certain)
        for ordinal, device in enumerate(_one_mig(chosen, physical))
    ]


def _is_mig(device: Device) -> bool:
    return (device.uuid or "").startswith("MIG-")


def _one_mig(chosen: Sequence[Device], physical: Sequence[Device]) -> Sequence[Device]:
    """CUDA enumerates one compute instance only, and then no whole GPU."""
    for device in chosen:
        if _is_mig(device):
            return [device]
        for other in physical:
            if _is_mig(other) and other.index == device.index:
                return [other]
    return chosen


def _by_number(text: str, gpus: Sequence[Device]) -> list[Device]:
    numbers: list[int] = []
    for entry in text.split(","):
        # As strtoul: what follows the digits is ignored, so "1gpu" is 1.
        digits = re.match(r"[+-]?[0-9]{1,9}", entry.strip())
        number = -1 if digits is None else int(digits[0])
        if number < 0:
            break
        if number in numbers:
            return []
        numbers.append(number)
    chosen = []
    for number in numbers:
        if number >= len(gpus):
            break
        chosen.append(gpus[number])
    return chosen


def _by_uuid(text: str, candidates: Sequence[Device]) -> list[Device]:
    chosen: list[Device] = []
    kind = text[:4]
    entries: list[str] = []
    for entry in text.split(","):
        if entry in entries:
            return []
        if not entry.startswith(kind):
            break
        entries.append(entry)
    for entry in entries:
        matches = [d for d in candidates if (d.uuid or "").startswith(entry)]
        if len(matches) != 1:
            break
        if matches[0] in chosen:
            return []
        chosen.append(matches[0])
    return chosen
