"""Make a DataLoader's batches on the host, then copy them to the device for new tensors.

The ledger, which records copies between devices, recognizes batches by this file's name.
"""

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from gpumagic.placement import placement, suspended


def deliver(next_batch: Callable[..., Any], args: Any, kwargs: Any, frame: FrameType | None) -> Any:
    """Make a DataLoader's next batch on the host, and return its copy on the device."""
    place = placement()
    with suspended():
        batch = next_batch(*args, **kwargs)
    if place is None or not place.batches or place.device is None:
        return batch
    copied: list[int] = []
    batch = _copy_batch(place.device, copied, batch)
    if copied:
        place.delivered.append(copied)
    return batch


def _copy_batch(device: torch.device, copied: list[int], batch: Any) -> Any:
    """Return a batch copied to a device; append the bytes of each copied tensor to `copied`."""

    def leaf(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            sparse = item.layout is torch.sparse_coo
            parts = (item._indices(), item._values()) if sparse else (item,)
            if item.device != device:
                copied.append(sum(part.nbytes for part in parts))
            return item.to(device, non_blocking=item.is_pinned())
        if isinstance(item, PackedSequence):  # `batch_sizes` must stay on the host
            data, *indices = _copy_batch(device, copied, (item[0], *item[2:]))
            return PackedSequence(data, item.batch_sizes, *indices)
        if hasattr(item, "to") and (isinstance(item, Mapping) or hasattr(item, "pin_memory")):
            # A batch of tokens or graphs. `tree_map` does not search such a batch: call its `to`.
            held = item if isinstance(item, Mapping) else vars(item)
            for each in held.values():
                if isinstance(each, torch.Tensor) and each.device != device:
                    copied.append(each.nbytes)
            return item.to(device)
        return item

    return tree_map(leaf, batch, is_leaf=lambda item: isinstance(item, PackedSequence))
