"""Number AMD's and Intel's GPUs as HIP and Level Zero show them to a process.

``ROCR_VISIBLE_DEVICES`` leaves some, in its order; of those ``HIP_VISIBLE_DEVICES``, or else
``CUDA_VISIBLE_DEVICES``, leaves some (https://rocm.docs.amd.com/en/latest/conceptual/gpu-isolation.html).
Each is a list of numbers or of UUIDs, and ends at its first invalid entry.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def hip_order(gpus: Sequence[tuple[str, T]], env: Mapping[str, str]) -> list[T]:
    """Those that HIP shows, of all in ROCm's order, each with its UUID."""
    by_hip = env.get("HIP_VISIBLE_DEVICES", env.get("CUDA_VISIBLE_DEVICES"))
    left = _listed(_listed(gpus, env.get("ROCR_VISIBLE_DEVICES")), by_hip)
    return [gpu for _, gpu in left]


def xpu_order(gpus: Sequence[tuple[str, T]], env: Mapping[str, str]) -> list[T]:
    """Those that Level Zero shows: ``ZE_AFFINITY_MASK`` is a list of numbers, ``1.0`` a tile."""
    mask = env.get("ZE_AFFINITY_MASK")
    tiles = None if mask is None else ",".join(n.partition(".")[0] for n in mask.split(","))
    return [gpu for _, gpu in _listed(gpus, tiles)]


def _listed(gpus: Sequence[tuple[str, T]], listed: str | None) -> list[tuple[str, T]]:
    if listed is None:
        return list(gpus)
    found: list[tuple[str, T]] = []
    for entry in (part.strip() for part in listed.split(",")):
        if entry.isascii() and entry.isdigit() and len(entry) < 9:
            match = gpus[int(entry) : int(entry) + 1]
        else:
            match = [gpu for gpu in gpus if entry and gpu[0].startswith(entry)]
        if len(match) != 1:
            break
        found += [gpu for gpu in match if gpu not in found]
    return found
