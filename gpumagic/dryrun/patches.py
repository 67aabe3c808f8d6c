"""Change what of torch fakes cannot go through, in a child that follows code.

Each has a reason: fakes are no plain tensors to it, it would start processes or use the device's
memory, or it would write a file. Only for a child that will end by itself: nothing is undone.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._meta_registrations
import torch.utils.data
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import optimizer as optimizers
from torch.utils import _foreach_utils
from torch.utils.data.dataloader import DataLoader, _SingleProcessDataLoaderIter

from gpumagic.dryrun.answers import Calls
from gpumagic.dryrun.fakes import Fakes, set_data
from gpumagic.dryrun.lazy import LazyBuffer, LazyParameter, new_lazy


def install(
    mode: Fakes,
    calls: Calls,
    note: Callable[[str], object],
    wait: Callable[..., object],
    virtual: bool,
) -> None:
    """Put all of it in force, for as long as this process lives.

    `note` is called with a phrase for what was left out, `wait` where the code waits for a device.
    """
    replaced: list[tuple[Any, str, Any]] = [
        (fake_tensor, "init_gpu_context", _nothing),
        (FakeTensor, "tolist", lambda self: calls.list_of(self, sys._getframe(1))),
        # How `Module.to` and its kin give a fake parameter its new data: torch's own way fails.
        (torch.utils, "swap_tensors", set_data),
        (UninitializedParameter, "__new__", new_lazy(mode, LazyParameter)),
        (UninitializedBuffer, "__new__", new_lazy(mode, LazyBuffer)),
        (DataLoader, "_get_iterator", _one_process),
        (torch, "save", _left_out("torch.save", note)),
        (torch.jit, "save", _left_out("torch.jit.save", note)),
        (torch, "compile", _eager(note)),
        (torch.cuda, "empty_cache", _nothing),
        (torch.cuda, "reset_peak_memory_stats", _nothing),
        (torch.cuda, "reset_accumulated_memory_stats", _nothing),
        (torch.cuda, "synchronize", wait),
        # A function mode is on: by that alone torch would leave its fused layers out.
        (torch.overrides, "has_torch_function", _no),
    ]
    if virtual:
        # Their kernels are the CPU's, which make other tensors beside the result.
        replaced.append((torch._meta_registrations, "device_hint", lambda tensor: "cpu"))
    for owner, name, value in replaced:
        setattr(owner, name, value)
    for module in (optimizers, _foreach_utils):
        # By their types torch decides whether an optimizer works on all tensors at once.
        module._foreach_supported_types.append(FakeTensor)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _no(*args: Any) -> bool:
    return False


def _left_out(name: str, note: Callable[[str], object]) -> Callable[..., object]:
    return lambda *args, **kwargs: note(f"{name} was left out")


def _eager(note: Callable[[str], object]) -> Callable[..., Any]:
    def compiled(model: Any = None, **options: Any) -> Any:
        note("torch.compile was left out: what it saves in memory is not counted")
        return model if model is not None else (lambda function: function)

    return compiled


def _one_process(loader: Any) -> Any:
    vars(loader).update(num_workers=0, pin_memory=False, prefetch_factor=None, timeout=0)
    return _SingleProcessDataLoaderIter(loader)
