"""What code may set for the whole process or its thread, put back afterwards."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from gpumagic.isolation.interrupts import deferred

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


@contextmanager
def kept() -> Iterator[None]:
    """Put back what is set within, whatever happens there.

    Whether gradients are recorded, autocast, the default dtype and device, the number of threads,
    the precision of products, what is deterministic, the current GPU, whether garbage is collected,
    the filters of warnings, numpy's handling of errors, and the working directory.
    """
    before = [(get, put, value) for get, put in _settings() for value in _value_of(get)]
    modules = len(sys.modules)
    filters = warnings.filters[:]
    collects = gc.isenabled()
    try:
        yield
    finally:
        with deferred(), ExitStack() as stack:  # each, also if another fails
            stack.callback(gc.enable if collects else gc.disable)
            # Those that a library has set when it was imported are its own.
            if warnings.filters != filters and len(sys.modules) == modules:
                warnings.filters[:] = filters  # type: ignore[index]
                warnings._filters_mutated()  # type: ignore[attr-defined]
            for get, put, value in before:
                stack.callback(_put_back, get, put, value)


def thread_modes() -> Callable[[ExitStack], None]:
    """What gives another thread, until a stack is closed, the modes of this one.

    Of torch and of numpy: each thread decides for itself whether gradients are recorded.
    """
    inference = torch.is_inference_mode_enabled()
    here = [(put, value) for get, put in _of_a_thread() for value in _value_of(get)]

    def follow(stack: ExitStack) -> None:
        if inference:
            stack.enter_context(torch.inference_mode())
        for put, value in here:
            put(value)

    return follow


def _of_a_thread() -> Iterator[_Setting]:
    yield torch.is_grad_enabled, torch.set_grad_enabled
    yield torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    for kind in ("cpu", "cuda"):
        yield (
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        yield partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        yield numpy.geterr, lambda how: numpy.seterr(**how)


def _settings() -> Iterator[_Setting]:
    yield from _of_a_thread()
    yield torch.get_default_dtype, torch.set_default_dtype
    yield torch.get_default_device, _set_device
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    cudnn = torch.backends.cudnn
    for name in ("benchmark", "deterministic", "allow_tf32"):
        yield partial(getattr, cudnn, name), partial(setattr, cudnn, name)
    yield os.getcwd, os.chdir
    if torch.cuda.is_initialized():
        yield torch.cuda.current_device, torch.cuda.set_device


def _value_of(get: Callable[[], Any]) -> list[Any]:
    # torch refuses to say what was set in its new way and in its old; and a folder may be gone.
    with suppress(RuntimeError, AssertionError, OSError):
        return [get()]
    return []


def _put_back(get: Callable[[], Any], put: Callable[[Any], object], value: Any) -> None:
    # A GPU that failed must not keep the rest from being put back.
    with suppress(RuntimeError, AssertionError, OSError):
        if _value_of(get) != [value]:
            put(value)


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)
