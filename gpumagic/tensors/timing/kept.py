"""What code may set for the whole process, put back afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch


@contextmanager
def kept() -> Iterator[None]:
    """Put back whether gradients are recorded, the default dtype and device, the number of threads,
    the current GPU, and whether garbage is collected, whatever happens within."""
    with ExitStack() as stack:
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
        stack.callback(_set_dtype, torch.get_default_dtype())
        stack.callback(_set_device, torch.get_default_device())
        stack.callback(_set_threads, torch.get_num_threads())
        if torch.cuda.is_initialized():
            stack.callback(_set_current, torch.cuda.current_device())
        yield


def _set_dtype(dtype: torch.dtype) -> None:
    if torch.get_default_dtype() != dtype:
        torch.set_default_dtype(dtype)


def _set_device(device: torch.device) -> None:
    if torch.get_default_device() != device:
        torch.set_default_device(None if device.type == "cpu" else device)


def _set_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


def _set_current(index: int) -> None:
    # A GPU that failed must not keep the rest from being put back.
    with suppress(RuntimeError, AssertionError):
        torch.cuda.set_device(index)
