"""Read a snapshot back from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpumagic.errors import Problem
from gpumagic.telemetry.snapshot import (
    GpuSample,
    Host,
    KernelDeath,
    KernelSample,
    ProcessSample,
    Snapshot,
)

KINDS: dict[str, type] = {
    "gpus": GpuSample,
    "processes": ProcessSample,
    "problems": Problem,
    "kernels": KernelSample,
    "events": KernelDeath,
}


def snapshot_in(data: str | bytes | Mapping[str, Any]) -> Snapshot:
    """The snapshot in a JSON text, or in what ``to_dict`` returned."""
    told = dict(data if isinstance(data, Mapping) else json.loads(data))
    for name, kind in KINDS.items():
        told[name] = tuple(kind(**_tuples(item)) for item in told.get(name, ()))
    return Snapshot(**_tuples(told) | {"host": Host(**told.get("host", {}))})


def _tuples(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in item.items()}
