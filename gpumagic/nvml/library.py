"""Load ``pynvml``, convert its values and errors, and remember what is counted between calls.

GPM has the counters of Hopper and newer: multiprocessor activity between two samples. The previous
sample is kept, so that nothing sleeps. Xid errors come from NVML's event set, without waiting.
Samples and event set are freed before NVML is shut down.
"""

import ctypes
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

# A name that only the maintained nvidia-ml-py has.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")

_ERRORS = (ImportError, OSError, AttributeError, TypeError, ValueError)

# By NVML's valueType: the member of its union, and whether a counter of that type wraps soon.
_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_NARROW = (1, 5, 6)
# Codes of errors, fixed by NVML's binary interface.
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, NOT_FOUND, _TIMEOUT = 0, 2, 3, 6, 10
FUNCTION_NOT_FOUND, GPU_IS_LOST = 13, 15
UNSUPPORTED = (_NOT_SUPPORTED, FUNCTION_NOT_FOUND)

Call = tuple[Any, ...]
"""A function's name and its arguments after the handle."""
FieldId = int | tuple[int, int]
"""A number of ``NVML_FI_DEV_…``, or that and its scope, such as a link."""

ALL_LINKS = 0xFFFFFFFF
"""The scope that sums a counter over all NVLinks."""


@dataclass(frozen=True)
class Gpu:
    """The constants of a GPU or a MIG device while its handle is valid."""

    index: int  # NVML's index; a MIG device has its parent's
    uuid: str
    name: str | None
    memory_total: int | None  # bytes; None if unknown, or if it shares the host's
    parent: str | None  # the parent's UUID, of a MIG device
    handle: Any


@dataclass(frozen=True)
class Field:
    """The value of a counter."""

    value: float
    at_us: int | None  # microseconds of the driver's clock, None if unknown
    narrow: bool  # it has 32 bits or fewer and may have wrapped unseen


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


def parse_fields(
    ids: Iterable[FieldId], answers: Iterable[Any]
) -> tuple[dict[FieldId, Field], set[FieldId]]:
    """Return the answers, and the unsupported fields."""
    found: dict[FieldId, Field] = {}
    missing: set[FieldId] = set()
    for name, answer in zip(ids, answers, strict=True):
        code, kind = int(answer.nvmlReturn), int(answer.valueType)
        if code == _SUCCESS and kind in _TYPES:
            value = getattr(answer.value, _TYPES[kind])
            stamp = int(answer.timestamp)
            found[name] = Field(value, stamp if stamp > 0 else None, kind in _NARROW)
        elif code in (*UNSUPPORTED, _INVALID_ARGUMENT):  # an older driver lacks newer numbers
            missing.add(name)
    return found, missing


# Closer samples are imprecise; more distant ones describe the past.
_LEAST_S, _LONGEST_S = 0.1, 30.0
_XID_CRITICAL_ERROR = 0x8
# More errors than this at once are repetitions.
_MOST = 64
_TRIES = 3


@dataclass
class _Pair:
    """Two of NVML's samples of one GPU: the last one, and the one to overwrite next."""

    before: Any
    spare: Any
    at: float | None = None
    metrics: dict[int, float] | None = None


class Gpm:
    """Metrics of GPUs by their number in ``nvmlGpmMetricId_t``."""

    def __init__(self, library: Library, clock: Callable[[], float]) -> None:
        self._library = library
        self._clock = clock
        self._pairs: dict[str, _Pair | None] = {}
        # A sample must not be freed or overwritten while another thread reads it.
        self._lock = threading.RLock()

    def metrics(self, uuid: str, handle: Any, numbers: Sequence[int]) -> dict[int, float]:
        """Return the metrics since the last call; empty at the first, or if unsupported."""
        with self._lock:
            if uuid not in self._pairs:
                self._pairs[uuid] = self._pair(handle)
            pair = self._pairs[uuid]
            return {} if pair is None else self._advance(pair, handle, numbers)

    def _advance(self, pair: _Pair, handle: Any, numbers: Sequence[int]) -> dict[int, float]:
        now = self._clock()
        if pair.at is not None and now - pair.at < _LEAST_S:
            return pair.metrics or {}
        if self._library.call("nvmlGpmSampleGet", handle, pair.spare) is None:
            pair.at = pair.metrics = None
            return {}
        recent = pair.at is not None and now - pair.at <= _LONGEST_S
        pair.metrics = self._compare(pair.before, pair.spare, numbers) if recent else {}
        pair.before, pair.spare, pair.at = pair.spare, pair.before, now
        return pair.metrics

    def keep(self, uuids: set[str]) -> None:
        """Free the samples of all other GPUs; of all GPUs before NVML is shut down."""
        with self._lock:
            for uuid in [uuid for uuid in self._pairs if uuid not in uuids]:
                pair = self._pairs.pop(uuid)
                for sample in (pair.before, pair.spare) if pair else ():
                    self._library.call("nvmlGpmSampleFree", sample)

    def _pair(self, handle: Any) -> _Pair | None:
        support = self._library.call("nvmlGpmQueryDeviceSupport", handle)
        if support is None or not support.isSupportedDevice:
            return None
        before = self._library.call("nvmlGpmSampleAlloc")
        spare = self._library.call("nvmlGpmSampleAlloc")
        if before is None or spare is None:
            if before is not None:
                self._library.call("nvmlGpmSampleFree", before)
            return None
        return _Pair(before, spare)

    def _compare(self, before: Any, after: Any, numbers: Sequence[int]) -> dict[int, float]:
        module = self._library.module
        try:
            asked = module.c_nvmlGpmMetricsGet_t()
            asked.version = module.NVML_GPM_METRICS_GET_VERSION
            asked.numMetrics = len(numbers)
            asked.sample1, asked.sample2 = before, after
            for n, number in enumerate(numbers):
                asked.metrics[n].metricId = number
            module.nvmlGpmMetricsGet(asked)
        except self._library.errors:
            return {}
        answers = [asked.metrics[n] for n in range(len(numbers))]
        return {
            int(answer.metricId): float(answer.value)
            for answer in answers
            if answer.nvmlReturn == _SUCCESS and math.isfinite(answer.value)
        }


class Xids:
    """The Xid errors of GPUs that support events; the set is recreated when GPUs change."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._set: Any = None
        self._watched: dict[Any, str] = {}
        self._failures = 0
        self._lock = threading.RLock()

    def poll(self, handles: Mapping[str, Any]) -> list[tuple[str, int]]:
        """Return UUID and Xid of each error since the last call, oldest first; of whole GPUs."""
        found: list[tuple[str, int]] = []
        with self._lock:
            if set(self._watched.values()) != handles.keys():
                self.close()
                self._watched = {_address(handle): uuid for uuid, handle in handles.items()}
            if self._set is None and self._failures < _TRIES:
                self._set = self._make(handles)
                self._failures += self._set is None
            while self._set is not None and len(found) < _MOST:
                try:
                    event = self._library.make("nvmlEventSetWait_v2", self._set, 0)
                except self._library.errors as error:
                    if code_of(error) != _TIMEOUT:
                        # A GPU is lost; the next set is created without it.
                        self._failures += 1
                        self._free()
                    break
                # By its handle, since a lost GPU has no UUID.
                uuid = self._watched.get(_address(event.device))
                if uuid is not None and event.eventType == _XID_CRITICAL_ERROR:
                    found.append((uuid, int(event.eventData)))
        return found

    def close(self) -> None:
        """Free the set; call this before NVML is shut down."""
        with self._lock:
            self._free()
            self._watched = {}
            self._failures = 0

    def _free(self) -> None:
        if self._set is not None:
            self._library.call("nvmlEventSetFree", self._set)
        self._set = None

    def _make(self, handles: Mapping[str, Any]) -> Any:
        events = self._library.call("nvmlEventSetCreate") if handles else None
        if events is None:
            return None
        registered = 0
        for handle in handles.values():
            able = self._library.call("nvmlDeviceGetSupportedEventTypes", handle) or 0
            if not able & _XID_CRITICAL_ERROR:
                continue
            try:
                self._library.make("nvmlDeviceRegisterEvents", handle, _XID_CRITICAL_ERROR, events)
                registered += 1
            except self._library.errors:
                continue
        if not registered:
            self._library.call("nvmlEventSetFree", events)
            return None
        return events


def _address(handle: Any) -> Any:
    try:
        return ctypes.cast(handle, ctypes.c_void_p).value
    except (ctypes.ArgumentError, TypeError):
        return handle
