"""Check whether CUDA in this process still works, and what to do if it does not.

Some of CUDA's errors stay: each later call fails with the same one, and only a new process can use
the GPUs again. CUDA itself is asked: the text of an error may be another process's.
"""

import ctypes
import gc
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from gpumagic import faults, nvml
from gpumagic.device.discover import here, physical_gpus
from gpumagic.device.where import there_is
from gpumagic.errors import GpuError

# By CUDA's text: what happened, in two or three words (cudaError_t in CUDA's reference).
_STAYS = {
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
# What may be said of a GPU that is no longer there.
_MAY_BE_LOST = frozenset({_BUSY, "unspecified launch failure", "unknown error"})
_CHECK = "%%ongpu … --check names the bad index"
_CURES = {
    "device-side assert": f"restart the kernel; {_CHECK}",
    "uncorrectable ECC error": "restart the kernel; if it comes again, the GPU must be reset "
    "(sudo nvidia-smi --gpu-reset)",
    "launch timed out": "restart the kernel, and give each call less work",
    "GPU lost": "restart the machine (sudo dmesg tells of Xid 79)",
}
_WHERE_BUSY = (
    "the GPU is busy or unavailable: another process may have it for itself (compute mode "
    "Exclusive_Process); `%gpus` shows who holds it; run the cell again, or on another GPU"
)
# What frameworks raise where they find no GPU. So says a build of PyTorch without CUDA, the third
# once virtual GPUs were there.
_NO_GPU = {
    "PyTorch": r"Torch not compiled with CUDA|not linked with support for cuda|'CUDA' backend"
    r"|Found no NVIDIA driver|No CUDA GPUs are available|torch\.cuda\.is_available\(\) is False",
    "JAX": r"Unknown backend:? '?(?:gpu|cuda)\b",
    "TensorFlow": "Could not satisfy device specification '/job:localhost",
}
_BAD_INDEX = r"index out of range in self|Target -?\d+ is out of bounds"
_ON_CPU = 'device="cpu" works; "cuda" if torch.cuda.is_available() else "cpu" works anywhere'
_SAID = re.compile(r"(?:CUDA|HIP)(?: driver| runtime)? error: *(.+)")


class CudaDead(GpuError):
    """Refuse work that needs CUDA, because CUDA in this process is dead."""


@dataclass(frozen=True)
class Death:
    """Record the end of CUDA in this process."""

    what: str  # "device-side assert"
    where: str  # the code that ran when it was noticed: "In [7], line 3"; or nothing

    @property
    def cause(self) -> str:
        """``"device-side assert in In [7], line 3 or before"``."""
        return f"{self.what} in {self.where} or before" if self.where else self.what

    @property
    def cure(self) -> str:
        """What to do."""
        return _CURES.get(self.what, "restart the kernel")

    @property
    def said(self) -> str:
        """That it has happened."""
        return f"CUDA in this kernel is dead ({self.cause})"

    def __str__(self) -> str:
        return f"{self.said}: {self.cure}"


_death: Death | None = None


def death() -> Death | None:
    """Return the known death of CUDA, or None; CUDA is not asked."""
    return _death


def working() -> Any:
    """Return ``torch.cuda`` from its first use until CUDA dies, else None; import nothing."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    started = getattr(cuda, "is_initialized", bool)()
    return cuda if started and _death is None else None


def started() -> list[int]:
    """Return the ordinals that have a context; asking another would make one, of 0.5 GiB."""
    if (cuda := working()) is None:
        return []
    # torch's own test for it; a CPU build with virtual GPUs has none, and all are there.
    has_context = getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", lambda n: True)
    return [n for n in range(cuda.device_count()) if has_context(n)]


def look(where: str = "", error: BaseException | None = None) -> Death | None:
    """Check for the death of CUDA, without waiting, after the code `where` and its error."""
    global _death
    if (cuda := working()) is not None:
        said = _asked(cuda)
        if not _MAY_BE_LOST.isdisjoint((said, _said(error))) and _lost():
            _death = Death("GPU lost", where)
        elif said in _STAYS:
            _death = Death(_STAYS[said], where)
    elif _death is not None and not _death.where:
        _death = replace(_death, where=where)
    return _death


def _asked(cuda: Any) -> str:
    """Return CUDA's own error for its GPUs; empty while all is well."""
    try:
        if not cuda.is_current_stream_capturing():  # which the next call would end
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's, of the same error
                for ordinal in started():
                    cuda.current_stream(ordinal).query()
    except RuntimeError as error:
        return _said(error)
    return ""


def check() -> None:
    """Raise `CudaDead` if CUDA is known to be dead."""
    if _death is not None:
        raise CudaDead(str(_death))


def is_death(error: BaseException) -> bool:
    """Whether an error is that CUDA in this process is dead."""
    if _said(error) in (*_STAYS, *_MAY_BE_LOST):
        return look(error=error) is not None
    return isinstance(error, CudaDead)


def advice(error: BaseException) -> str:
    """Return what to do about an error of CUDA that does not stay or a bad index; else nothing."""
    if _said(error) == _BUSY:
        return _WHERE_BUSY
    if _said(error) == "invalid device ordinal":
        return there_is(here(memory=False))
    said = faults.in_words(error)
    if re.search(_BAD_INDEX, said):
        return _CHECK
    found = next((name for name, texts in _NO_GPU.items() if re.search(texts, said)), "")
    if not found or (found == "PyTorch" and sys.modules["torch"].cuda.is_available()):
        return ""
    works, then = "the CPU works", "it works in a new kernel: restart it, and type that first"
    if found == "PyTorch":
        works, then = _ON_CPU, "the cell works as it is: run it again"
    cure = f"%gpus --virtual 2 makes two virtual GPUs, on which {then}"
    if physical_gpus():
        cure = "there is a GPU in this machine: %gpus --doctor says what is missing"
    return f"{found} finds no GPU; {works}\n→ {cure}"


def room(device: Any) -> int:
    """Return the bytes that tensors may still take on a GPU, torch's cache included."""
    cuda = sys.modules["torch"].cuda
    cached = cuda.memory_reserved(device) - cuda.memory_allocated(device)
    return int(cuda.mem_get_info(device)[0] + cached)


def collect() -> None:
    """Collect garbage while CUDA works: to destroy an event of a dead CUDA ends the process."""
    if look() is None:
        gc.collect()


def give_back() -> None:
    """Collect garbage, and give the unused memory in torch's cache back to the driver."""
    collect()
    if (cuda := working()) is not None:
        with suppress(RuntimeError):  # of a GPU that has failed; the code's own error says more
            cuda.empty_cache()


_spare: dict[tuple[type, int], list[Any]] = {}


def take_event(ordinal: int) -> Any:
    """Return a GPU's event for timing, which is never destroyed; `give_events` takes it back."""
    kind = sys.modules["torch"].cuda.Event
    spare = _spare.setdefault((kind, ordinal), [])
    if spare:
        return spare.pop()
    event = kind(enable_timing=True)
    # What an error's traceback holds would be destroyed whenever Python likes.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))
    return event


def give_events(ordinal: int, *events: Any) -> None:
    """Take back events of a GPU that nobody reads any more."""
    _spare[type(events[0]), ordinal] += events


def forget() -> None:
    """Forget a death of CUDA, so that CUDA is asked again: the extension is unloading."""
    global _death
    _death = None


def _said(error: BaseException | None) -> str:
    """Return CUDA's own text in an error."""
    found = _SAID.search(faults.in_words(error)) if isinstance(error, RuntimeError) else None
    return found[1].strip() if found else ""


def _lost() -> bool:
    """Whether NVML says that a GPU has fallen off the bus."""
    door = nvml.door()
    door.retry()
    door.gpus()
    return bool(door.lost)


# CUDA's death is reported once. Further errors of a dead CUDA are no faults of ours.
faults.not_ours.append(is_death)
