"""Wrap the functions of torch that wait and are no operators, and the one that prints a tensor."""

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch._tensor_str

from gpumagic.ledger.attribute import HOST, add, counts, here, serials
from gpumagic.ledger.copy_kernels import After, Kernel, counted
from gpumagic.usercode.files import is_ours, unseen


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
        before, here.serial = here.serial, next(serials)
        try:
            return print_tensor(*args, **kwargs)
        finally:
            here.serial = before

    return numbered


def _synchronizing(synchronize: Kernel) -> Kernel:
    # torch.accelerator's may call torch.cuda's: one wait of the user's.
    return counted(synchronize, _before, within="synchronize")


def _before(*args: Any, **kwargs: Any) -> After | None:
    __tracebackhide__ = True
    # Waits of `%%ongpu` itself, and of a function that is counted already, are none of the user's.
    if here.within or is_ours(sys._getframe(3).f_code.co_filename):
        return None
    thing = next(iter((*args, *kwargs.values())), None)
    device = getattr(thing, "device", thing)
    try:
        index = torch.cuda._utils._get_device_index(device, optional=True)
    except (ValueError, RuntimeError, AttributeError):
        return None
    found = counts((False, "synchronize", index, HOST, False), None)
    return lambda seconds: add(found, 0, seconds, True)
