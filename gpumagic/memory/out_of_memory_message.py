"""Read what an error for want of memory says: the GPU, what was wanted, and the figures then.

torch rounds them in its text. Its allocator calls `note` at the moment itself, where that was asked
for before: then they are exact.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch

from gpumagic.device.cards import bytes_in
from gpumagic.usercode.frames import errors


@dataclass(frozen=True)
class Shortage:
    """What an allocator had and did not have; bytes, None where it does not say."""

    ordinal: int
    wanted: int | None = None
    total: int | None = None
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    others: int | None = None  # other processes
    exact: bool = False  # as the allocator itself noted them


_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_OURS = re.compile(
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
_ROUNDED = 0.01
_FIGURES = ("wanted", "allocated", "reserved")

_noted: dict[int, Shortage] = {}
_attached_to: Any = None


def read(error: BaseException) -> tuple[BaseException, Shortage] | None:
    """The error of a chain that is for want of GPU memory, and its figures; None without one."""
    for each in errors(error):
        if isinstance(each, RuntimeError) and _OURS.search(text := str(each)):
            there = torch.cuda.is_initialized()
            found = _exact(_read(text)) if there else None
            return (each, found) if found and found.ordinal < torch.cuda.device_count() else None
    return None


def _read(text: str) -> Shortage:
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
    """The figures noted at the moment itself, where they are those that the text rounds."""
    noted = _noted.get(said.ordinal)
    if noted is None or said.wanted is None:
        return said
    figures = [(getattr(noted, name), getattr(said, name)) for name in _FIGURES]
    near = all(abs(a - b) <= max(_ROUNDED * b, 1) for a, b in figures if a is not None and b)
    return replace(noted, others=said.others) if near else said


def note_shortages() -> None:
    """Let torch's allocator note its figures when it fails, from now on; if CUDA is in use."""
    global _attached_to
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None or attach is _attached_to or not torch.cuda.is_initialized():
        return
    attach(_note)
    _attached_to = attach


def _note(ordinal: int, wanted: int, total: int, free: int) -> None:
    stats = torch.cuda.memory_stats(ordinal)
    _noted[ordinal] = Shortage(
        ordinal,
        wanted,
        total,
        free,
        stats.get("allocated_bytes.all.current"),
        stats.get("reserved_bytes.all.current"),
        exact=True,
    )
