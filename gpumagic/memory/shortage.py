"""Read an out-of-memory error of any framework: the GPU, the bytes asked for, what there was.

torch rounds the figures in its text; where asked beforehand, its allocator calls `_note` at that
moment, and they are exact. JAX, TensorFlow and CuPy tell the bytes, and not always the GPU: then it
is where the operands are, or where arrays are made.
"""

import ast
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from gpumagic.device.cards import bytes_in
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import library_of
from gpumagic.frameworks.known import imported, jax_here
from gpumagic.frameworks.public import where
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames
from gpumagic.usercode.values import torch_here

TORCH = "torch"


@dataclass(frozen=True)
class Shortage:
    """Record the figures of a failed allocation, in bytes; None if unknown."""

    ordinal: int
    wanted: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    others: int | None = None  # other processes
    exact: bool = False  # as the allocator itself noted them
    library: str = TORCH


_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_TORCHS = re.compile(
    r"(?:CUDA|HIP) out of memory"
    r"|(?:CUDA|HIP)(?: driver| runtime)? error(?: \(2\)\s*)?:? *out of memory"
    r"|CUDA ran out of memory"
    r"|(?:CUDNN|CUBLAS|CUSOLVER|HIPBLAS|CUFFT)\w*_ALLOC_FAILED"
    # What cuBLAS says where nothing is left for its workspace.
    r"|CUBLAS_STATUS_NOT_INITIALIZED.*cublasCreate"
)
_GPU = re.compile(r"GPU (\d+)")
_WANTED = re.compile(rf"(?:Tried to allocate|Requested size:?) {_SIZE}")
_TOTAL = re.compile(rf"total capac?i?ty of {_SIZE}")
_FREE = re.compile(rf"of which {_SIZE} is free")
_ALLOCATED = re.compile(rf"allocated memory {_SIZE} is allocated")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_ALLOWED = re.compile(rf"{_SIZE} allowed")
# A text is rounded to hundredths of its unit.
ROUNDED = 0.01
_FIGURES = ("wanted", "allocated", "reserved")

_ARRAYS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY"
    r"|OOM when allocating|[Ff]ailed to allocate memory|Out of memory allocating"
)
_ASKED = re.compile(r"alloc(?:ate|ating|ate request for) ([\d.,]+ ?(?:bytes|B|[KMGT]iB))")
_SHAPE = re.compile(r"shape\[([\d,]*)\] and type (\w+)")
_ORDINAL = re.compile(r"(?:device ordinal |GPU[:_])(\d+)")
_LOGICAL = re.compile(r"device:CPU:(\d+)")

_noted: dict[int, Shortage] = {}
_attached_to: Any = None


def read(error: BaseException) -> tuple[BaseException, Shortage] | None:
    """Return the out-of-memory error in a chain, and its figures; None if there is none."""
    names = {framework.name for framework in imported()}
    for each in errors(error):
        text, library, torch = str(each), library_of(each), torch_here()
        if torch is not None and isinstance(each, RuntimeError) and _TORCHS.search(text):
            found = _exact(_of_torch(text, torch)) if torch.cuda.is_initialized() else None
            return (each, found) if found and found.ordinal < torch.cuda.device_count() else None
        if library in names and _ARRAYS.search(text):
            frames = failed_frames(each.__traceback__)
            on = _device(text, library, frames[0]) if frames else "cpu"
            kind, _, ordinal = on.partition(":")
            asked = Shortage(int(ordinal or 0), _wanted(text), library=library)
            return (each, asked) if kind == "cuda" else None
    return None


def _of_torch(text: str, torch: Any) -> Shortage:
    gpu = _GPU.search(text)
    allocated, unused = _size(_ALLOCATED, text), _size(_UNUSED, text)
    others = [bytes_in(found) or 0 for found in _PROCESS.findall(text)]
    return Shortage(
        ordinal=int(gpu[1]) if gpu else torch.cuda.current_device(),
        wanted=_size(_WANTED, text),
        total=_size(_ALLOWED, text) or _size(_TOTAL, text),
        free=_size(_FREE, text),
        allocated=allocated,
        reserved=None if allocated is None or unused is None else allocated + unused,
        others=sum(others) if others else None,
    )


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else bytes_in(found[1])


def _exact(said: Shortage) -> Shortage:
    """Return the figures noted at the failure, if the text's rounded ones agree with them."""
    noted = _noted.get(said.ordinal)
    if noted is None or said.wanted is None:
        return said
    figures = [(getattr(noted, name), getattr(said, name)) for name in _FIGURES]
    near = all(abs(a - b) <= max(ROUNDED * b, 1) for a, b in figures if a is not None and b)
    return replace(noted, others=said.others) if near else said


def _wanted(text: str) -> int | None:
    if (found := _ASKED.search(text)) is not None:
        return bytes_in(found[1].replace(",", ""))
    if (shape := _SHAPE.search(text)) is not None:
        size_of_one: int = sys.modules["tensorflow"].as_dtype(shape[2]).size
        return prod(int(n) for n in shape[1].split(",") if n) * size_of_one
    return None


def _device(text: str, library: str, frame: FailedFrame) -> str:
    if (gpu := _ORDINAL.search(text)) is not None:
        return f"cuda:{gpu[1]}"
    if (logical := _LOGICAL.search(text)) is not None:  # TensorFlow's, of which 0 is the host
        return f"cuda:{int(logical[1]) - 1}"
    for node in ast.walk(frame.failed) if frame.failed is not None else ():
        with suppress(GpuError):
            if isinstance(node, ast.Name) and (on := where(frame.scope.value(node))) != "cpu":
                return on.partition(" ")[0]
    return str(jax_here().default()) if library == "JAX" else "cuda:0"


def note_shortages() -> None:
    """Let torch's allocator note its figures when it fails, from now on; if CUDA is in use."""
    global _attached_to
    torch: Any = torch_here()
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or attach is _attached_to or not torch.cuda.is_initialized():
        return
    attach(_note)
    _attached_to = attach


def _note(ordinal: int, wanted: int, total: int, free: int) -> None:
    stats = torch_here().cuda.memory_stats(ordinal)
    _noted[ordinal] = Shortage(
        ordinal,
        wanted,
        total,
        free,
        stats.get("allocated_bytes.all.current"),
        stats.get("reserved_bytes.all.current"),
        exact=True,
    )
