"""Put back what code has set for the whole process or its thread, from one list.

The list is torch_settings.py and python_settings.py, and the random states. What cannot be read is
not put back; what cannot be put back does not keep the rest from it, and is kept as a fault.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any

import torch

from gpumagic import faults
from gpumagic.isolation.interrupts import deferred
from gpumagic.isolation.python_settings import of_libraries, of_numpy, of_python, of_signals
from gpumagic.isolation.random_state import Randomness
from gpumagic.isolation.setting import Setting
from gpumagic.isolation.torch_settings import module_hooks, of_a_thread, of_cuda, of_the_process

# A setting, and its value.
_Known = tuple[Setting, Any]
# These are imported bit by bit, and set nothing then.
_NEVER = {"torch", "gpumagic", *sys.stdlib_module_names}


class Settings:
    """All settings as they are now."""

    def __init__(self) -> None:
        self._signals = _now(of_signals())
        self._others = _now(
            chain(of_a_thread(), of_the_process(), of_cuda(), of_python(), of_libraries())
        )
        self._randomness = Randomness()
        self._modules = set(sys.modules)

    def put_back(self) -> None:
        """Write all that has changed since."""
        for setting, value in self._signals:
            _write(setting, value)
        with deferred():
            self._others = _adopted(self._others, self._modules)
            for setting, value in self._others:
                _write(setting, value)
            self._randomness.restore()


class Growth:
    """What a program that runs ten thousand times may add to as often, as it is now."""

    def __init__(self) -> None:
        every = (*of_the_process(), *of_python())
        self._settings = _now(setting for setting in every if setting.grows)
        self._modules = set(sys.modules)
        self._sizes = _sizes()

    def put_back(self) -> None:
        """Between two blocks of runs: soon over where nothing has grown."""
        if _sizes() == self._sizes:
            return
        self._settings = _adopted(self._settings, self._modules)
        self._modules = set(sys.modules)
        for setting, value in self._settings:
            _write(setting, value)
        self._sizes = _sizes()


def _sizes() -> list[int]:
    loggers: list[Any] = [logging.root, *logging.root.manager.loggerDict.values()]
    lists: tuple[Any, ...] = (
        sys.path,
        sys.argv,
        sys.meta_path,
        sys.path_hooks,
        gc.callbacks,
        warnings.filters,
    )
    return [
        sum(len(getattr(logger, "handlers", ())) for logger in loggers),
        sum(len(getattr(logger, "filters", ())) for logger in loggers),
        sum(len(hooks) for hooks in module_hooks().values()),
        sys.getrecursionlimit(),
        *(len(items) for items in lists),
    ]


def _adopted(settings: list[_Known], modules: set[str]) -> list[_Known]:
    """Taken over is what a library has set for itself when it was imported."""
    if len(sys.modules) == len(modules):
        return settings
    libraries = {name.partition(".")[0] for name in sys.modules.keys() - modules} - _NEVER
    return [
        (setting, setting.adopt(value, setting.read(), libraries))
        if libraries and setting.adopt is not None
        else (setting, value)
        for setting, value in settings
    ]


@contextmanager
def kept() -> Iterator[None]:
    """Put back what is set within, whatever happens there."""
    settings = Settings()
    try:
        yield
    finally:
        settings.put_back()


def thread_modes() -> Callable[[ExitStack], None]:
    """What gives another thread, until a stack is closed, the modes of this one.

    Of torch and of numpy: each thread decides for itself whether gradients are recorded.
    """
    inference = torch.is_inference_mode_enabled()
    here = _now(chain(of_a_thread(), of_numpy()))

    def follow(stack: ExitStack) -> None:
        if inference:
            stack.enter_context(torch.inference_mode())
        for setting, value in here:
            _write(setting, value)

    return follow


def _now(settings: Iterable[Setting]) -> list[_Known]:
    found = []
    for setting in settings:
        # torch does not tell what was set in its new way and in its old; a folder may be gone; an
        # older version does not have all.
        with suppress(Exception):
            found.append((setting, setting.read()))
    return found


def _write(setting: Setting, value: Any) -> None:
    try:
        if _is_changed(setting, value):
            setting.write(value)
    except Exception as error:  # noqa: BLE001  it must not keep the rest from being put back
        faults.keep(f"putting back {setting.name}", error)


def _is_changed(setting: Setting, value: Any) -> bool:
    try:
        return bool(setting.read() != value)
    except Exception:  # noqa: BLE001  a value may be the user's, and compare as it likes
        return True
