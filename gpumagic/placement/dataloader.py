"""Let a DataLoader work on the host under a placement, and copy its batches to the device.

A file of its own: the ledger recognizes these copies by the file (ledger/entry.py).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpumagic.placement.scope import placement, suspended
from gpumagic.usercode.files import unseen


def delivered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loader's `__next__`: the batch is made on the host and brought to the device."""

    @unseen
    @functools.wraps(method)
    def deliver(*args: Any, **kwargs: Any) -> Any:
        place = placement()
        with suspended():
            batch = method(*args, **kwargs)
        if place is None or not place.batches or place.device is None:
            return batch
        copied: list[int] = []
        batch = tree_map(functools.partial(_bring, place.device, copied), batch)
        if copied:
            place.delivered.append(copied)
        return batch

    return deliver


def pin_what_can_be(pin: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loader's `pin_memory`: a dataset that was made on the device has nothing to pin."""

    @unseen
    @functools.wraps(pin)
    def pinned(data: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(data, torch.Tensor) and data.device.type != "cpu":
            return data
        return pin(data, *args, **kwargs)

    return pinned


def _bring(device: torch.device, copied: list[int], item: Any) -> Any:
    """Copy a leaf of a batch to a device, and note the bytes of each tensor."""
    if isinstance(item, torch.Tensor):
        if item.device != device:
            copied.append(item.nbytes)
        return item.to(device, non_blocking=item.is_pinned())
    if hasattr(item, "to") and (isinstance(item, Mapping) or hasattr(item, "pin_memory")):
        # A batch of tokens or a batch of graphs: pytree does not know them, but they have a
        # `to` of their own.
        values = item.values() if isinstance(item, Mapping) else vars(item).values()
        copied += [value.nbytes for value in values if isinstance(value, torch.Tensor)]
        return item.to(device)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        parts = {f.name: getattr(item, f.name) for f in dataclasses.fields(item) if f.init}
        bring = functools.partial(_bring, device, copied)
        return dataclasses.replace(item, **tree_map(bring, parts))
    return item
