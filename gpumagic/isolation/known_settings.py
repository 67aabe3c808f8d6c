"""List the settings of Python, torch, numpy, matplotlib and JAX that code may change."""

import gc
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from gpumagic.usercode.values import torch_here


class Setting(NamedTuple):
    """One setting to restore."""

    name: str
    # Returns its value; a copy if the value is changed in place.
    read: Callable[[], Any]
    write: Callable[[Any], object]
    # Repeated runs of a program may append to it.
    grows: bool = False


def pairs(owner: Any, *names: tuple[str, str]) -> list[Setting]:
    """Settings by functions to read and write, if this version of `owner` has them."""
    return [
        Setting(f"{owner.__name__}.{write}", getattr(owner, read), getattr(owner, write))
        for read, write in names
        if hasattr(owner, read) and hasattr(owner, write)
    ]


def accessors(owner: Any, *names: str) -> list[Setting]:
    """Settings by functions ``get…`` and ``set…``."""
    return pairs(owner, *((f"get{name}", f"set{name}") for name in names))


def _name(owner: Any) -> str:
    return str(getattr(owner, "__name__", type(owner).__name__))


def attributes(owner: Any, *names: str) -> list[Setting]:
    """Settings that are attributes of a module."""
    return [
        Setting(
            f"{_name(owner)}.{name}", partial(getattr, owner, name), partial(setattr, owner, name)
        )
        for name in names
    ]


def sequence(owner: Any, name: str) -> Setting:
    """A setting that is a list, restored in place."""

    def write(before: tuple[list[Any], list[Any]]) -> None:
        kept, items = before
        kept[:] = items
        setattr(owner, name, kept)

    def read() -> tuple[list[Any], list[Any]]:
        now = getattr(owner, name)
        return now, list(now)

    return Setting(f"{_name(owner)}.{name}", read, write, grows=True)


def mapping(name: str, held: Any, *, grows: bool = False) -> Setting:
    """A setting that is a mapping, restored in place; only changed items are written."""

    def write(before: dict[Any, Any]) -> None:
        for key in held.keys() - before.keys():
            del held[key]
        for key, value in before.items():
            if key not in held or held[key] is not value:
                held[key] = value

    return Setting(name, held.copy, write, grows)


def of_signals() -> list[Setting]:
    """Signals come first: Ctrl-C works again before anything else is restored."""
    if threading.current_thread() is not threading.main_thread():
        return []  # they can be set only there
    return [
        Setting(
            f"signal {number}", partial(signal.getsignal, number), partial(signal.signal, number)
        )
        for number in signal.valid_signals()
    ]


@cache
def of_python() -> list[Setting]:
    """Return all settings of Python."""
    root = logging.root
    return [
        Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, grows=True),
        *accessors(sys, "trace", "profile"),
        *attributes(sys, "displayhook", "excepthook", "stdin", "stdout", "stderr"),
        *(sequence(sys, name) for name in ("path", "argv")),
        Setting("gc.enable", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        Setting("gc.set_threshold", gc.get_threshold, lambda now: gc.set_threshold(*now)),
        *attributes(warnings, "showwarning"),
        Setting("warnings.filters", lambda: warnings.filters[:], _set_filters, grows=True),
        *attributes(root.manager, "disable"),
        Setting("the root logger's level", lambda: root.level, root.setLevel),
        sequence(root, "handlers"),
        mapping("os.environ", os.environ),
        Setting("working folder", os.getcwd, os.chdir),
    ]


def of_libraries() -> list[Setting]:
    """Return the settings of numpy, matplotlib and JAX, if imported."""
    plots: Any = sys.modules.get("matplotlib._pylab_helpers")
    if plots is None:
        return [*of_numpy(), *_of_jax()]
    return [
        *of_numpy(),
        *_of_jax(),
        Setting("figures", lambda: set(plots.Gcf.figs), partial(_close_figures, plots.Gcf)),
        mapping("matplotlib.rcParams", sys.modules["matplotlib"].rcParams),
    ]


def of_numpy() -> list[Setting]:
    """Return numpy's settings for errors and printing, in this thread."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return []
    return [
        Setting("numpy.seterr", numpy.geterr, lambda how: numpy.seterr(**how)),
        Setting(
            "numpy's print options",
            numpy.get_printoptions,
            lambda how: numpy.set_printoptions(**how),
        ),
    ]


def _of_jax() -> list[Setting]:
    config: Any = getattr(sys.modules.get("jax"), "config", None)
    if config is None:
        return []
    return [Setting("jax.config", lambda: dict(config.values), partial(_set_config, config))]


def _set_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # so that they are read again


def _set_config(config: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if config.values[name] != value:
            config.update(name, value)


def _close_figures(helpers: Any, before: set[int]) -> None:
    for number in set(helpers.figs) - before:
        helpers.destroy(number)


@cache
def of_a_thread() -> list[Setting]:
    """Return torch's settings of a thread."""
    torch = torch_here()
    autocast: dict[str, tuple[Any, Any]] = {
        "enabled": (torch.is_autocast_enabled, torch.set_autocast_enabled),
        "dtype": (torch.get_autocast_dtype, torch.set_autocast_dtype),
    }
    return [
        *pairs(
            torch,
            ("is_grad_enabled", "set_grad_enabled"),
            ("is_autocast_cache_enabled", "set_autocast_cache_enabled"),
        ),
        *(
            Setting(f"autocast {name}, {kind}", partial(read, kind), partial(write, kind))
            for kind in ("cpu", "cuda", "mps")
            for name, (read, write) in autocast.items()
        ),
    ]


@cache
def of_the_process() -> list[Setting]:
    """Return torch's settings of the process, without the GPU's."""
    torch = torch_here()
    return [
        Setting("the default device, and modes of functions", _modes, _set_modes),
        *accessors(torch, "_default_dtype", "_num_threads", "_deterministic_debug_mode"),
        *accessors(torch, "_float32_matmul_precision"),
        Setting(
            "torch.autograd.set_detect_anomaly",
            lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
            lambda now: torch.set_anomaly_enabled(*now),
        ),
        mapping("torch.set_printoptions", vars(torch._tensor_str.PRINT_OPTS)),
        *_of_backends(),
    ]


def of_cuda() -> list[Setting]:
    """Return torch's settings of the current GPU, if CUDA is initialized."""
    torch = torch_here()
    if not torch.cuda.is_initialized():
        return []
    return pairs(torch.cuda, ("current_device", "set_device"), ("current_stream", "set_stream"))


def _of_backends() -> list[Setting]:
    backends = torch_here().backends
    cudnn = "enabled benchmark deterministic allow_tf32 fp32_precision"
    matmul = (
        "allow_tf32 allow_fp16_accumulation fp32_precision "
        "allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction"
    )
    kinds = ("flash", "mem_efficient", "math", "cudnn")
    return [
        *attributes(backends.cudnn, *cudnn.split()),
        *attributes(backends.cuda.matmul, *matmul.split()),
        *pairs(backends.cuda, *((f"{k}_sdp_enabled", f"enable_{k}_sdp") for k in kinds)),
    ]


def _modes() -> tuple[list[Any], Any, Any]:
    # The default device is a mode too, saved separately because torch would end it.
    torch = torch_here()
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    stack = torch.overrides._get_current_function_mode_stack()
    return stack, default, torch.utils._device.CURRENT_DEVICE


def _set_modes(before: tuple[list[Any], Any, Any]) -> None:
    torch = torch_here()
    stack, torch._GLOBAL_DEVICE_CONTEXT.device_context, current = before
    while torch.overrides._get_current_function_mode_stack():
        torch.overrides._pop_mode()
    for mode in stack:
        torch.overrides._push_mode(mode)
    torch.utils._device.CURRENT_DEVICE = current
