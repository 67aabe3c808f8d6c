"""Make storages on virtual GPUs: torch calls a constructor that C++ refuses for them."""

from __future__ import annotations

from typing import Any

import torch


def make(nbytes: int, device: torch.device) -> Any:
    """A storage of `nbytes` on a virtual GPU, charged to it."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()


def to(
    self: Any, device: torch.device, non_blocking: bool = False, _to: Any = torch._utils._to
) -> Any:
    """`torch.storage._to`, which `UntypedStorage.cuda` and `torch.load` call."""
    if device.type != "cuda" or self.device == device:
        return _to(self, device, non_blocking)
    return make(self.nbytes(), device).copy_(self)


def clone(self: Any, _clone: Any = torch.storage._StorageBase.clone) -> Any:
    """`UntypedStorage.clone`, by which `copy.deepcopy` copies a tensor."""
    if self.device.type != "cuda":
        return _clone(self)
    return make(self.nbytes(), self.device).copy_(self)
