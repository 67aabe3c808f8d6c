"""Describe a GPU's memory after an out-of-memory error, while the error's frames are still alive.

JAX, TensorFlow and CuPy report only the requested bytes and sometimes the GPU. Memory that only the
error's frames hold counts as free. No user code runs. A frame's `rest` is its code yet to run.
"""

import ast
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from traceback import walk_tb
from types import FrameType
from typing import Any

from gpumagic.device.cards import bytes_in
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import library_of
from gpumagic.frameworks.known import imported
from gpumagic.frameworks.public import where
from gpumagic.memory import holders_by_name
from gpumagic.memory.holders_by_name import FoundStorage, find
from gpumagic.memory.memory_report import (
    EXCEPTION,
    KEPT,
    TEMPORARY,
    UNREACHED,
    DeviceMemory,
    Made,
    MemoryHolder,
)
from gpumagic.memory.object_graph import GRAPH, Root
from gpumagic.memory.roots import KeptOutputs
from gpumagic.usercode.files import label, module_of
from gpumagic.usercode.frames import (
    FailedFrame,
    RestOfCode,
    errors,
    failed_frames,
    function_of,
    stored,
    tracebacks,
)
from gpumagic.usercode.values import is_module, is_tensor, own, torch_here
from gpumagic.usercode.variables import variables_read

TORCH = "torch"
ROUNDED = 0.01  # relative rounding error of the figures in a message, which have two decimals


@dataclass(frozen=True)
class Shortage:
    """Record the figures of a failed allocation. Sizes are in bytes, and None if unknown."""

    ordinal: int  # the GPU's number
    wanted: int | None = None  # size of the request
    total: int | None = None  # size of the GPU's memory, or torch's limit if one is set
    free: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    others: int | None = None  # used by other processes
    library: str = TORCH


_TORCHS = re.compile(
    r"(?:CUDA|HIP) out of memory"
    r"|(?:CUDA|HIP)(?: driver| runtime)? error(?: \(2\)\s*)?:? *out of memory"
    r"|CUDA ran out of memory"
    r"|(?:CUDNN|CUBLAS|CUSOLVER|HIPBLAS|CUFFT)\w*_ALLOC_FAILED"
    r"|CUBLAS_STATUS_NOT_INITIALIZED.*cublasCreate"  # no memory for a workspace
)
_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_FIGURES = (
    rf"(?:Tried to allocate|Requested size:?) {_SIZE}",
    rf"total capac?i?ty of {_SIZE}",
    rf"of which {_SIZE} is free",
    rf"allocated memory {_SIZE} is allocated",
    rf"{_SIZE} is reserved by PyTorch but unallocated",
    rf"{_SIZE} allowed",
)
_PROCESS = rf"Process \d+ has {_SIZE} memory in use"
_ARRAYS = re.compile(
    r"RESOURCE_EXHAUSTED|Resource exhausted|CUDA_ERROR_OUT_OF_MEMORY"
    r"|OOM when allocating|[Ff]ailed to allocate memory|Out of memory allocating"
)
_ASKED = r"alloc(?:ate|ating|ate request for) ([\d.,]+ ?(?:bytes|B|[KMGT]iB))"
_ORDINAL = re.compile(r"(?:device ordinal |GPU[:_])(\d+)")


def read(error: BaseException) -> tuple[BaseException, Shortage] | None:
    """Find the out-of-memory error in an error's chain. Return it and its figures, or None."""
    names = {framework.name for framework in imported()}
    for each in errors(error):
        text, library, torch = str(each), library_of(each), torch_here()
        if torch is not None and isinstance(each, RuntimeError) and _TORCHS.search(text):
            found = _of_torch(text, torch) if torch.cuda.is_initialized() else None
            return (each, found) if found and found.ordinal < torch.cuda.device_count() else None
        if library in names and _ARRAYS.search(text):
            frames = failed_frames(each.__traceback__)
            kind, _, ordinal = _device(text, library, frames).partition(":")
            asked = Shortage(int(ordinal or 0), _size(_ASKED, text), library=library)
            return (each, asked) if kind == "cuda" else None
    return None


def _of_torch(text: str, torch: Any) -> Shortage:
    gpu = re.search(r"GPU (\d+)", text)
    wanted, total, free, allocated, unused, allowed = (_size(each, text) for each in _FIGURES)
    others = [bytes_in(found) or 0 for found in re.findall(_PROCESS, text)]
    return Shortage(
        ordinal=int(gpu[1]) if gpu else torch.cuda.current_device(),
        wanted=wanted,
        total=allowed or total,
        free=free,
        allocated=allocated,
        reserved=None if allocated is None or unused is None else allocated + unused,
        others=sum(others) if others else None,
    )


def _size(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return None if found is None else bytes_in(found[1].replace(",", ""))


def _device(text: str, library: str, frames: list[FailedFrame]) -> str:
    if (gpu := _ORDINAL.search(text)) is not None:
        return f"cuda:{gpu[1]}"
    failed = frames[0].failed if frames else None
    for node in ast.walk(failed) if failed is not None else ():
        with suppress(GpuError):
            if isinstance(node, ast.Name) and (on := where(frames[0].scope.value(node))) != "cpu":
                return on.partition(" ")[0]
    jax: Any = next((each for each in imported() if each.name == library == "JAX"), None)
    return "cuda:0" if jax is None else str(jax.default())


_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"
_DRIVER = "driver"
_NO_LIMIT = {
    _DRIVER: "raise that limit (CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, or ask who set it)",
    TORCH: "`torch.cuda.set_per_process_memory_fraction(1.0)`",
    "JAX": "`%env XLA_PYTHON_CLIENT_MEM_FRACTION=0.95` before JAX starts, in a new kernel",
}
_NO_POOL = {
    "JAX": "`%env XLA_PYTHON_CLIENT_PREALLOCATE=false` before JAX starts, in a new kernel",
    "TensorFlow": "`%env TF_FORCE_GPU_ALLOW_GROWTH=true` before TensorFlow starts, in a new kernel",
    "CuPy": "`cupy.get_default_memory_pool().free_all_blocks()`",
}
_TEMPORARIES = "unnamed results"  # the row for memory that has been freed since the error
_WORTH = 0.05  # smaller savings, relative to the capacity, are not shown


class OutOfMemoryState:
    """Describe a failed allocation by its figures, the user's frames, and the holders of memory."""

    def __init__(
        self,
        shortage: Shortage,
        said: BaseException,  # the out-of-memory error
        error: BaseException,  # the error that reached the user; `said` may be its cause
        frames: list[FailedFrame],
        namespace: dict[str, Any],
        earlier: Iterable[BaseException],  # earlier exceptions that still held memory
    ) -> None:
        self.shortage, self.frames, self.namespace = shortage, frames, namespace
        self.name = f"cuda:{shortage.ordinal}"
        self.wanted = shortage.wanted or 0
        self.rests = [RestOfCode(frame) for frame in frames]
        self._allocator = holders_by_name.allocations()
        self._chain = list(errors(error))
        self._earlier = _without(earlier, self._chain)
        cell = label(frames[-1].filename)
        self._exception = f"the exception of {cell}"
        self.handled = f"the exception handled in {cell}"
        handled = [*errors(said)][1:]  # errors that were being handled when `said` was raised
        now = _frames_of(_without(self._chain, handled))
        # Skip IPython's frames outside the cell, which refer to the errors of earlier cells.
        ran = (n for n, each in enumerate(now) if each.f_code is frames[-1].code)
        now = now[next(ran, 0) :]
        self.library_frames = [frame for frame in now if module_of(frame.f_code.co_filename)]
        self._handled = [frame for frame in _frames_of(handled) if frame not in now]
        # gpumagic's own objects must not appear as holders.
        ours = [self, vars(self), *frames, *(frame.scope for frame in frames)]
        self._closed = [*ours, *self._chain, *tracebacks(error), *_frames_of(self._chain)]

    @cached_property
    def storages(self) -> list[FoundStorage]:
        """List every storage that is still on the GPU, with the storage's path."""
        earlier = [Root("an earlier exception", each, EXCEPTION) for each in self._earlier]
        roots, closed, allocator = [*earlier, *self._locals()], self._closed, self._allocator
        found = find(self.namespace, after=roots, closed=closed, allocator=allocator, paths=True)
        return [each for each in found if each.device == self.name]

    def _locals(self) -> Iterator[Root]:
        """Yield roots for variables in frames of user functions, libraries and handled errors."""
        for frame in reversed(self.frames):
            for name, value in frame.scope.local.items() if not frame.at_top else ():
                yield Root(self.local(frame, name), value, EXCEPTION)
        for path, frames in ((self._exception, self.library_frames), (self.handled, self._handled)):
            yield Root(path, [dict(frame.f_locals) for frame in frames], EXCEPTION)

    def local(self, frame: FailedFrame, name: str) -> str:
        """Return a variable's name in the table: ``"x"``, or ``"x in f()"`` if local to `f`."""
        return name if frame.at_top else f"{name} in {frame.code.co_name}()"

    @cached_property
    def _frames(self) -> set[str]:
        return {root.name for root in self._locals()}

    @cached_property
    def device(self) -> DeviceMemory:
        """The GPU's figures at the moment of the error, and the current holders of its memory."""
        now = next(each for each in holders_by_name.figures() if each.device == self.name)
        now = holders_by_name.with_holders(now, self.storages, self._allocator)
        rows = now.holders
        gone = (self.shortage.allocated or 0) - (now.allocated or 0)
        if gone > ROUNDED * (self.shortage.allocated or 0):
            frame = self.frames[0]
            made = Made(label(frame.filename), getattr(frame.failed, "lineno", None))
            rows = (*rows, MemoryHolder(_TEMPORARIES, TEMPORARY, self.name, gone, made))
        # Leave out aliases in the error's frames, because the user cannot delete these names.
        names = {*self.namespace, *KeptOutputs(self.namespace).numbered()}
        rows = tuple(replace(r, aliases=tuple(a for a in r.aliases if a in names)) for r in rows)
        said = ["free", "allocated", "reserved", "others", *["total"] * (now.total is None)]
        then = {name: getattr(self.shortage, name) for name in said}
        known = {name: value for name, value in then.items() if value is not None}
        return replace(now, **known, holders=tuple(sorted(rows, key=lambda row: -row.nbytes)))

    @property
    def operands(self) -> list[Any]:
        """Return the tensors that the failed statement and the libraries' frames name."""
        nodes = ast.walk(self.rests[0].failed or ast.Pass())
        names = sorted({node.id for node in nodes if isinstance(node, ast.Name)})
        found = [self.frames[0].scope.name(name) for name in names]
        found += [value for frame in self.library_frames for value in frame.f_locals.values()]
        tensors = [*{id(value): value for value in found if is_tensor(value)}.values()]
        if any(map(is_module, found)):  # a model's result may have no name: assume it is [N, 1]
            empty = torch_here().empty
            tensors += [empty(len(v), 1, device="meta") for v in tensors if v.dim() == 1]
        return tensors

    @property
    def optimizer(self) -> Any:
        """Return the optimizer whose first step failed while creating its state, or None."""
        begun = (f for f in self.library_frames if f.f_code.co_name == "_init_group")
        return next((frame.f_locals.get("self") for frame in begun), None)

    @cached_property
    def most(self) -> int:
        """Return the bytes reserved on the GPU, plus the bytes that the driver reports as free."""
        return (self.device.free or 0) + (self.device.reserved or 0)

    @cached_property
    def limit(self) -> int | None:
        """Return the bytes that the error's framework may take in this process; None if unknown."""
        library, pools = self.shortage.library, self.device.pools
        own = (pool.limit for pool in pools if pool.framework == library)
        return self.shortage.total if library == TORCH else next(own, None)

    @property
    def capacity(self) -> int:
        """Return the bytes that the error's framework may use, including those already in use."""
        return self.most if self.limit is None else min(self.most, self.limit)

    @cached_property
    def short_by(self) -> int:
        """Return how many bytes must be freed for the request, without regard to fragmentation."""
        return self.wanted - (self.capacity - (self.device.allocated or 0))

    def unavailable(self) -> Iterator[tuple[int, str, str]]:
        """Yield each part of memory that the request cannot use, as bytes, reason and advice."""
        yield from self._limited()
        yield from self._fragmented()
        device, library = self.device, self.shortage.library
        for pool in device.pools:
            if pool.framework != library and pool.taken is not None:
                has = f"{size(pool.taken)} of {self.name}, of which it uses {size(pool.used)}"
                why = f"{pool.framework} in this process has taken {has}"
                yield pool.taken - (pool.used or 0), why, _NO_POOL[pool.framework]
        if device.others is not None and device.others >= (device.allocated or 0):
            why = f"other processes hold {size(device.others)} of {self.name}"
            names = some(name for name, _ in device.others_by_name)
            yield device.others, f"{why}: {names}" if names else why, ""

    def _fragmented(self) -> Iterator[tuple[int, str, str]]:
        device, library = self.device, self.shortage.library
        # If the rounded figures show enough unallocated memory, its pieces must be too small.
        if library == TORCH and self.wanted and self.short_by <= -ROUNDED * self.capacity:
            unused = (device.reserved or 0) - (device.allocated or 0)
            pieces = f"in pieces too small for {size(self.wanted)} at once"
            joined = any(_EXPANDABLE in os.environ.get(name, "") for name in _CONF)
            do = f'`os.environ["{_CONF[0]}"] = "{_EXPANDABLE}"` before torch is imported joins them'
            why = f"{size(unused)} are reserved by torch but unallocated, {pieces}"
            yield unused, why, "" if joined else do

    def _limited(self) -> Iterator[tuple[int, str, str]]:
        if self.limit is None:
            return
        who, total = self.shortage.library, self.device.total or 0
        if who == TORCH:  # a driver that sets a limit reports the limit as total memory
            of_driver = torch_here().cuda.mem_get_info(self.shortage.ordinal)[1]
            who = TORCH if of_driver > (1 + ROUNDED) * self.limit else _DRIVER
        why = f"{who} may take {size(self.limit)} of the {size(total)} that {self.name} has"
        beyond, least = self.most - self.limit, ROUNDED
        if who == _DRIVER:  # `most` never exceeds a driver's limit, so compare with `total`
            beyond, least = total - self.limit, 0.1  # above the 3 % that a T4's driver takes
            why = why.replace(f"{who} may take", "this process may have")
            why = f"{why}, by a limit of MPS, of its container or of the vGPU"
        if beyond > least * self.limit:
            yield beyond, why, _NO_LIMIT.get(who, "")

    def worth(self, nbytes: int) -> bool:
        """Whether freeing or saving this many bytes is worth showing."""
        return nbytes >= max(min(self.short_by, _WORTH * self.capacity), 1)

    @property
    def held(self) -> int:
        """Return the bytes that stay allocated after the error's frames are released."""
        unreached = sum(row.nbytes for row in self.device.holders if row.kind == UNREACHED)
        whole = sum(each.nbytes for each in self.storages) + unreached
        return whole - self.traceback_holds - self.incomplete

    @cached_property
    def incomplete(self) -> int:
        """Return the bytes of incomplete optimizer state, which must be cleared before a rerun."""
        state = self._optimizer_state if self.optimizer_name else []
        tensors = (each for entry in state for each in entry.values() if is_tensor(each))
        return sum(each.nbytes for each in tensors if str(each.device) == self.name)

    @property
    def _optimizer_state(self) -> list[dict[Any, Any]]:
        held = own(self.optimizer).get("state", {}).values()
        return [entry for entry in held if type(entry) is dict]

    @cached_property
    def optimizer_name(self) -> str:
        """Return the notebook's name of `optimizer`; "" if it has made a step, or has no name."""
        steps = any(float(entry.get("step", 0)) > 0 for entry in self._optimizer_state)
        names = (n for n in sorted(self.read) if self.namespace.get(n) is self.optimizer)
        return "" if self.optimizer is None or steps else next(names, "")

    @cached_property
    def traceback_holds(self) -> int:
        """Return the bytes that only the frames of this error hold."""
        return self.alone(self._frames)

    @property
    def kept(self) -> int:
        """Return the bytes that `%gpufree` frees, except those held only by the error's frames."""
        kept = (each for each in self.storages if all(way.kind in KEPT for way in each.ways))
        return sum(each.nbytes for each in kept if not each.roots <= self._frames)

    @property
    def kept_roots(self) -> set[str]:
        """Return the names of outputs and earlier errors, which `%gpufree` releases."""
        roots = (way.root for each in self.storages for way in each.ways if way.kind in KEPT)
        return {*roots} - self._frames

    def alone(self, names: Collection[str], *, in_frames: bool = False, graph_of: str = "") -> int:
        """Return the bytes that only `names` and this error's frames hold; if `in_frames`, only
        `names` and library frames. If `graph_of` is a holder, count only this holder's graphs."""
        by = set(names)
        every = by | ({self._exception} if in_frames else self._frames)
        found = [each for each in self.storages if by & each.roots and each.roots <= every]
        if graph_of:
            found = [each for each in found if graph_of in each.roots and GRAPH in each.path]
        return sum(each.nbytes for each in found)

    @cached_property
    def read(self) -> set[str]:
        """Return the variables that the remaining code reads, also in functions that it calls."""
        names = set[str]()
        for rest in self.rests:  # a function's local variables are not the notebook's
            own = () if rest.frame.at_top else rest.frame.scope.local
            names.update(rest.read.difference(own))
        return {name for name, _ in variables_read(names, self.namespace)}

    def adds_to(self, rest: RestOfCode) -> list[str]:
        """Return the paths of the holders to which a loop may add memory, the likeliest first."""
        made = self._growing(rest)
        by_name = {self.local(rest.frame, name) for name in made | stored(rest.loops[0])}
        nameless = self._exception, self.handled, _TEMPORARIES
        named = [row for row in self.device.holders if row.path not in nameless]
        # Prefer containers, which keep the values of all passes. Other variables keep one value.
        keeps = {self.local(rest.frame, name) for name in made | rest.accumulated}
        named.sort(key=lambda row: not (row.path in keeps and self._ran_in(rest, row.made)))
        return [row.path for row in named if row.path in by_name or self._ran_in(rest, row.made)]

    def _growing(self, rest: RestOfCode) -> set[str]:
        """Return the names of variables that may be larger after each pass of a loop."""
        read = {node.id for node in ast.walk(rest.loops[0]) if isinstance(node, ast.Name)}
        read |= self.read if rest.frame.at_top else set()
        steady = torch_here().nn.Module, torch_here().optim.Optimizer
        values = {name: rest.frame.scope.name(name) for name in read}
        # A tensor that is only read keeps its size, unless operations in place extend its graph.
        grows = {n for n in read if not is_tensor(values[n]) or values[n].grad_fn is not None}
        made = {n for n in grows | rest.accumulated if not issubclass(type(values.get(n)), steady)}
        return made - (stored(rest.loops[0]) - rest.accumulated)

    def _ran_in(self, rest: RestOfCode, made: Made | None) -> bool:
        """Whether the allocating line `made` is in a loop or in code that the loop calls."""
        if made is None:
            return False
        line, called = made.line or 0, self.frames[: self.frames.index(rest.frame)]
        functions = ((frame, function_of(frame.failed or ast.Pass())) for frame in called)
        inside = (
            made.cell == label(frame.filename) and at.lineno <= line <= (at.end_lineno or 0)
            for frame, at in [(rest.frame, rest.loops[0]), *functions]
            if isinstance(at, (ast.stmt, ast.Lambda))
        )
        cells = {label(frame.filename) for frame in self.frames}
        return any(inside) or made.ran_in.partition(",")[0] in cells

    def let_go(self) -> None:
        """Clear the error's frames and incomplete optimizer state. Call this only in a fork."""
        if self.optimizer is not None:  # with incomplete state, the next step would fail
            self.optimizer.state.clear()
        for frame in _frames_of(self._chain):
            with suppress(RuntimeError):  # the frame still runs
                frame.clear()
                frame.f_locals  # noqa: B018  before Python 3.13, reading this frees old locals


def _without(errors: Iterable[BaseException], others: list[BaseException]) -> list[BaseException]:
    return [each for each in errors if all(each is not other for other in others)]


def _frames_of(raised: Iterable[BaseException]) -> list[FrameType]:
    return [frame for each in raised for frame, _ in walk_tb(each.__traceback__)]
