"""DataLoader under a placement: the loader works on the host, its batches land on the device."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpumagic.tensors.placement import placement, suspended


def host_only(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method without placement: seeds, samplers and shared memory are the host's."""

    @functools.wraps(method)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        with suspended():
            return method(*args, **kwargs)

    return on_host


def delivered(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a loader's `__next__`: the batch is made on the host and brought to the device."""

    @functools.wraps(method)
    def deliver(*args: Any, **kwargs: Any) -> Any:
        place = placement()
        with suspended():
            batch = method(*args, **kwargs)
        if place is None or not place.batches or place.device is None:
            return batch
        copied = 0

        def bring(item: Any) -> Any:
            nonlocal copied
            if isinstance(item, torch.Tensor):
                if item.device != place.device:
                    copied += item.nbytes
                return item.to(place.device, non_blocking=item.is_pinned())
            if hasattr(item, "to") and (isinstance(item, Mapping) or hasattr(item, "pin_memory")):
                # A batch of tokens or a batch of graphs: pytree does not know them, but they have
                # a `to` of their own.
                values = item.values() if isinstance(item, Mapping) else vars(item).values()
                copied += sum(v.nbytes for v in values if isinstance(v, torch.Tensor))
                return item.to(place.device)
            return item

        batch = tree_map(bring, batch)
        if copied:
            place.delivered.append(copied)
        return batch

    return deliver
