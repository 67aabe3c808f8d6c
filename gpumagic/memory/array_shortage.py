"""Explain an error for want of GPU memory, whichever framework raised it, in one form.

Of JAX, TensorFlow and CuPy the error says how much was wanted, and not always where: then it is
where the operands are, or where arrays are made.
"""

import ast
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from math import prod

from gpumagic import faults
from gpumagic.device.cards import bytes_in
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import library_of
from gpumagic.frameworks.known import imported, jax_here
from gpumagic.frameworks.own_devices import where
from gpumagic.memory.ask import memory
from gpumagic.memory.memory_report import EXCEPTION, GARBAGE, OUTPUT, DeviceMemory
from gpumagic.memory.out_of_memory import OutOfMemory, Remedy
from gpumagic.mismatch.syntax import RestOfCode
from gpumagic.usercode.files import label, user_namespace
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames
from gpumagic.usercode.lines import source_of
from gpumagic.usercode.values import torch_here
from gpumagic.usercode.variables import variables_read

_OURS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY"
    r"|OOM when allocating|[Ff]ailed to allocate memory|Out of memory allocating"
)
_WANTED = re.compile(r"alloc(?:ate|ating|ate request for) ([\d.,]+ ?(?:bytes|B|[KMGT]iB))")
_SHAPE = re.compile(r"shape\[([\d,]*)\] and type (\w+)")
_GPU = re.compile(r"(?:device ordinal |GPU[:_])(\d+)")
_LOGICAL = re.compile(r"device:CPU:(\d+)")
_SHARE = 0.95
# A holder below this part of what is allocated is not worth a line.
_WORTH = 0.05
_REMEDIES = 4


def explain_out_of_memory(
    error: BaseException, *, earlier: Iterable[BaseException] = ()
) -> OutOfMemory | None:
    """Say what an error for want of GPU memory is about, and what would help.

    Parameters
    ----------
    error : BaseException
        As it was caught, from torch, JAX, TensorFlow or CuPy: its traceback is read, while its
        frames are there.
    earlier : iterable of BaseException
        Those that were kept until it was raised, and held memory then.

    Returns
    -------
    OutOfMemory or None
        None for any other error.
    """
    if torch_here() is not None:
        from gpumagic.memory.explain_out_of_memory import explain_out_of_memory as of_torch

        if (found := of_torch(error, earlier=earlier)) is not None:
            return found
    # In an except block an error of ours would hide the user's own.
    with faults.kept("explaining an error for want of memory"):
        names = {framework.name for framework in imported()}
        for each in errors(error):
            frames = failed_frames(each.__traceback__)
            if frames and library_of(each) in names and _OURS.search(str(each)):
                return _explained(str(each), library_of(each), frames)
    return None


def _explained(said: str, library: str, frames: list[FailedFrame]) -> OutOfMemory | None:
    on = _device(said, library, frames[0])
    device = next((each for each in memory().devices if each.device == on), None)
    if device is None:  # the host's
        return None
    wanted = _wanted(said)
    frame, failed = frames[0], frames[0].failed
    cause, reason, remedies = _cause(wanted or 0, library, device)
    if cause != "too large":
        remedies += _given_back(device, frames)
    return OutOfMemory(
        expression=source_of(frame.filename, frame.line) if failed is None else frame.text(failed),
        line=getattr(failed, "lineno", frame.line),
        label=label(frame.filename),
        wanted=wanted,
        device=device,
        cause=cause,
        reason=reason,
        remedies=tuple(sorted(remedies, key=lambda remedy: -(remedy.gives or 0))),
        traceback_holds=_held(device, EXCEPTION),
    )


def _wanted(said: str) -> int | None:
    if (found := _WANTED.search(said)) is not None:
        return bytes_in(found[1].replace(",", ""))
    if (shape := _SHAPE.search(said)) is not None:
        size_of_one: int = sys.modules["tensorflow"].as_dtype(shape[2]).size
        return prod(int(n) for n in shape[1].split(",") if n) * size_of_one
    return None


def _device(said: str, library: str, frame: FailedFrame) -> str:
    if (gpu := _GPU.search(said)) is not None:
        return f"cuda:{gpu[1]}"
    if (logical := _LOGICAL.search(said)) is not None:  # TensorFlow's, of which 0 is the host
        return f"cuda:{int(logical[1]) - 1}"
    for node in ast.walk(frame.failed) if frame.failed is not None else ():
        with suppress(GpuError):
            if isinstance(node, ast.Name) and (on := where(frame.scope.value(node))) != "cpu":
                return on.partition(" ")[0]
    return str(jax_here().default()) if library == "JAX" else "cuda:0"


def _cause(wanted: int, library: str, device: DeviceMemory) -> tuple[str, str, list[Remedy]]:
    """The cause in a word and in a sentence, and what would help against it."""
    on, total, held = device.device, device.total or 0, device.allocated or 0
    limit = next((pool.limit for pool in device.pools if pool.framework == library), None)
    room = (device.free or 0) + (device.reserved or 0) - held  # but for the limit
    short = wanted - min(room, (limit or total) - held)
    if wanted > total > 0:
        why = f"{size(wanted)} at once is more than the {size(total)} that {on} has in all"
        return "too large", why, []
    if limit is not None and wanted <= room and short > 0:
        why = f"{library} divides at most {size(limit)} of the {size(total)} that {on} has"
        why += ": it takes 75 %, unless it is told otherwise before it starts"
        do = f"`%env XLA_PYTHON_CLIENT_MEM_FRACTION={_SHARE}` before JAX starts, in a new kernel,"
        gives = max(int(_SHARE * total) - limit, 0)
        return "limit", why, [Remedy(f"{do} allows", gives)] if library == "JAX" else []
    if (device.others or 0) >= max(short, held, 1):
        named = some(name for name, _ in device.others_by_name)
        why = f"other processes hold {size(device.others)} of {on}"
        return "others", f"{why}: {named}" if named else why, []
    first = device.holders[0] if device.holders else None
    most = f", most of it by {first.path} ({size(first.nbytes)})" if first else ""
    left = f"; {size(short)} too little is left" if short > 0 else ""
    return "full", f"{size(held)} are in use{most}{left}", []


def _held(device: DeviceMemory, *kinds: str) -> int:
    return sum(row.nbytes for row in device.holders if row.kind in kinds)


def _given_back(device: DeviceMemory, frames: list[FailedFrame]) -> list[Remedy]:
    """What `%gpufree` gives back: outputs, and variables that nothing reads which was to run."""
    names, kept = user_namespace(), _held(device, OUTPUT, GARBAGE)
    found = [Remedy("`%gpufree` gives back", kept)] if kept else []
    named = {name for frame in frames for name in RestOfCode(frame).read}
    read = {name for name, _ in variables_read(named, names)}
    for row in device.holders:
        idle = row.path in names and not {row.path, *row.aliases} & read
        also = [alias for alias in row.aliases if alias in names and not alias.startswith("_")]
        if idle and row.nbytes >= _WORTH * (device.allocated or 0):
            found.append(Remedy(f"`%gpufree {' '.join([row.path, *also])}` gives back", row.nbytes))
    return found[:_REMEDIES]
