"""Check whether CUDA still works in this process, and say what to do if it does not.

After some CUDA errors, each later call fails with the same error, and only a new process can use
the GPUs again. This module calls such a failure CUDA's death. `look` asks CUDA itself whether CUDA
is dead, because an exception may come from another process.
"""

import ctypes
import gc
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from gpumagic import faults, nvml
from gpumagic.device.discover import here, physical_gpus
from gpumagic.device.where import there_is
from gpumagic.errors import GpuError

_PERMANENT = {  # permanent errors: CUDA's text (documented at cudaError_t), then a short name
    "device-side assert triggered": "device-side assert",
    "an illegal memory access was encountered": "illegal memory access",
    "an illegal instruction was encountered": "illegal instruction",
    "misaligned address": "misaligned address",
    "operation not supported on global/shared address space": "wrong address space",
    "invalid program counter": "invalid program counter",
    "hardware stack error": "hardware stack error",
    "uncorrectable ECC error encountered": "uncorrectable ECC error",
    "uncorrectable NVLink error detected during the execution": "uncorrectable NVLink error",
    "the launch timed out and was terminated": "launch timed out",
    "unspecified launch failure": "unspecified launch failure",
    "unknown error": "unknown error",
}
_BUSY = "CUDA-capable device(s) is/are busy or unavailable"
# Errors that CUDA may report for a GPU that fell off the bus.
_MAY_BE_LOST = frozenset({_BUSY, "unspecified launch failure", "unknown error"})
_CHECK_LINE = "%%ongpu {} --check as the cell's first line"
_CURES = {
    "device-side assert": "restart the kernel; {} names the bad index",
    "uncorrectable ECC error": "restart the kernel; if it happens again, reset the GPU "
    "(sudo nvidia-smi --gpu-reset)",
    "launch timed out": "restart the kernel, and give each call less work",
    "GPU lost": "restart the machine (sudo dmesg shows Xid 79)",
}
_WHERE_BUSY = (
    "the GPU is busy or unavailable: another process may have exclusive use of it (compute mode "
    "Exclusive_Process); `%gpus` shows who holds it; run the cell again, or on another GPU"
)
_NO_GPU = {  # patterns of errors that frameworks raise if they find no GPU
    "PyTorch": r"Torch not compiled with CUDA|not linked with support for cuda|'CUDA' backend"
    r"|Found no NVIDIA driver|No CUDA GPUs are available|torch\.cuda\.is_available\(\) is False",
    "JAX": r"Unknown backend:? '?(?:gpu|cuda)\b",
    "TensorFlow": "Could not satisfy device specification '/job:localhost",
}
_ON_CPU = 'device="cpu" works; "cuda" if torch.cuda.is_available() else "cpu" works anywhere'
_WITHOUT = {"PyTorch": (_ON_CPU, "then run the same cell again")}  # what works without a GPU
_SAID = re.compile(r"(?:CUDA|HIP)(?: driver| runtime)? error: *(.+)")


class CudaDead(GpuError):
    """Raised if work needs CUDA, but CUDA in this process has failed permanently."""


@dataclass(frozen=True)
class Death:
    """The permanent failure of CUDA in this process."""

    what: str  # the error's short name, such as "device-side assert"
    where: str  # where the failure was found, such as "In [7], line 3"; empty if unknown
    check_line: str = ""  # the advice to type `%%ongpu … --check`; if empty, `_CHECK_LINE`

    @property
    def cause(self) -> str:
        """The failure with its place. CUDA reports errors late, so the text ends in "or before"."""
        return f"{self.what} in {self.where} or before" if self.where else self.what

    @property
    def cure(self) -> str:
        line = self.check_line or _CHECK_LINE.format(0)
        return _CURES.get(self.what, "restart the kernel").format(line)

    @property
    def said(self) -> str:
        return f"CUDA in this kernel is dead ({self.cause})"

    def __str__(self) -> str:
        return f"{self.said}: {self.cure}"


_death: Death | None = None


def death() -> Death | None:
    """Return the recorded death of CUDA, or None, without calling CUDA."""
    return _death


def live_cuda() -> Any:
    """Return ``torch.cuda`` if it is initialized and CUDA is not dead, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if getattr(cuda, "is_initialized", bool)() and _death is None else None


def started() -> list[int]:
    """Return the ordinals of GPUs with a CUDA context. A query of any other GPU creates one."""
    if (cuda := live_cuda()) is None:
        return []
    # CPU builds of torch lack `_cuda_hasPrimaryContext`. There, all virtual GPUs count as started.
    has_context = getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", lambda n: True)
    return [n for n in range(cuda.device_count()) if has_context(n)]


def look(where: str = "", error: BaseException | None = None, check_line: str = "") -> Death | None:
    """Record and return CUDA's death, or None, without waiting. `error` was raised at `where`."""
    global _death
    if (cuda := live_cuda()) is not None:
        said = _current_error(cuda)
        if not _MAY_BE_LOST.isdisjoint((said, _cuda_text(error))) and _lost():
            _death = Death("GPU lost", where)
        elif said in _PERMANENT:
            _death = Death(_PERMANENT[said], where, check_line)
    elif _death is not None and not _death.where:
        _death = replace(_death, where=where, check_line=check_line)
    return _death


def _current_error(cuda: Any) -> str:
    """Return the text of the error that CUDA reports for any GPU; empty without an error."""
    try:
        if not cuda.is_current_stream_capturing():  # a query would break a graph capture
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # hide torch's warning, which repeats the error
                for ordinal in started():
                    cuda.current_stream(ordinal).query()
    except RuntimeError as error:
        return _cuda_text(error)
    return ""


def check() -> None:
    if _death is not None:
        raise CudaDead(str(_death))


def is_death(error: BaseException) -> bool:
    """Whether an error means that CUDA in this process is dead."""
    if _cuda_text(error) in (*_PERMANENT, *_MAY_BE_LOST):
        return look(error=error) is not None
    return isinstance(error, CudaDead)


def advice(error: BaseException, check_line: str = "") -> str:
    """Return advice on a bad index or a missing, busy or misnamed GPU; empty for other errors."""
    if _cuda_text(error) == _BUSY:
        return _WHERE_BUSY
    if _cuda_text(error) == "invalid device ordinal":
        return there_is(here(memory=False))
    said = faults.in_words(error)
    if re.search(r"index out of range in self|Target -?\d+ is out of bounds", said):
        return f"{check_line or _CHECK_LINE.format(_device_in(error))} names the bad index"
    if said.endswith("device type at start of device string: gpu"):
        return 'torch calls a GPU "cuda", or "cuda:0"'
    found = next((name for name, texts in _NO_GPU.items() if re.search(texts, said)), "")
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if not found or (found == "PyTorch" and (cuda is None or cuda.is_available())):
        return ""
    general = "the CPU works", "to use them, restart the kernel and type it first"
    works, then = _WITHOUT.get(found, general)
    cure = f"%gpus --virtual 2 makes two virtual GPUs; {then}"
    if physical_gpus():
        cure = "there is a GPU in this machine: %gpus --doctor says what is missing"
    return f"{found} finds no GPU; {works}\n→ {cure}"


def _device_in(error: BaseException) -> str:
    """Return the only device of the failed frame's tensors, the only GPU, or else ``"0"``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    tensors = (each for frame in frames[-1:] for each in frame.f_locals.values())
    tensor = getattr(sys.modules.get("torch"), "Tensor", ())
    found = {str(each.device) for each in tensors if issubclass(type(each), tensor)}
    devices = found - {"cpu"} or found
    return devices.pop().removeprefix("cuda:") if len(devices) == 1 else "0"


def free_bytes(device: Any) -> int:
    """Return the bytes free for tensors on a GPU, including unused memory in torch's cache."""
    cuda = sys.modules["torch"].cuda
    cached = cuda.memory_reserved(device) - cuda.memory_allocated(device)
    return int(cuda.mem_get_info(device)[0] + cached)


@contextmanager
def no_collections() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def collect() -> None:
    """Collect garbage, unless CUDA is dead: freeing an event would then end the process."""
    if look() is None:
        gc.collect()


def give_back() -> None:
    """Collect garbage, and return the unused memory in torch's cache to the driver."""
    collect()
    if (cuda := live_cuda()) is not None:
        with suppress(RuntimeError):  # a GPU has failed; the user's own code raises the same error
            cuda.empty_cache()


_spare: dict[tuple[type, int], list[Any]] = {}


def take_event(ordinal: int) -> Any:
    """Return a timing event of a GPU. Give the event back with `give_events` after use."""
    kind = sys.modules["torch"].cuda.Event
    spare = _spare.setdefault((kind, ordinal), [])
    if spare:
        return spare.pop()
    event = kind(enable_timing=True)
    # Keep the event alive forever, because destroying it after CUDA's death ends the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
    return event


def give_events(ordinal: int, *events: Any) -> None:
    """Take back events of a GPU, so that `take_event` can reuse them."""
    _spare[type(events[0]), ordinal] += events


def forget() -> None:
    """Delete the record of CUDA's death. Called by `%unload_ext`."""
    global _death
    _death = None


def _cuda_text(error: BaseException | None) -> str:
    """Return the part of an exception's message that is CUDA's text; empty if there is none."""
    found = _SAID.search(faults.in_words(error)) if isinstance(error, RuntimeError) else None
    return found[1].strip() if found else ""


def _lost() -> bool:
    driver = nvml.shared_nvml()
    driver.retry()
    driver.gpus()
    return bool(driver.lost)


faults.not_ours.append(is_death)  # CUDA's death is no fault of gpumagic
