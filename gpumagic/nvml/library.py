"""Load ``pynvml`` when it is first needed, know its errors, and call it without raising."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gpumagic.nvml.driver_faults import DriverFault, no_pynvml, unreachable, wrong_pynvml

# What gpumagic needs and only the maintained nvidia-ml-py has.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")


Call = tuple[Any, ...]
"""A function's name and its arguments after the handle."""


@dataclass(frozen=True)
class Gpu:
    """What does not change about a GPU or a MIG device while its handle lives.

    ``index`` is NVML's (a MIG device has its parent's), ``parent`` the parent's UUID or None,
    ``memory_total`` bytes or None where it shares the host's memory.
    """

    index: int
    uuid: str
    name: str | None
    memory_total: int | None
    parent: str | None
    handle: Any


class WrongModule(Exception):
    """A module called pynvml that is not nvidia-ml-py."""


class Library:
    """NVML's functions, by pynvml or what stands for it; ``errors`` is what a call may raise."""

    def __init__(self, module: Any = None) -> None:
        self.module = module
        self.errors = _errors_of(module)

    def load(self) -> None:
        """Raises ImportError or WrongModule."""
        if self.module is None:
            self.module = import_module("pynvml")
            self.errors = _errors_of(self.module)
        if not all(hasattr(self.module, name) for name in _NEEDED):
            raise WrongModule

    def make(self, function: str, *arguments: Any) -> Any:
        """Call a function; raises one of ``errors``."""
        return getattr(self.module, function)(*arguments)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; None where it fails."""
        try:
            return self.make(function, *arguments)
        except self.errors:
            return None

    def is_unsupported(self, error: Exception) -> bool:
        """Whether the same question will always fail so: by the GPU, the driver, or this pynvml."""
        codes = (self.module.NVML_ERROR_NOT_SUPPORTED, self.module.NVML_ERROR_FUNCTION_NOT_FOUND)
        return getattr(error, "value", None) in codes or isinstance(error, AttributeError)

    def is_lost(self, error: Exception) -> bool:
        """Whether the GPU has fallen off the bus."""
        code: object = getattr(error, "value", None)
        return bool(code == self.module.NVML_ERROR_GPU_IS_LOST)

    def fault(self, error: Exception) -> DriverFault:
        """Why NVML cannot be started, or asked for its GPUs."""
        if isinstance(error, ImportError):
            return no_pynvml()
        if isinstance(error, WrongModule):
            return wrong_pynvml(getattr(self.module, "__file__", None))
        return unreachable(getattr(error, "value", None), str(error))


def _errors_of(module: Any) -> tuple[type[Exception], ...]:
    """What a call may raise: NVML's own error; and, of a pynvml that is older or newer than the
    call, a missing name, a wrong argument, or an answer that cannot be read."""
    known: tuple[type[Exception], ...] = (
        ImportError,
        OSError,
        AttributeError,
        TypeError,
        ValueError,
        WrongModule,
    )
    own = getattr(module, "NVMLError", None)
    return known if own is None else (*known, own)
