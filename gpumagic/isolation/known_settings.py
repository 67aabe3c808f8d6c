"""List the settings of Python, torch, numpy, matplotlib and JAX that notebooks often change."""

import logging
import os
import signal
import sys
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


def _pairs(owner: Any, names: str) -> list[Setting]:
    """Settings by functions to read and write, ``"read/write"``, if this version has them."""
    found = []
    for read, write in (pair.split("/") for pair in names.split()):
        if hasattr(owner, read) and hasattr(owner, write):
            found.append(Setting(write, getattr(owner, read), getattr(owner, write)))
    return found


def _attributes(owner: Any, names: str) -> list[Setting]:
    """Settings that are attributes of a module."""
    return [
        Setting(name, partial(getattr, owner, name), partial(setattr, owner, name))
        for name in names.split()
    ]


def _list(owner: Any, name: str) -> Setting:
    """A setting that is a list, restored in place."""

    def write(before: list[Any]) -> None:
        getattr(owner, name)[:] = before

    return Setting(name, lambda: list(getattr(owner, name)), write)


def of_ctrl_c() -> Setting:
    """Return what Ctrl-C does: it works again before anything else is restored."""
    return Setting(
        "the handler of Ctrl-C",
        partial(signal.getsignal, signal.SIGINT),
        partial(signal.signal, signal.SIGINT),
    )


@cache
def of_python() -> list[Setting]:
    """Return the settings of Python."""
    return [
        *_attributes(sys, "stdout stderr"),
        _list(sys, "path"),
        Setting("warnings.filters", lambda: warnings.filters[:], _set_filters),
        Setting("the root logger's level", lambda: logging.root.level, logging.root.setLevel),
        _list(logging.root, "handlers"),
        Setting("os.environ", os.environ.copy, _set_environment),
        Setting("working folder", os.getcwd, os.chdir),
    ]


def _set_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    with warnings.catch_warnings():
        pass  # so that they are read again


def _set_environment(before: dict[str, str]) -> None:
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def of_libraries() -> list[Setting]:
    """Return the settings of numpy and JAX, and matplotlib's open figures, if imported."""
    found = of_numpy()
    if plots := sys.modules.get("matplotlib._pylab_helpers"):
        figures: Any = plots.Gcf
        found.append(Setting("figures", lambda: set(figures.figs), partial(_close, figures)))
    if config := getattr(sys.modules.get("jax"), "config", None):
        found.append(Setting("jax.config", lambda: dict(config.values), partial(_set, config)))
    return found


def _close(figures: Any, before: set[int]) -> None:
    for number in set(figures.figs) - before:
        figures.destroy(number)


def _set(config: Any, before: dict[str, Any]) -> None:
    for name, value in before.items():
        if config.values[name] != value:
            config.update(name, value)


def of_numpy() -> list[Setting]:
    """Return numpy's settings for errors, in this thread."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return []
    return [Setting("numpy.seterr", numpy.geterr, lambda how: numpy.seterr(**how))]


@cache
def of_a_thread() -> list[Setting]:
    """Return torch's settings of a thread."""
    torch = torch_here()
    autocast = {
        "enabled": (torch.is_autocast_enabled, torch.set_autocast_enabled),
        "dtype": (torch.get_autocast_dtype, torch.set_autocast_dtype),
    }
    return [
        *_pairs(torch, "is_grad_enabled/set_grad_enabled"),
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
    matmul = torch.backends.cuda.matmul
    return [
        Setting("the default device, and modes of functions", _modes, _set_modes),
        *_pairs(
            torch,
            "get_default_dtype/set_default_dtype get_num_threads/set_num_threads "
            "get_deterministic_debug_mode/set_deterministic_debug_mode "
            "get_float32_matmul_precision/set_float32_matmul_precision "
            "is_anomaly_enabled/set_anomaly_enabled",
        ),
        *_attributes(torch.backends.cudnn, "enabled benchmark deterministic allow_tf32"),
        *_attributes(matmul, "allow_tf32 allow_bf16_reduced_precision_reduction"),
    ]


def of_cuda() -> list[Setting]:
    """Return torch's settings of the current GPU, if CUDA is initialized."""
    torch = torch_here()
    if not torch.cuda.is_initialized():
        return []
    return _pairs(torch.cuda, "current_device/set_device current_stream/set_stream")


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
