"""Make storages on virtual GPUs: torch calls a constructor that C++ refuses for them."""

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


_REAL_ONLY = {
    "resize_": "virtual GPUs cannot resize a storage, as FSDP does; use a mesh of CPUs",
    "_share_cuda_": "virtual GPUs share no memory with other processes; send tensor.cpu()",
}


def refusals() -> dict[str, Any]:
    """What C++ has for the storages of real GPUs only, as methods that say so."""
    return {name: _refusal(getattr(torch.UntypedStorage, name), name) for name in _REAL_ONLY}


def _refusal(method: Any, name: str) -> Any:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "cuda":
            raise NotImplementedError(_REAL_ONLY[name])
        return method(self, *args, **kwargs)

    return refuse
