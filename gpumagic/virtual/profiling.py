"""Let torch's profiler have the CPU's times alone: virtual GPUs run no kernels of their own."""

import warnings
from typing import Any

import torch

_init: Any = torch.autograd.profiler.profile.__init__


class Nvtx:
    """Marks for a profiler that is not there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: 0


def on_the_cpu(
    self: Any, enabled: bool = True, *, use_cuda: bool = False, use_device: Any = None, **how: Any
) -> None:
    """`torch.autograd.profiler.profile.__init__`, where C++ would report a fault of each event."""
    if enabled and (use_cuda or use_device == "cuda"):
        warnings.warn("virtual GPUs: the profile has the CPU's times alone", stacklevel=3)
        how["use_cpu"], use_device = True, None
    _init(self, enabled, use_device=use_device, **how)
