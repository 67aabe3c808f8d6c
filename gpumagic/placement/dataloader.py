"""Let a DataLoader work on the host under a placement, and copy its batches to the device.

The ledger recognizes these copies by this file's name.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpumagic.placement import placement, suspended


def deliver(
    next_batch: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    frame: FrameType | None,
) -> Any:
    """Make a loader's next batch on the host and copy it to the device."""
    place = placement()
    with suspended():
        batch = next_batch(*args, **kwargs)
    if place is None or not place.batches or place.device is None:
        return batch
    copied: list[int] = []
    batch = tree_map(partial(_bring, place.device, copied), batch)
    if copied:
        place.delivered.append(copied)
    return batch


def _bring(device: torch.device, copied: list[int], item: Any) -> Any:
    """Copy a leaf of a batch to a device, and record the bytes of each tensor."""
    if isinstance(item, torch.Tensor):
        copied += [item.nbytes] if item.device != device else []
        return item.to(device, non_blocking=item.is_pinned())
    if hasattr(item, "to") and (isinstance(item, Mapping) or hasattr(item, "pin_memory")):
        # A batch of tokens or graphs. pytree does not support its type, but it has a `to`.
        values = item.values() if isinstance(item, Mapping) else vars(item).values()
        copied += [value.nbytes for value in values if isinstance(value, torch.Tensor)]
        return item.to(device)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.init}
        return dataclasses.replace(item, **tree_map(partial(_bring, device, copied), parts))
    return item
