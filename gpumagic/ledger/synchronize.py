"""Wrap the functions of torch that wait and are no operators, and the one that prints a tensor."""

import functools
import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch._tensor_str

from gpumagic.ledger.attribute import HOST, add, counts, here
from gpumagic.ledger.copy_kernels import After, Kernel, counted
from gpumagic.usercode.files import is_ours, unseen

_serials = itertools.count(1)


def patch_printing(stack: ExitStack) -> None:
    """Number each printing of a tensor, which makes many waits, until `stack` is closed."""
    _swap(stack, torch._tensor_str, "_str", _numbered)


def patch_synchronizing(stack: ExitStack) -> None:
    """Count the calls that do nothing but wait for a device, until `stack` is closed."""
    owners = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
    for owner in (*owners, getattr(torch, "accelerator", None)):
        if "synchronize" in getattr(owner, "__dict__", {}):
            _swap(stack, owner, "synchronize", _synchronizing)


def _swap(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    real = vars(owner)[name]
    ours = functools.wraps(real)(wrap(real))
    setattr(owner, name, ours)

    @stack.callback
    def put_back() -> None:
        if vars(owner).get(name) is ours:
            setattr(owner, name, real)


def _numbered(print_tensor: Callable[..., str]) -> Callable[..., str]:
    @unseen
    def numbered(*args: Any, **kwargs: Any) -> str:
        __tracebackhide__ = True
        before, here.serial = here.serial, next(_serials)
        try:
            return print_tensor(*args, **kwargs)
        finally:
            here.serial = before

    return numbered


def _synchronizing(synchronize: Kernel) -> Kernel:
    # torch.accelerator's may call torch.cuda's: one wait of the user's.
    return counted(synchronize, _before, waits=True)


def _before(*args: Any, **kwargs: Any) -> After | None:
    __tracebackhide__ = True
    if is_ours(sys._getframe(3).f_code.co_filename):  # what `%%ongpu` itself waits for
        return None
    thing = next(iter((*args, *kwargs.values())), None)
    device = getattr(thing, "device", thing)
    try:
        index = torch.cuda._utils._get_device_index(device, optional=True)
    except (ValueError, RuntimeError, AttributeError):
        return None
    found = counts((False, "synchronize", index, HOST, False), None)
    return lambda seconds: add(found, 0, seconds, True)


def settled(base: Kernel) -> Kernel:
    """The same kernel, but the wait for its GPU comes first, and lets other threads run.

    Called from Python, the kernel itself would hold Python's lock while it waits. Untested on a
    real GPU.
    """

    @unseen
    def kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if not (torch.cuda.get_sync_debug_mode() or torch.cuda.is_current_stream_capturing()):
            index = torch.Tensor.get_device(self)
            torch._C._CudaStreamBase.synchronize(torch.cuda.current_stream(index))
        return base(self, *args, **kwargs)

    return kernel
