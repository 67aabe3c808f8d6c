"""Query NVIDIA's driver through NVML, and explain the driver's faults. No query raises.

NVML is loaded at the first query. A query that fails, or that is unsupported or not permitted,
returns None. A query may block for seconds, so avoid it on an event loop.
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

# nvidia-ml-py's module pynvml has all these names. Older packages with a module pynvml do not.
_NEEDED = ("nvmlInitWithFlags", "nvmlMemory_v2", "nvmlDeviceGetMigMode", "NVMLError")
_ERRORS = (ImportError, OSError, AttributeError, TypeError, ValueError)
# Codes of errors and events, fixed by NVML's binary interface.
_NOT_SUPPORTED, _NOT_FOUND, _TIMEOUT, _FUNCTION_NOT_FOUND, _GPU_IS_LOST = 3, 6, 10, 13, 15
_XID_ERROR = 0x8

# Cause and cure of each fault. `{who}` names a GPU; `{error}` is the text of an error.
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
        "NVIDIA's driver reports 'Unknown Error'; often a container has lost its devices",
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


Call = tuple[Any, ...]  # an NVML function's name, and the arguments that follow the handle


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU or MIG device that stay constant while the device's handle is valid."""

    index: int  # NVML's index; for a MIG device, the index of its parent
    uuid: str
    name: str | None
    memory_total: int | None  # bytes; None if unknown, or if the GPU shares the host's memory
    parent: str | None  # UUID of a MIG device's parent; None for a GPU
    handle: Any


def _fault(code: str, error: object, gpu: Gpu | None = None, index: int = 0) -> Problem:
    cause, cure = _FAULTS[code]
    name, uuid = (gpu.name, gpu.uuid) if gpu else (None, None)
    who = f"{name or 'a GPU'} (NVML {index})"
    return Problem(code, cause.format(who=who, error=error), cure, uuid)


class Library:
    """Calls the functions of NVML in pynvml, or in `module` if given."""

    def __init__(self, module: Any = None) -> None:
        self.module = module
        # Exceptions that a call may raise, even in another package's pynvml. `load` adds NVMLError.
        self.errors: tuple[type[Exception], ...] = _ERRORS

    def load(self) -> None:
        """Import pynvml; raise ImportError if pynvml is missing, or is not nvidia-ml-py's."""
        if self.module is None:
            self.module = import_module("pynvml")
        if not all(hasattr(self.module, name) for name in _NEEDED):
            raise ImportError(name="pynvml")
        self.errors = (*_ERRORS, self.module.NVMLError)

    def make(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML; raise one of `errors` if the call fails."""
        return getattr(self.module, function)(*arguments)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function of NVML; return None if the call fails."""
        with suppress(*self.errors):
            return self.make(function, *arguments)
        return None


def _code(error: Exception) -> int | None:
    """Return the NVML code of an error; FUNCTION_NOT_FOUND if pynvml lacks the function."""
    missing = isinstance(error, AttributeError)
    return _FUNCTION_NOT_FOUND if missing else getattr(error, "value", None)


class Xids:
    """Reads Xid errors (the driver's error reports) from an NVML event set. Not thread-safe."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._set: Any = None
        self._uuids: list[str] = []

    def poll(self, gpus: Sequence[Gpu]) -> list[tuple[Gpu, int]]:
        """Return the GPU and number of each new Xid error, oldest first, without waiting."""
        if self._uuids != [gpu.uuid for gpu in gpus]:
            self._watch(gpus)
        found: list[tuple[Gpu, int]] = []
        while self._set is not None and len(found) < 64:  # read at most 64 errors in one call
            try:
                event = self._library.make("nvmlEventSetWait_v2", self._set, 0)
            except self._library.errors as error:
                if _code(error) != _TIMEOUT:
                    self.close()  # the next call makes a new event set, without lost GPUs
                    if _code(error) != _GPU_IS_LOST:
                        faults.keep("watching for Xid errors", error)
                break
            # Compare handles, because the UUID of a lost GPU cannot be read.
            at, number = addressof(event.device.contents), int(event.eventData)
            found += [(gpu, number) for gpu in gpus if addressof(gpu.handle.contents) == at]
        return found

    def _watch(self, gpus: Sequence[Gpu]) -> None:
        self.close()
        self._set, watched = self._library.call("nvmlEventSetCreate"), False
        for gpu in gpus if self._set is not None else ():
            with suppress(*self._library.errors):  # skip a GPU that is lost or has no Xid events
                self._library.make("nvmlDeviceRegisterEvents", gpu.handle, _XID_ERROR, self._set)
                watched = True
        if not watched:
            self.close()
        self._uuids = [gpu.uuid for gpu in gpus]

    def close(self) -> None:
        """Free the event set; call this before NVML is shut down."""
        if self._set is not None:
            self._library.call("nvmlEventSetFree", self._set)
        self._set, self._uuids = None, []


# Seconds until the GPUs are listed again. `_PAUSE_S` applies after a fault.
_KEEP_GPUS_S, _PAUSE_S = 10.0, 5.0


class Nvml:
    """Access to NVML that never raises. `library` replaces ``pynvml``; `clock` is monotonic."""

    def __init__(self, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = Library(library)
        self._xids = Xids(self._library)
        self._clock = clock
        self._lock = threading.RLock()
        self._started = False
        self.fault: Problem | None = None  # why the last attempt to list the GPUs failed
        # The next two dicts are replaced, never mutated, because other threads may read them.
        self.lost: dict[str, Problem] = {}  # lost GPUs, by UUID, or by "index N" if unknown
        self.silent: dict[str, Problem] = {}  # GPUs that answer no query, by UUID
        self._gpus: tuple[Gpu, ...] = ()
        self._seen: dict[int, Gpu] = {}  # by index: each GPU as it was last listed, also lost ones
        self._gpus_until = 0.0  # the time at which to list the GPUs again
        # By GPU's UUID: the unsupported queries, each with NVML's error code.
        self._unsupported: dict[str, dict[Call, int | None]] = {}

    @property
    def gone(self) -> tuple[Gpu, ...]:
        """The lost GPUs with their last known properties; their handles are invalid."""
        return tuple(gpu for gpu in self._seen.values() if gpu.uuid in self.lost)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs, each followed by its MIG devices. Empty after a fault."""
        with self._lock:
            if (now := self._clock()) >= self._gpus_until:
                self._enumerate(now)
            return self._gpus

    def retry(self) -> None:
        """End the pause after a fault, so that the next query reaches the driver."""
        with self._lock:
            self._gpus_until = 0.0

    def system(self, function: str) -> Any:
        """Call a function such as ``"nvmlSystemGetDriverVersion"``. Return None if that fails."""
        with self._lock:
            return self._library.call(function)

    def ask(self, gpu: Gpu, calls: Mapping[str, Call], *, alive: bool = False) -> dict[str, Any]:
        """Make several queries of a GPU; return the answers by name, None where a query failed."""
        # `alive`: the GPU has just answered another query, so record its unsupported queries.
        answers: dict[str, Any] = dict.fromkeys(calls)
        known = self._unsupported.setdefault(gpu.uuid, {})
        unsupported: dict[Call, int | None] = {}
        failure: Exception | None = None
        for name, call in calls.items():
            if call in known:
                continue
            try:
                answers[name] = self._library.make(call[0], gpu.handle, *call[1:])
            except self._library.errors as error:
                if _code(error) in (_NOT_SUPPORTED, _FUNCTION_NOT_FOUND):
                    unsupported[call] = _code(error)
                else:
                    failure = error
        if failure is not None and _code(failure) == _GPU_IS_LOST:
            fault = _fault("gpu-lost", failure, gpu, gpu.index)
            self.lost = {**self.lost, gpu.uuid: fault}
        if any(answer is not None for answer in answers.values()):
            alive = True
            self.silent = {uuid: fault for uuid, fault in self.silent.items() if uuid != gpu.uuid}
        if alive:
            known.update(unsupported)
        elif failure is not None:
            fault = _fault("gpu-silent", failure, gpu, gpu.index)
            self.silent = {**self.silent, gpu.uuid: fault}
            # List the GPUs again, because a reset or the end of a MIG instance invalidates handles.
            self._gpus_until = 0.0
        return answers

    def busy(self, gpu: Gpu, seconds: float) -> dict[int, float | None] | None:
        """Return GPU use in percent by pid, over the last `seconds`; None if unknown, as on MIG."""
        since = int((time.time() - seconds) * 1e6)
        try:
            samples = self._library.make("nvmlDeviceGetProcessUtilization", gpu.handle, since)
        except self._library.errors as error:
            return {} if _code(error) == _NOT_FOUND else None
        # Use each pid's newest sample. Drivers may also return older samples, or values over 100 %.
        samples = sorted(samples, key=lambda sample: int(sample.timeStamp))
        recent = {int(s.pid): float(s.smUtil) for s in samples if s.timeStamp >= since}
        return {pid: used if used <= 100 else None for pid, used in recent.items()}

    def xids(self) -> list[tuple[Gpu, int]]:
        """Return the GPU and number of each critical Xid error since the last call of `xids`."""
        with self._lock:
            return self._xids.poll([gpu for gpu in self._gpus if not gpu.parent])

    @property
    def memory_call(self) -> Call:
        """The memory query in version 2, because version 1 counts reserved memory as used."""
        return ("nvmlDeviceGetMemoryInfo", getattr(self._library.module, "nvmlMemory_v2", None))

    def memory(self, gpu: Gpu, *, alive: bool = False) -> Any:
        """Return NVML's memory structure, in bytes; None if unknown or shared with the host."""
        memory = self.ask(gpu, {"memory": self.memory_call}, alive=alive)["memory"]
        return memory if memory is not None and memory.total else None

    def shares_memory(self, gpu: Gpu) -> bool:
        """Whether a GPU has no memory of its own; False if this is unknown."""
        return self._unsupported.get(gpu.uuid, {}).get(self.memory_call) == _NOT_SUPPORTED

    def memory_free(self) -> dict[str, int]:
        """Return the free bytes of each GPU by UUID, without GPUs whose memory is unknown."""
        asked = {gpu.uuid: self.memory(gpu) for gpu in self.gpus()}
        return {uuid: int(memory.free) for uuid, memory in asked.items() if memory is not None}

    def _enumerate(self, now: float) -> None:
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
            # After a change of GPUs or MIG devices, an unsupported query may work, so try again.
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
            # Without a shutdown, the next attempt would not notice that the driver was updated.
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
            before = self._seen.get(index)  # the GPU as it was last listed
            code = "gpu-lost" if _code(error) == _GPU_IS_LOST else "gpu-unreachable"
            key = before.uuid if before else f"index {index}"
            self.lost = {**self.lost, key: _fault(code, error, before, index)}
            return []
        self._seen[index] = gpu
        gpus = [gpu]
        mode = library.call("nvmlDeviceGetMigMode", handle)
        slots = library.call("nvmlDeviceGetMaxMigDeviceCount", handle) if mode and mode[0] else 0
        for slot in range(slots or 0):
            # Skip a slot that is empty (NOT_FOUND), or whose MIG instance has just ended.
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
    """Return the `Nvml` of this process; a forked child makes a new `Nvml`."""
    return Nvml()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shared_nvml.cache_clear)
