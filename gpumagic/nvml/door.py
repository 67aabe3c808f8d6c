"""The one door to NVML: every question to the driver goes through here, and none raises.

Guarantees: ``pynvml`` is imported and NVML initialised at the first question and once; a question
has an answer or None (not supported, not permitted, not known); a driver that cannot be reached
and a GPU that is lost are a :class:`Fault` with cause and cure, retried with growing pauses, so a
later question can succeed. Any call may stall for seconds: never ask on an event loop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from gpumagic.nvml.faults import Fault, gpu_lost, no_pynvml, unreachable, wrong_pynvml

# What gpumagic needs and only the maintained nvidia-ml-py has.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# GPUs come and go rarely (hot plug, MIG instances made and destroyed).
_KEEP_GPUS_S = 30.0

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


class Nvml:
    """NVML, asked carefully.

    Parameters
    ----------
    library : module, optional
        What stands for ``pynvml``, which is imported when first needed if this is None.
    clock : callable
        Seconds, monotonic.
    """

    def __init__(self, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = library
        self._errors = _errors_of(library)
        self._clock = clock
        self._lock = threading.RLock()
        self._started = False
        self._fault: Fault | None = None
        self._lost: dict[str, Fault] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._seen: dict[int, Gpu] = {}
        self._gpus_until = 0.0
        self._pause = _FIRST_PAUSE_S
        self._retry_at: float | None = None
        self._unsupported: set[tuple[str, Call]] = set()

    @property
    def fault(self) -> Fault | None:
        """Why the driver cannot be asked, as of the last question."""
        return self._fault

    @property
    def lost(self) -> dict[str, Fault]:
        """GPUs that have fallen off the bus, by UUID, or by ``"index N"`` where it is not known."""
        return dict(self._lost)

    def gpus(self) -> tuple[Gpu, ...]:
        """All GPUs in NVML's order, each followed by its MIG devices; empty under a fault."""
        with self._lock:
            now = self._clock()
            if self._retry_at is not None and now < self._retry_at:
                return self._gpus
            if now >= self._gpus_until or self._retry_at is not None:
                self._enumerate(now)
            return self._gpus

    def system(self, function: str) -> Any:
        """Ask about the machine, such as ``"nvmlSystemGetDriverVersion"``; None if not known."""
        with self._lock:
            return self._call(function) if self._started else None

    def ask(self, gpu: Gpu, questions: Mapping[str, Call]) -> dict[str, Any]:
        """Ask a GPU several things at once.

        Parameters
        ----------
        gpu : Gpu
        questions : mapping of str to tuple
            By a name of yours: an NVML function's name, then its arguments after the handle.

        Returns
        -------
        dict
            By the same names; None where there is no answer. What a GPU does not support is not
            asked of it again, unless it answered nothing at all, for then it is the GPU or the
            driver that is in trouble, not the questions.
        """
        answers: dict[str, Any] = {}
        unsupported = []
        failed = False
        for name, call in questions.items():
            answers[name] = None
            if (gpu.uuid, call) in self._unsupported:
                continue
            try:
                answers[name] = getattr(self._library, call[0])(gpu.handle, *call[1:])
            except self._errors as error:
                if self._is_unsupported(error):
                    unsupported.append((gpu.uuid, call))
                    continue
                failed = True
                if getattr(error, "value", None) == self._library.NVML_ERROR_GPU_IS_LOST:
                    self._lost[gpu.uuid] = gpu_lost(gpu.name, gpu.index)
        if any(answer is not None for answer in answers.values()):
            self._unsupported.update(unsupported)
        elif failed:
            # A handle outlives neither a reset of the driver nor its MIG instance.
            self._gpus_until = 0.0
        return answers

    def memory(self, gpu: Gpu) -> Any:
        """NVML's memory structure, bytes: ``total``, ``free``, ``used`` and, if the driver is not
        too old, ``reserved``; None where the GPU has no memory of its own."""
        second = getattr(self._library, "nvmlMemory_v2", None)
        newer: Call = ("nvmlDeviceGetMemoryInfo", second)
        older: Call = ("nvmlDeviceGetMemoryInfo",)
        memory = self.ask(gpu, {"newer": newer})["newer"]
        if memory is None:
            # Both in one go, so that an old driver is known by the one that it does answer.
            memory = self.ask(gpu, {"newer": newer, "older": older})["older"]
        return memory if memory is not None and memory.total else None

    def memory_free(self, uuids: Iterable[str]) -> dict[str, int]:
        """Free bytes by UUID, of those that are known."""
        wanted = set(uuids)
        free = {}
        for gpu in self.gpus():
            if gpu.uuid in wanted and (memory := self.memory(gpu)) is not None:
                free[gpu.uuid] = int(memory.free)
        return free

    def _is_unsupported(self, error: Exception) -> bool:
        """Whether the same question will always fail so: by the GPU, the driver, or this pynvml."""
        library = self._library
        codes = (library.NVML_ERROR_NOT_SUPPORTED, library.NVML_ERROR_FUNCTION_NOT_FOUND)
        return getattr(error, "value", None) in codes or isinstance(error, AttributeError)

    def _enumerate(self, now: float) -> None:
        """Start if need be, and make all handles anew."""
        try:
            if not self._started:
                self._start()
            count = int(self._library.nvmlDeviceGetCount())
        except self._errors as error:
            self._stop(error, now)
            return
        self._lost = {}
        gpus: list[Gpu] = []
        for index in range(count):
            gpus += self._with_mig(index)
        self._fault = None
        self._gpus = tuple(gpus)
        self._gpus_until = now + _KEEP_GPUS_S
        if self._lost:
            self._wait(now)
        else:
            self._retry_at, self._pause = None, _FIRST_PAUSE_S

    def _start(self) -> None:
        if self._library is None:
            self._library = import_module("pynvml")
            self._errors = _errors_of(self._library)
        if not all(hasattr(self._library, name) for name in _NEEDED):
            raise _WrongModule
        self._library.nvmlInitWithFlags(0)
        self._started = True

    def _stop(self, error: Exception, now: float) -> None:
        if isinstance(error, ImportError):
            self._fault = no_pynvml()
        elif isinstance(error, _WrongModule):
            self._fault = wrong_pynvml(getattr(self._library, "__file__", None))
        else:
            self._fault = unreachable(getattr(error, "value", None), str(error))
        if self._started:
            # So that the next attempt loads the driver's present state, not the one that failed.
            self._call("nvmlShutdown")
        self._started = False
        self._gpus = ()
        self._wait(now)

    def _wait(self, now: float) -> None:
        self._retry_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _with_mig(self, index: int) -> list[Gpu]:
        library = self._library
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            gpu = self._facts(index, handle, None)
        except self._errors as error:
            # Its name and UUID are those of when it still answered.
            before = self._seen.get(index)
            lost = getattr(error, "value", None) == library.NVML_ERROR_GPU_IS_LOST
            self._lost[before.uuid if before else f"index {index}"] = gpu_lost(
                before.name if before else None, index, None if lost else str(error)
            )
            return []
        self._seen[index] = gpu
        gpus = [gpu]
        mode = self._call("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return gpus
        for slot in range(self._call("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            # An empty slot answers NOT_FOUND.
            child = self._call("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            if child is None:
                continue
            try:
                gpus.append(self._facts(index, child, gpu.uuid))
            except self._errors:
                # It was destroyed since the line before.
                continue
        return gpus

    def _facts(self, index: int, handle: Any, parent: str | None) -> Gpu:
        """Raises what NVML raises: without a UUID there is nothing to call this GPU by."""
        uuid = str(self._library.nvmlDeviceGetUUID(handle))
        name = self._call("nvmlDeviceGetName", handle)
        gpu = Gpu(index, uuid, name, None, parent, handle)
        memory = self.memory(gpu)
        total = None if memory is None else int(memory.total)
        return Gpu(index, uuid, name, total, parent, handle)

    def _call(self, function: str, *arguments: Any) -> Any:
        try:
            return getattr(self._library, function)(*arguments)
        except self._errors:
            return None


def _errors_of(library: Any) -> tuple[type[Exception], ...]:
    """What a call may raise: NVML's own error; and, of a pynvml that is older or newer than the
    call, a missing name, a wrong argument, or an answer that cannot be read."""
    known: tuple[type[Exception], ...] = (
        ImportError,
        OSError,
        AttributeError,
        TypeError,
        ValueError,
        _WrongModule,
    )
    own = getattr(library, "NVMLError", None)
    return known if own is None else (*known, own)


class _WrongModule(Exception):
    """A module called pynvml that is not nvidia-ml-py."""


_door: Nvml | None = None
_door_lock = threading.Lock()


def door() -> Nvml:
    """This process's door to NVML."""
    global _door
    with _door_lock:
        if _door is None:
            _door = Nvml()
        return _door


def _after_fork() -> None:
    # NVML's handles and this lock belong to the parent.
    global _door, _door_lock
    _door, _door_lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
