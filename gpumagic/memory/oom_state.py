"""Gather the facts of an out-of-memory error while its frames are alive: figures and holders.

torch says all figures, rounded. JAX, TensorFlow and CuPy say the bytes, and not always the GPU:
then it is where the operands are, or where arrays are made.

The frames of the error are reached only by their names, so what they alone hold is known: it is
freed with them. No code of the user's runs.
"""

import ast
import gc
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from traceback import walk_tb
from types import FunctionType
from typing import Any

from gpumagic.device.cards import bytes_in
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import library_of
from gpumagic.frameworks.known import imported, jax_here
from gpumagic.frameworks.public import where
from gpumagic.memory import holders_by_name
from gpumagic.memory.holders_by_name import FoundStorage, find
from gpumagic.memory.memory_report import (
    EXCEPTION,
    TEMPORARY,
    UNREACHED,
    DeviceMemory,
    Made,
    MemoryHolder,
)
from gpumagic.memory.object_graph import GRAPH, Root, of_kinds
from gpumagic.memory.roots import KeptOutputs, tracebacks
from gpumagic.usercode.files import label, module_of
from gpumagic.usercode.frames import FailedFrame, errors, failed_frames
from gpumagic.usercode.syntax import RestOfCode, stored
from gpumagic.usercode.values import globals_of, torch_here
from gpumagic.usercode.variables import variables_read

# -- what the error says
TORCH = "torch"
ROUNDED = 0.01
"""A text is rounded to hundredths of its unit."""


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
    library: str = TORCH


_TORCHS = re.compile(
    r"(?:CUDA|HIP) out of memory"
    r"|(?:CUDA|HIP)(?: driver| runtime)? error(?: \(2\)\s*)?:? *out of memory"
    r"|CUDA ran out of memory"
    r"|(?:CUDNN|CUBLAS|CUSOLVER|HIPBLAS|CUFFT)\w*_ALLOC_FAILED"
    # What cuBLAS says where nothing is left for its workspace.
    r"|CUBLAS_STATUS_NOT_INITIALIZED.*cublasCreate"
)
_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_WANTED = rf"(?:Tried to allocate|Requested size:?) {_SIZE}"
_TOTAL = rf"total capac?i?ty of {_SIZE}"
_FREE = rf"of which {_SIZE} is free"
_ALLOCATED = rf"allocated memory {_SIZE} is allocated"
_UNUSED = rf"{_SIZE} is reserved by PyTorch but unallocated"
_PROCESS = rf"Process \d+ has {_SIZE} memory in use"
_ALLOWED = rf"{_SIZE} allowed"

_ARRAYS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY"
    r"|OOM when allocating|[Ff]ailed to allocate memory|Out of memory allocating"
)
_ASKED = r"alloc(?:ate|ating|ate request for) ([\d.,]+ ?(?:bytes|B|[KMGT]iB))"
_SHAPE = re.compile(r"shape\[([\d,]*)\] and type (\w+)")
_ORDINAL = re.compile(r"(?:device ordinal |GPU[:_])(\d+)")
_LOGICAL = re.compile(r"device:CPU:(\d+)")


def read(error: BaseException) -> tuple[BaseException, Shortage] | None:
    """Return the out-of-memory error in a chain, and its figures; None if there is none."""
    names = {framework.name for framework in imported()}
    for each in errors(error):
        text, library, torch = str(each), library_of(each), torch_here()
        if torch is not None and isinstance(each, RuntimeError) and _TORCHS.search(text):
            found = _of_torch(text, torch) if torch.cuda.is_initialized() else None
            return (each, found) if found and found.ordinal < torch.cuda.device_count() else None
        if library in names and _ARRAYS.search(text):
            frames = failed_frames(each.__traceback__)
            on = _device(text, library, frames[0]) if frames else "cpu"
            kind, _, ordinal = on.partition(":")
            asked = Shortage(int(ordinal or 0), _wanted(text), library=library)
            return (each, asked) if kind == "cuda" else None
    return None


def _of_torch(text: str, torch: Any) -> Shortage:
    gpu = re.search(r"GPU (\d+)", text)
    allocated, unused = _size(_ALLOCATED, text), _size(_UNUSED, text)
    others = [bytes_in(found) or 0 for found in re.findall(_PROCESS, text)]
    return Shortage(
        ordinal=int(gpu[1]) if gpu else torch.cuda.current_device(),
        wanted=_size(_WANTED, text),
        total=_size(_ALLOWED, text) or _size(_TOTAL, text),
        free=_size(_FREE, text),
        allocated=allocated,
        reserved=None if allocated is None or unused is None else allocated + unused,
        others=sum(others) if others else None,
    )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else bytes_in(found[1].replace(",", ""))


def _wanted(text: str) -> int | None:
    shape = _SHAPE.search(text)
    if shape is None or re.search(_ASKED, text):
        return _size(_ASKED, text)
    size_of_one: int = sys.modules["tensorflow"].as_dtype(shape[2]).size
    return prod(int(n) for n in shape[1].split(",") if n) * size_of_one


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


# -- the state
_ON_THEIR_WAY = "results on their way"
"""The row of memory that was allocated at the error and is free now: no name held it yet."""
# A holder below this part of the GPU's memory is not worth a line.
_WORTH = 0.05


class OutOfMemoryState:
    """Hold the facts of a failed allocation: figures, the user's frames, and holders."""

    def __init__(
        self,
        shortage: Shortage,
        said: BaseException,
        error: BaseException,
        frames: list[FailedFrame],
        namespace: dict[str, Any],
        earlier: Iterable[BaseException],
    ) -> None:
        self.shortage, self.frames, self.namespace = shortage, frames, namespace
        self.name = f"cuda:{shortage.ordinal}"
        self.wanted = shortage.wanted or 0
        self.rests = [RestOfCode(frame) for frame in frames]
        self._allocator = holders_by_name.allocations()
        self._chain = list(errors(error))
        self._earlier = [e for e in earlier if all(e is not each for each in self._chain)]
        cell = label(frames[-1].filename)
        self._exception = f"the exception of {cell}"
        self.handled = f"the exception handled in {cell}"
        handled = [*errors(said)][1:]  # `error` was raised in its `except` block
        passed = [each for each in self._chain if all(each is not other for other in handled)]
        now = {frame for each in passed for frame, _ in walk_tb(each.__traceback__)}
        then = [frame for each in handled for frame, _ in walk_tb(each.__traceback__)]
        self._handled = [frame for frame in then if frame not in now]
        # Our own objects may not be found as holders.
        traces = list(tracebacks(error))
        ours = [self, vars(self), *frames, *(frame.scope for frame in frames)]
        self._closed = [*ours, *self._chain, *traces, *(t.tb_frame for t in traces)]
        self.beyond = [
            trace.tb_frame
            for trace in traces
            if module_of(trace.tb_frame.f_code.co_filename) and trace.tb_frame in now
        ]
        """torch's and libraries' frames that the error passed."""

    # -- holders
    @cached_property
    def storages(self) -> list[FoundStorage]:
        """List every storage held now on the GPU, with its paths."""
        earlier = [Root("an earlier exception", each, EXCEPTION) for each in self._earlier]
        found = find(
            self.namespace,
            after=[*earlier, *self._locals()],
            closed=self._closed,
            allocator=self._allocator,
            paths=True,
        )
        return [each for each in found if each.device == self.name]

    def _locals(self) -> Iterator[Root]:
        """Yield the names in the error's frames: each of the user's, the others together."""
        for frame in self.frames:
            for name, value in frame.scope.local.items() if not frame.at_top else ():
                yield Root(self.local(frame, name), value, EXCEPTION)
        libraries = [dict(frame.f_locals) for frame in self.beyond]
        yield Root(self._exception, libraries, EXCEPTION)
        yield Root(self.handled, [dict(frame.f_locals) for frame in self._handled], EXCEPTION)

    def local(self, frame: FailedFrame, name: str) -> str:
        """Return a frame's variable as the table names it: ``"x"`` at the top of a cell."""
        return name if frame.at_top else f"{self._exception}: {frame.code.co_name}, {name}"

    @cached_property
    def _frames(self) -> set[str]:
        return {root.name for root in self._locals()}

    @cached_property
    def device(self) -> DeviceMemory:
        """The GPU's figures at the moment of the error, and who holds its memory now."""
        now = device_now(self.name, self.storages)
        rows = holders_by_name.with_holders(now, self.storages, self._allocator).holders
        gone = (self.shortage.allocated or 0) - (now.allocated or 0)
        if gone > ROUNDED * (self.shortage.allocated or 0):
            frame = self.frames[0]
            made = Made(label(frame.filename), getattr(frame.failed, "lineno", None))
            rows = (*rows, MemoryHolder(_ON_THEIR_WAY, TEMPORARY, self.name, gone, made))
        # Names in the frames of this error are no other holders that one could delete.
        names = {*self.namespace, *KeptOutputs(self.namespace).numbered()}
        rows = tuple(replace(r, aliases=tuple(a for a in r.aliases if a in names)) for r in rows)
        said = ["free", "allocated", "reserved", "others", *["total"] * (now.total is None)]
        then = {name: getattr(self.shortage, name) for name in said}
        known = {name: value for name, value in then.items() if value is not None}
        return replace(now, **known, holders=tuple(sorted(rows, key=lambda row: -row.nbytes)))

    # -- figures
    @cached_property
    def capacity(self) -> int:
        """Return the bytes that its framework has taken, plus the driver's free ones."""
        device = self.device
        most = (device.free or 0) + (device.reserved or 0)
        pools = (pool.limit for pool in device.pools if pool.framework == self.shortage.library)
        return min(limit for limit in (self.shortage.total, *pools, most) if limit is not None)

    @cached_property
    def short_by(self) -> int:
        """Return the bytes to free for the request to fit, if they are in one piece."""
        return self.wanted - (self.capacity - (self.device.allocated or 0))

    def worth(self, nbytes: int) -> bool:
        """Whether freeing or saving this many bytes is worth a line."""
        return nbytes >= max(min(self.short_by, _WORTH * self.capacity), 1)

    def held(self) -> int:
        """Return the bytes that remain when this error's frames are gone, with what nothing in
        Python holds: workspaces, and memory held by C++."""
        unreached = sum(row.nbytes for row in self.device.holders if row.kind == UNREACHED)
        return sum(each.nbytes for each in self.storages) - self.traceback_holds + unreached

    @cached_property
    def traceback_holds(self) -> int:
        """The bytes that only the frames of this error hold."""
        return self.alone(self._frames)

    @property
    def kept(self) -> int:
        """Return the bytes that `%gpufree` frees, except the ones held by this error."""
        kept = (each for each in self.storages if each.is_kept)
        return sum(each.nbytes for each in kept if not each.roots <= self._frames)

    def alone(self, names: Collection[str], *, in_frames: bool = False, graph_of: str = "") -> int:
        """Return the bytes that only these hold: variables, outputs, names in the error's frames.

        With `in_frames` what else these frames hold is still held, as it was at the moment. With
        `graph_of`, one of the names, only what graphs below it keep.
        """
        by = set(names)
        every = by if in_frames else by | self._frames
        found = [each for each in self.storages if by & each.roots and each.roots <= every]
        if graph_of:
            found = [each for each in found if graph_of in each.roots and GRAPH in each.path]
        return sum(each.nbytes for each in found)

    @cached_property
    def read(self) -> set[str]:
        """The variables that the rest of the code reads, through the notebook's functions too."""
        names = set[str]()
        for rest in self.rests:  # a function's own name is no variable of the notebook
            own = () if rest.frame.at_top else rest.frame.scope.local
            names.update(rest.read.difference(own))
        # A function that no variable names may be called by anyone: a hook, a method, a closure.
        known = self.namespace
        for each in of_kinds(gc.get_objects(), FunctionType):
            if each.__globals__ is known and known.get(each.__name__) is not each:
                names.update(globals_of(each.__code__))
        return {name for name, _ in variables_read(names, self.namespace)}

    def adds_to(self, rest: RestOfCode) -> str:
        """Return the row of the table that a loop adds to; empty if unknown.

        It was made by the lines of the loop or by what they call, or is a name that the loop binds
        or collects in.
        """
        loop, frame, cell = rest.loops[0], rest.frame, label(rest.frame.filename)
        read = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
        read |= self.read if frame.at_top else set()  # what a hook or a function collects in
        collect = {n for n in read if type(frame.scope.name(n)) in (list, dict, set)}
        by_name = {self.local(frame, name) for name in collect | stored(loop)}
        lines = range(loop.lineno, (loop.end_lineno or loop.lineno) + 1)
        nameless = (self._exception, self.handled, _ON_THEIR_WAY)
        for row in self.device.holders:
            made = row.made or Made("")
            inside = made.cell == cell and made.line in lines
            inside = inside or made.ran_in.partition(",")[0] == cell
            if row.path in by_name or (inside and row.path not in nameless):
                return row.path
        return ""

    def let_go(self) -> None:
        """Empty the frames of this error, in a copy of this process."""
        for each in self._chain:
            for frame, _ in walk_tb(each.__traceback__):
                with suppress(RuntimeError):  # it runs: nothing has failed in it
                    frame.clear()
                    frame.f_locals  # noqa: B018  before Python 3.13 what was read of it is kept


def device_now(name: str, storages: list[FoundStorage]) -> DeviceMemory:
    """Return a GPU's figures, with the memory of other libraries than torch."""
    now = next(d for d in holders_by_name.figures() if d.device == name)
    return holders_by_name.with_other_libraries(now, storages)
