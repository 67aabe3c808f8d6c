"""Load ``pynvml`` when it is first needed, know its errors, and read what it answers."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# What gpumagic needs and only the maintained nvidia-ml-py has.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")

_ERRORS = (ImportError, OSError, AttributeError, TypeError, ValueError)

# By NVML's valueType: the member of its union, and whether a counter of that type wraps soon.
_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_NARROW = (1, 5, 6)
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 0, 2, 3, 13
# An older driver does not know a newer number.
_UNSUPPORTED = (_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND)

Call = tuple[Any, ...]
"""A function's name and its arguments after the handle."""
FieldId = int | tuple[int, int]
"""A number of ``NVML_FI_DEV_…``, or that and its scope, such as a link."""

ALL_LINKS = 0xFFFFFFFF
"""The scope that sums a counter over all NVLinks."""


@dataclass(frozen=True)
class Gpu:
    """What does not change about a GPU or a MIG device while its handle lives."""

    index: int  # NVML's; a MIG device has its parent's
    uuid: str
    name: str | None
    memory_total: int | None  # bytes; None where it shares the host's
    parent: str | None  # the parent's UUID, of a MIG device
    handle: Any


@dataclass(frozen=True)
class Field:
    """The value of a counter."""

    value: float
    at_us: int | None  # microseconds of the driver's clock, None where it does not say
    narrow: bool  # it has 32 bits or fewer and may have wrapped unseen


class Library:
    """NVML's functions, by pynvml or what stands for it."""

    def __init__(self, module: Any = None) -> None:
        self.module = module

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What a call may raise: NVML's own error; and, of a pynvml that is older or newer than the
        call, a missing name, a wrong argument, or an answer that cannot be read."""
        own = getattr(self.module, "NVMLError", None)
        return _ERRORS if own is None else (*_ERRORS, own)

    def load(self) -> None:
        """Raises ImportError, also for a module of that name which is not nvidia-ml-py's."""
        if self.module is None:
            self.module = import_module("pynvml")
        if not all(hasattr(self.module, name) for name in _NEEDED):
            raise ImportError(name="pynvml")

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

    def is_nothing_found(self, error: Exception) -> bool:
        """Whether the question was understood, and there is nothing to tell."""
        return bool(getattr(error, "value", None) == self.module.NVML_ERROR_NOT_FOUND)

    def is_lost(self, error: Exception) -> bool:
        """Whether the GPU has fallen off the bus."""
        code: object = getattr(error, "value", None)
        return bool(code == self.module.NVML_ERROR_GPU_IS_LOST)


def parse_fields(
    ids: Iterable[FieldId], answers: Iterable[Any]
) -> tuple[dict[FieldId, Field], set[FieldId]]:
    """What was answered, and what this GPU or driver does not have."""
    found: dict[FieldId, Field] = {}
    missing: set[FieldId] = set()
    for name, answer in zip(ids, answers, strict=True):
        code, kind = int(answer.nvmlReturn), int(answer.valueType)
        if code == _SUCCESS and kind in _TYPES:
            value = getattr(answer.value, _TYPES[kind])
            stamp = int(answer.timestamp)
            found[name] = Field(value, stamp if stamp > 0 else None, kind in _NARROW)
        elif code in _UNSUPPORTED:
            missing.add(name)
    return found, missing
