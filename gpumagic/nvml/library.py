"""Load ``pynvml``, call its functions, convert its errors, and poll its events."""

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# A name that only the maintained nvidia-ml-py has.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")

_ERRORS = (ImportError, OSError, AttributeError, TypeError, ValueError)

# Codes of errors, fixed by NVML's binary interface.
_NOT_SUPPORTED, NOT_FOUND, _TIMEOUT = 3, 6, 10
FUNCTION_NOT_FOUND, GPU_IS_LOST = 13, 15
UNSUPPORTED = (_NOT_SUPPORTED, FUNCTION_NOT_FOUND)
_XID_CRITICAL_ERROR = 0x8
# More errors than this at once are repetitions.
_MOST_XIDS = 64
# Sets for the same GPUs, if polling fails.
_MOST_SETS = 3

Call = tuple[Any, ...]
"""A function's name and its arguments after the handle."""


@dataclass(frozen=True)
class Gpu:
    """The constants of a GPU or a MIG device while its handle is valid."""

    index: int  # NVML's index; a MIG device has its parent's
    uuid: str
    name: str | None
    memory_total: int | None  # bytes; None if unknown, or if it shares the host's
    parent: str | None  # the parent's UUID, of a MIG device
    handle: Any


class Library:
    """NVML's functions, from pynvml or a replacement."""

    def __init__(self, module: Any = None) -> None:
        self.module = module

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors of a call: NVML's own; and with an older or newer pynvml, a missing name, a
        wrong argument, or an unreadable answer."""
        own = getattr(self.module, "NVMLError", None)
        return _ERRORS if own is None else (*_ERRORS, own)

    def load(self) -> None:
        """Import pynvml; raise ImportError also for another module of that name."""
        if self.module is None:
            self.module = import_module("pynvml")
        if not all(hasattr(self.module, name) for name in _NEEDED):
            raise ImportError(name="pynvml")

    def make(self, function: str, *arguments: Any) -> Any:
        """Call a function; raises one of ``errors``."""
        return getattr(self.module, function)(*arguments)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; return None if it fails."""
        try:
            return self.make(function, *arguments)
        except self.errors:
            return None


def code_of(error: Exception) -> int | None:
    """Return NVML's code of an error; a name that pynvml lacks is a missing function."""
    missing = isinstance(error, AttributeError)
    return FUNCTION_NOT_FOUND if missing else getattr(error, "value", None)


class Xids:
    """The Xid errors of GPUs, from an event set. Not thread-safe."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._set: Any = None
        self._uuids: list[str] = []
        self._made = 0

    def poll(self, gpus: Sequence[Gpu]) -> list[tuple[Gpu, int]]:
        """Return GPU and number of each error since the last call, oldest first; never waits."""
        call, uuids = self._library.call, [gpu.uuid for gpu in gpus]
        if uuids != self._uuids:
            self.close()
            self._uuids, self._made = uuids, 0
        if self._set is None and gpus and self._made < _MOST_SETS:
            self._made += 1
            self._set = call("nvmlEventSetCreate")
            for gpu in gpus if self._set is not None else ():
                # Refused by a GPU without such events, or a lost one.
                call("nvmlDeviceRegisterEvents", gpu.handle, _XID_CRITICAL_ERROR, self._set)
        found: list[tuple[Gpu, int]] = []
        while self._set is not None and len(found) < _MOST_XIDS:
            try:
                event = self._library.make("nvmlEventSetWait_v2", self._set, 0)
            except self._library.errors as error:
                if code_of(error) != _TIMEOUT:
                    # A GPU is lost: the next set has the others.
                    self.close()
                break
            # By its handle, since a lost GPU has no UUID.
            at = addressof(event.device.contents)
            found += [
                (gpu, int(event.eventData)) for gpu in gpus if addressof(gpu.handle.contents) == at
            ]
        return found

    def close(self) -> None:
        """Free the event set; call this before NVML is shut down."""
        if self._set is not None:
            self._library.call("nvmlEventSetFree", self._set)
        self._set = None
