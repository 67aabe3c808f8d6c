"""Ask the driver through NVML, and explain its faults; no call raises.

Guarantees: ``pynvml`` is imported and NVML initialized once, at the first question; an answer is
None if it is not supported, not permitted or not known; an unreachable driver or a lost GPU is a
:class:`DriverFault` with cause and cure, and is asked again after growing pauses. Any call may
stall for seconds: never ask on an event loop.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic.nvml.library import (
    GPU_IS_LOST,
    NOT_FOUND,
    UNSUPPORTED,
    Call,
    Gpu,
    Library,
    Xids,
    code_of,
)

__all__ = ["Call", "DriverFault", "Gpu", "Nvml", "door"]


@dataclass(frozen=True)
class DriverFault:
    """A fault: a stable code for programs, with cause and cure as sentences."""

    code: str
    cause: str
    cure: str


# By NVML's return code.
_UNREACHABLE = {
    12: DriverFault(
        "library-missing",
        "NVIDIA's driver is not installed",
        "install the driver, or in a container start it with --gpus all",
    ),
    9: DriverFault(
        "driver-not-loaded",
        "NVIDIA's driver is installed but not loaded",
        "sudo modprobe nvidia; if that fails, see dmesg, or reinstall the driver for this kernel",
    ),
    18: DriverFault(
        "version-mismatch",
        "the driver in the kernel and its libraries are of different versions "
        "(the driver was updated while it ran)",
        "restart the machine; or unload and load the nvidia modules, and then restart this program",
    ),
    4: DriverFault(
        "no-permission",
        "this user may not open the GPU's device files",
        "give this user access to /dev/nvidia* (often the group video or render)",
    ),
    999: DriverFault(
        "unknown-error",
        "NVIDIA's driver answers 'Unknown Error', as it does when a container has lost its devices",
        "restart the container; on a host, see dmesg for Xid errors",
    ),
    15: DriverFault(
        "gpu-lost",
        "a GPU has fallen off the bus",
        "see dmesg for its Xid error; the machine must be restarted",
    ),
}


def unreachable(error: Exception, pynvml: Any) -> DriverFault:
    """Return the fault of an NVML that cannot be started or asked for its GPUs."""
    if isinstance(error, ImportError) and pynvml is None:
        return DriverFault(
            "pynvml-missing",
            "the Python package nvidia-ml-py is not installed",
            "pip install nvidia-ml-py",
        )
    if isinstance(error, ImportError):
        path = getattr(pynvml, "__file__", None) or "unknown path"
        return DriverFault(
            "pynvml-clash",
            f"the module pynvml is not nvidia-ml-py's ({path})",
            "pip uninstall -y pynvml nvidia-ml-py3; pip install --force-reinstall nvidia-ml-py",
        )
    return _UNREACHABLE.get(code_of(error) or 0) or DriverFault(
        "nvml-error", f"NVML cannot be used: {error}", "see dmesg"
    )


def gpu_lost(name: str | None, index: int, error: str | None = None) -> DriverFault:
    """Return the fault of a GPU that no longer answers; ``error`` is NVML's text, if any."""
    who = f"{name or 'a GPU'} (NVML {index})"
    if error:
        return DriverFault("gpu-unreachable", f"{who} cannot be opened: {error}", "see dmesg")
    return DriverFault(
        "gpu-lost",
        f"{who} has fallen off the bus; what ran on it has failed",
        "see dmesg for its Xid error; restart the machine, or reset the GPU",
    )


def gpu_silent(name: str | None, index: int, error: str) -> DriverFault:
    """Return the fault of a GPU that is there but does not answer."""
    return DriverFault(
        "gpu-silent",
        f"{name or 'a GPU'} (NVML {index}) answers no question: {error}",
        "see dmesg for Xid errors; it is asked again by itself",
    )


_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 15.0
# GPUs rarely change (hot plug, MIG instances).
_KEEP_GPUS_S = 10.0


class Nvml:
    """Careful access to NVML; ``library`` replaces ``pynvml``, ``clock`` is monotonic seconds."""

    def __init__(self, library: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._library = Library(library)
        self._xids = Xids(self._library)
        self._clock = clock
        self._lock = threading.RLock()
        self._started = False
        # The fault of the last question.
        self.fault: DriverFault | None = None
        # GPUs that have fallen off the bus, by UUID, or by "index N" if that is unknown; and those
        # that did not answer last. Replaced, never changed, so that any thread may read.
        self.lost: dict[str, DriverFault] = {}
        self.silent: dict[str, DriverFault] = {}
        self._gpus: tuple[Gpu, ...] = ()
        self._seen: dict[int, Gpu] = {}
        self._gpus_until = 0.0
        self._pause = _FIRST_PAUSE_S
        self._retry_at: float | None = None
        # By UUID: unsupported questions.
        self._unsupported: dict[str, set[Call]] = {}

    @property
    def gone(self) -> tuple[Gpu, ...]:
        """The lost GPUs in their last state; their handles are invalid."""
        return tuple(gpu for gpu in self._seen.values() if gpu.uuid in self.lost)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs in NVML's order, each before its MIG devices; empty after a fault."""
        with self._lock:
            now = self._clock()
            if self._retry_at is not None and now < self._retry_at:
                return self._gpus
            if now >= self._gpus_until or self._retry_at is not None:
                self._enumerate(now)
            return self._gpus

    def retry(self) -> None:
        """Ask the driver again at the next question, without the rest of the pause."""
        with self._lock:
            self._gpus_until = 0.0
            if self._retry_at is not None:
                self._retry_at, self._pause = self._clock(), _FIRST_PAUSE_S

    def system(self, function: str) -> Any:
        """Ask about the machine, such as ``"nvmlSystemGetDriverVersion"``; None if not known."""
        with self._lock:
            return self._library.call(function) if self._started else None

    def ask(
        self, gpu: Gpu, questions: Mapping[str, Call], *, alive: bool = False
    ) -> dict[str, Any]:
        """Ask a GPU several questions; return the answers by name, None for no answer.

        An unsupported question is not asked again, unless the GPU answered nothing at all: then the
        GPU or the driver has a problem. ``alive``: it has just answered another question.
        """
        answers: dict[str, Any] = dict.fromkeys(questions)
        known = self._unsupported.get(gpu.uuid, ())
        unsupported: list[Call] = []
        failure: Exception | None = None
        for name, call in questions.items():
            if call in known:
                continue
            try:
                answers[name] = self._library.make(call[0], gpu.handle, *call[1:])
            except self._library.errors as error:
                if code_of(error) in UNSUPPORTED:
                    unsupported.append(call)
                    continue
                failure = error
                if code_of(error) == GPU_IS_LOST:
                    self.lost = {**self.lost, gpu.uuid: gpu_lost(gpu.name, gpu.index)}
        answered = any(answer is not None for answer in answers.values())
        if answered and not alive and gpu.uuid in self.silent:
            self.silent = {uuid: f for uuid, f in self.silent.items() if uuid != gpu.uuid}
        if answered or alive:
            if unsupported:
                self._unsupported.setdefault(gpu.uuid, set()).update(unsupported)
        elif failure is not None:
            fault = gpu_silent(gpu.name, gpu.index, str(failure))
            self.silent = {**self.silent, gpu.uuid: fault}
            # A reset of the driver, or the end of a MIG instance, invalidates handles.
            self._gpus_until = 0.0
        return answers

    def busy(self, gpu: Gpu, seconds: float) -> dict[int, float | None] | None:
        """Return percent of a GPU's time by pid, for the last seconds; None if unknown, as in
        MIG."""
        since = int((time.time() - seconds) * 1e6)
        try:
            samples = self._library.make("nvmlDeviceGetProcessUtilization", gpu.handle, since)
        except self._library.errors as error:
            return {} if code_of(error) == NOT_FOUND else None
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
        """Return the question for NVML's newer memory structure."""
        return ("nvmlDeviceGetMemoryInfo", getattr(self._library.module, "nvmlMemory_v2", None))

    def memory(self, gpu: Gpu, *, alive: bool = False) -> Any:
        """Return NVML's memory structure in bytes: ``total``, ``free``, ``used`` and, with a newer
        driver, ``reserved``; None if unknown, or if the GPU has no memory of its own."""
        newer, older = self.memory_call, ("nvmlDeviceGetMemoryInfo",)
        memory = self.ask(gpu, {"newer": newer}, alive=alive)["newer"]
        if memory is None:
            # Both at once: an old driver answers only one.
            memory = self.ask(gpu, {"newer": newer, "older": older}, alive=alive)["older"]
            # The older one counts reserved bytes as used: another figure, after a mere error.
            if newer not in self._unsupported.get(gpu.uuid, ()):
                return None
        if memory is None or memory.total:
            return memory
        self._unsupported.setdefault(gpu.uuid, set()).update((newer, older))
        return None

    def shares_memory(self, gpu: Gpu) -> bool:
        """Whether a GPU has no memory of its own; a failed question does not say so."""
        asked = {self.memory_call, ("nvmlDeviceGetMemoryInfo",)}
        return asked <= self._unsupported.get(gpu.uuid, set())

    def memory_free(self, uuids: Iterable[str]) -> dict[str, int]:
        """Return known free bytes by UUID."""
        wanted = set(uuids)
        free = {}
        for gpu in self.gpus():
            if gpu.uuid in wanted and (memory := self.memory(gpu)) is not None:
                free[gpu.uuid] = int(memory.free)
        return free

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
        before, lost = self._gpus, set(self.lost)
        self.lost = {}
        gpus: list[Gpu] = []
        for index in range(count):
            gpus += self._with_mig(index)
        self.fault = None
        self._gpus = tuple(gpus)
        self._gpus_until = now + _KEEP_GPUS_S
        self._forget(before, lost)
        if self.lost:
            self._wait(now)
        else:
            self._retry_at, self._pause = None, _FIRST_PAUSE_S

    def _forget(self, before: Iterable[Gpu], lost: set[str]) -> None:
        """Forget facts of GPUs that are gone, were lost, or changed their MIG mode."""
        cut = {gpu.parent for gpu in before} ^ {gpu.parent for gpu in self._gpus}
        present = {gpu.uuid for gpu in self._gpus}
        for uuid in [*self._unsupported]:
            if uuid not in present or uuid in lost or uuid in cut:
                del self._unsupported[uuid]
        self.silent = {uuid: fault for uuid, fault in self.silent.items() if uuid in present}

    def _stop(self, error: Exception, now: float) -> None:
        self.fault = unreachable(error, self._library.module)
        if self._started:
            self._xids.close()
            # So that the next attempt loads the driver's present state.
            self._library.call("nvmlShutdown")
        self._started = False
        self._gpus = ()
        self.lost, self.silent, self._unsupported = {}, {}, {}
        self._wait(now)

    def _wait(self, now: float) -> None:
        self._retry_at = now + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE_S)

    def _with_mig(self, index: int) -> list[Gpu]:
        library = self._library
        try:
            handle = library.make("nvmlDeviceGetHandleByIndex", index)
            gpu = self._facts(index, handle, None)
        except library.errors as error:
            # The name and UUID from its last answer.
            before = self._seen.get(index)
            lost = code_of(error) == GPU_IS_LOST
            name, uuid = (before.name, before.uuid) if before else (None, f"index {index}")
            fault = gpu_lost(name, index, None if lost else str(error))
            self.lost = {**self.lost, uuid: fault}
            return []
        self._seen[index] = gpu
        gpus = [gpu]
        mode = library.call("nvmlDeviceGetMigMode", handle)
        if not mode or not mode[0]:
            return gpus
        for slot in range(library.call("nvmlDeviceGetMaxMigDeviceCount", handle) or 0):
            # An empty slot answers NOT_FOUND.
            child = library.call("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            if child is None:
                continue
            try:
                gpus.append(self._facts(index, child, gpu.uuid))
            except library.errors:
                # It was destroyed since the last line.
                continue
        return gpus

    def _facts(self, index: int, handle: Any, parent: str | None) -> Gpu:
        """Return a GPU's facts; raise NVML's error, since a GPU needs its UUID."""
        uuid = str(self._library.make("nvmlDeviceGetUUID", handle))
        name = self._library.call("nvmlDeviceGetName", handle)
        gpu = Gpu(index, uuid, name, None, parent, handle)
        memory = self.memory(gpu)
        total = None if memory is None else int(memory.total)
        return Gpu(index, uuid, name, total, parent, handle)


_door = Nvml()


def door() -> Nvml:
    """Return this process's access to NVML; a forked child has its own handles and locks."""
    return _door


def _after_fork() -> None:
    global _door
    _door = Nvml()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
