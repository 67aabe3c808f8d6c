"""Query NVIDIA's driver through NVML, and explain the driver's faults; no query raises.

``pynvml`` is imported and NVML initialized once, at the first query. The answer is None if a query
is not supported (some need driver 535), not permitted or fails. An unreachable driver or a lost GPU
is a :class:`Problem` with its cause and cure, and is queried again after a pause. Any query may
block for seconds, so make none on an event loop.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import addressof
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import Any

from gpumagic import faults
from gpumagic.errors import Problem

# Names that only the maintained nvidia-ml-py has.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")
_ERRORS = (ImportError, OSError, AttributeError, TypeError, ValueError)
# Codes of errors and events, fixed by NVML's binary interface.
_NOT_SUPPORTED, _NOT_FOUND, _TIMEOUT, _FUNCTION_NOT_FOUND, _GPU_IS_LOST = 3, 6, 10, 13, 15
_UNSUPPORTED = (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND)
_XID_ERROR = 0x8
# Maximum number of errors that one call reads; more would be repetitions.
_MOST_XIDS = 64

# Cause and cure of each fault; `{who}` is a GPU, `{error}` NVML's text.
_FAULTS = {
    "library-missing": (
        "NVIDIA's driver is not installed",
        "install the driver, or in a container start it with --gpus all",
    ),
    "driver-not-loaded": (
        "NVIDIA's driver is installed but not loaded",
        "sudo modprobe nvidia; if that fails, see dmesg, or reinstall the driver for this kernel",
    ),
    "version-mismatch": (
        "the driver was updated: its kernel module and libraries are of different versions",
        "restart the machine; or unload and load the nvidia modules, then restart this program",
    ),
    "no-permission": (
        "this user may not open the GPU's device files",
        "give this user access to /dev/nvidia* (often the group video or render)",
    ),
    "unknown-error": (
        "NVIDIA's driver answers 'Unknown Error', as it does when a container has lost its devices",
        "restart the container; on a host, see dmesg for Xid errors",
    ),
    "nvml-error": ("NVML cannot be used: {error}", "see dmesg"),
    "pynvml-clash": (
        "the module pynvml is missing, or not nvidia-ml-py's ({error})",
        "pip uninstall -y pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py",
    ),
    "gpu-lost": (
        "{who} has fallen off the bus; programs on it have failed",
        "see dmesg for its Xid error; restart the machine, or reset the GPU",
    ),
    "gpu-unreachable": ("{who} cannot be opened: {error}", "see dmesg"),
    "gpu-silent": (
        "{who} does not answer: {error}",
        "see dmesg for Xid errors; gpumagic asks again from time to time",
    ),
}
_BY_RETURN_CODE = {
    4: "no-permission",
    9: "driver-not-loaded",
    12: "library-missing",
    15: "gpu-lost",
    18: "version-mismatch",
    999: "unknown-error",
}


def _fault(
    code: str, error: object = "", name: str | None = None, index: int = 0, uuid: str | None = None
) -> Problem:
    cause, cure = _FAULTS[code]
    who = f"{name or 'a GPU'} (NVML {index})"
    return Problem(code, cause.format(who=who, error=error), cure, uuid)


Call = tuple[Any, ...]  # a function's name and its arguments after the handle


@dataclass(frozen=True)
class Gpu:
    """A GPU or MIG device: properties that do not change while its handle is valid."""

    index: int  # NVML's index; for a MIG device, the index of its parent
    uuid: str
    name: str | None
    memory_total: int | None  # bytes; None if unknown, or if the GPU shares the host's memory
    parent: str | None  # of a MIG device, the UUID of its parent
    handle: Any


class Library:
    """NVML's functions, from pynvml or a replacement."""

    def __init__(self, module: Any = None) -> None:
        self.module = module
        # Exceptions that a call may raise: NVML's, and those of an old or unrelated pynvml.
        self.errors: tuple[type[Exception], ...] = _ERRORS

    def load(self) -> None:
        """Import pynvml; raise ImportError if it is missing, or if it is not nvidia-ml-py's."""
        if self.module is None:
            self.module = import_module("pynvml")
        if not all(hasattr(self.module, name) for name in _NEEDED):
            raise ImportError(name="pynvml")
        self.errors = (*_ERRORS, self.module.NVMLError)

    def make(self, function: str, *arguments: Any) -> Any:
        """Call a function; raise one of ``errors`` if it fails."""
        return getattr(self.module, function)(*arguments)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function; return None if it fails."""
        with suppress(*self.errors):
            return self.make(function, *arguments)
        return None


def _code(error: Exception) -> int | None:
    """Return NVML's code of an error; FUNCTION_NOT_FOUND if pynvml lacks the function."""
    missing = isinstance(error, AttributeError)
    return _FUNCTION_NOT_FOUND if missing else getattr(error, "value", None)


class Xids:
    """The Xid errors of GPUs, from an event set. Not thread-safe."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._set: Any = None
        self._uuids: list[str] = []

    def poll(self, gpus: Sequence[Gpu]) -> list[tuple[Gpu, int]]:
        """Return GPU and number of each error since the last call, oldest first; do not wait."""
        if self._uuids != [gpu.uuid for gpu in gpus]:
            self._watch(gpus)
        found: list[tuple[Gpu, int]] = []
        while self._set is not None and len(found) < _MOST_XIDS:
            try:
                event = self._library.make("nvmlEventSetWait_v2", self._set, 0)
            except self._library.errors as error:
                if _code(error) != _TIMEOUT:
                    self.close()  # the next call watches again, without a GPU that is lost
                    if _code(error) != _GPU_IS_LOST:
                        faults.keep("watching for Xid errors", error)
                break
            # Compare handles: a lost GPU does not give its UUID.
            at, number = addressof(event.device.contents), int(event.eventData)
            found += [(gpu, number) for gpu in gpus if addressof(gpu.handle.contents) == at]
        return found

    def _watch(self, gpus: Sequence[Gpu]) -> None:
        self.close()
        event_set, watched = self._library.call("nvmlEventSetCreate"), False
        for gpu in gpus if event_set is not None else ():
            with suppress(*self._library.errors):  # a GPU without such events, or a lost one
                self._library.make("nvmlDeviceRegisterEvents", gpu.handle, _XID_ERROR, event_set)
                watched = True
        self._set = event_set
        if not watched:
            self.close()
        self._uuids = [gpu.uuid for gpu in gpus]

    def close(self) -> None:
        """Free the event set; call this before NVML is shut down."""
        if self._set is not None:
            self._library.call("nvmlEventSetFree", self._set)
        self._set, self._uuids = None, []


# Seconds until GPUs, which rarely change (hot plug, MIG), are listed again; and after a fault.
_KEEP_GPUS_S, _PAUSE_S = 10.0, 5.0


class Nvml:
    """Access to NVML that never raises; ``library`` replaces ``pynvml``, ``clock`` is monotonic."""

    def __init__(self, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = Library(library)
        self._xids = Xids(self._library)
        self._clock = clock
        self._lock = threading.RLock()
        self._started = False
        self.fault: Problem | None = None  # of the last attempt to list the GPUs
        # Lost GPUs by UUID or "index N", and silent GPUs. The dicts are replaced, never mutated.
        self.lost: dict[str, Problem] = {}
        self.silent: dict[str, Problem] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._seen: dict[int, Gpu] = {}
        self._gpus_until = 0.0
        # NVML's error code for each unsupported query, by UUID.
        self._unsupported: dict[str, dict[Call, int | None]] = {}

    @property
    def gone(self) -> tuple[Gpu, ...]:
        """The lost GPUs in their last state; their handles are invalid."""
        return tuple(gpu for gpu in self._seen.values() if gpu.uuid in self.lost)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs in NVML's order, each before its MIG devices; empty after a fault."""
        with self._lock:
            now = self._clock()
            if now >= self._gpus_until:
                self._enumerate(now)
            return self._gpus

    def retry(self) -> None:
        """End the pause after a fault, so that the next query reaches the driver."""
        with self._lock:
            self._gpus_until = 0.0

    def system(self, function: str) -> Any:
        """Query the machine, such as ``"nvmlSystemGetDriverVersion"``; return None if it fails."""
        with self._lock:
            return self._library.call(function)

    def ask(
        self, gpu: Gpu, questions: Mapping[str, Call], *, alive: bool = False
    ) -> dict[str, Any]:
        """Make several queries of a GPU; return the answers by name, None for no answer.

        An unsupported query is not made again if the GPU has answered any query, here or, with
        ``alive``, just before. If the GPU answers no query, the GPU or the driver has a fault.
        """
        answers: dict[str, Any] = dict.fromkeys(questions)
        known = self._unsupported.setdefault(gpu.uuid, {})
        unsupported: dict[Call, int | None] = {}
        failure: Exception | None = None
        for name, call in questions.items():
            if call in known:
                continue
            try:
                answers[name] = self._library.make(call[0], gpu.handle, *call[1:])
            except self._library.errors as error:
                if _code(error) in _UNSUPPORTED:
                    unsupported[call] = _code(error)
                else:
                    failure = error
        if failure is not None and _code(failure) == _GPU_IS_LOST:
            fault = _fault("gpu-lost", "", gpu.name, gpu.index, gpu.uuid)
            self.lost = {**self.lost, gpu.uuid: fault}
        if any(answer is not None for answer in answers.values()):
            alive = True
            self.silent = {uuid: fault for uuid, fault in self.silent.items() if uuid != gpu.uuid}
        if alive:
            known.update(unsupported)
        elif failure is not None:
            fault = _fault("gpu-silent", failure, gpu.name, gpu.index, gpu.uuid)
            self.silent = {**self.silent, gpu.uuid: fault}
            # Get new handles: a driver's reset or the end of a MIG instance invalidates them.
            self._gpus_until = 0.0
        return answers

    def busy(self, gpu: Gpu, seconds: float) -> dict[int, float | None] | None:
        """Return percent of a GPU's time by pid in the last `seconds`; None if unknown (MIG)."""
        since = int((time.time() - seconds) * 1e6)
        try:
            samples = self._library.make("nvmlDeviceGetProcessUtilization", gpu.handle, since)
        except self._library.errors as error:
            return {} if _code(error) == _NOT_FOUND else None
        # Oldest first. Drivers may also return old samples, and values over 100.
        samples = sorted(samples, key=lambda sample: int(sample.timeStamp))
        recent = {int(s.pid): float(s.smUtil) for s in samples if s.timeStamp >= since}
        return {pid: used if used <= 100 else None for pid, used in recent.items()}

    def xids(self) -> list[tuple[Gpu, int]]:
        """Return the GPU and number of each critical Xid error since the last call."""
        with self._lock:
            return self._xids.poll([gpu for gpu in self._gpus if not gpu.parent])

    @property
    def memory_call(self) -> Call:
        """The query for version 2 of NVML's memory structure; version 1 counts reserved as used."""
        return ("nvmlDeviceGetMemoryInfo", getattr(self._library.module, "nvmlMemory_v2", None))

    def memory(self, gpu: Gpu, *, alive: bool = False) -> Any:
        """Return NVML's memory structure, in bytes; None if unknown or shared with the host."""
        memory = self.ask(gpu, {"memory": self.memory_call}, alive=alive)["memory"]
        return memory if memory is not None and memory.total else None

    def shares_memory(self, gpu: Gpu) -> bool:
        """Whether a GPU has no memory of its own; False if this is unknown."""
        return self._unsupported.get(gpu.uuid, {}).get(self.memory_call) == _NOT_SUPPORTED

    def memory_free(self) -> dict[str, int]:
        """Return the known free bytes by UUID."""
        asked = {gpu.uuid: self.memory(gpu) for gpu in self.gpus()}
        return {uuid: int(memory.free) for uuid, memory in asked.items() if memory is not None}

    def _enumerate(self, now: float) -> None:
        """Start NVML if necessary, and get all handles again."""
        try:
            if not self._started:
                self._library.load()
                self._library.make("nvmlInitWithFlags", 0)
                self._started = True
            count = int(self._library.make("nvmlDeviceGetCount"))
        except self._library.errors as error:
            self._stop(error, now)
            return
        self.fault, self.lost = None, {}
        gpus = [gpu for index in range(count) for gpu in self._with_mig(index)]
        if self._gpus and [gpu.uuid for gpu in gpus] != [gpu.uuid for gpu in self._gpus]:
            # A new GPU, or a GPU whose MIG devices changed, may support other questions.
            self._unsupported, self.silent = {}, {}
        self._gpus = tuple(gpus)
        self._gpus_until = now + (_PAUSE_S if self.lost else _KEEP_GPUS_S)

    def _stop(self, error: Exception, now: float) -> None:
        if isinstance(error, ImportError):
            self.fault = _fault("pynvml-clash", getattr(self._library.module, "__file__", error))
        else:
            self.fault = _fault(_BY_RETURN_CODE.get(_code(error) or 0, "nvml-error"), error)
        if self._started:
            self._xids.close()
            # After a shutdown, the next attempt sees the state that the driver then has.
            self._library.call("nvmlShutdown")
        self._started = False
        self._gpus = ()
        self.lost, self.silent, self._unsupported = {}, {}, {}
        self._gpus_until = now + _PAUSE_S

    def _with_mig(self, index: int) -> list[Gpu]:
        library = self._library
        try:
            handle = library.make("nvmlDeviceGetHandleByIndex", index)
            gpu = self._facts(index, handle, None)
        except library.errors as error:
            # The name and UUID that the GPU had at its last answer.
            before = self._seen.get(index)
            name, uuid = (before.name, before.uuid) if before else (None, None)
            code = "gpu-lost" if _code(error) == _GPU_IS_LOST else "gpu-unreachable"
            fault = _fault(code, error, name, index, uuid)
            self.lost = {**self.lost, uuid or f"index {index}": fault}
            return []
        self._seen[index] = gpu
        gpus = [gpu]
        mode = library.call("nvmlDeviceGetMigMode", handle)
        slots = library.call("nvmlDeviceGetMaxMigDeviceCount", handle) if mode and mode[0] else 0
        for slot in range(slots or 0):
            # An empty slot answers NOT_FOUND, and an instance may end at any time.
            with suppress(*library.errors):
                child = library.make("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
                gpus.append(self._facts(index, child, gpu.uuid))
        return gpus

    def _facts(self, index: int, handle: Any, parent: str | None) -> Gpu:
        """Return a GPU's properties; raise NVML's error if the UUID cannot be read."""
        uuid = str(self._library.make("nvmlDeviceGetUUID", handle))
        name = self._library.call("nvmlDeviceGetName", handle)
        gpu = Gpu(index, uuid, name, None, parent, handle)
        memory = self.memory(gpu, alive=True)
        return gpu if memory is None else replace(gpu, memory_total=int(memory.total))


@cache
def shared_nvml() -> Nvml:
    """Return this process's access to NVML; a forked child has its own handles and locks."""
    return Nvml()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared_nvml.cache_clear)
