"""Gather the facts of an out-of-memory error while its frames are alive: figures and holders.

The frames of the error are reached only by their names, so what they alone hold is known: it is
freed with them. No code of the user's runs.
"""

import ast
import gc
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from traceback import walk_tb
from types import FunctionType
from typing import Any

from gpumagic.memory import holders_by_name
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.memory_report import (
    EXCEPTION,
    TEMPORARY,
    UNREACHED,
    DeviceMemory,
    Made,
    MemoryHolder,
)
from gpumagic.memory.object_graph import Root, of_kinds
from gpumagic.memory.references import GRAPH
from gpumagic.memory.roots import KeptOutputs, tracebacks
from gpumagic.memory.shortage import Shortage
from gpumagic.usercode.files import label, module_of
from gpumagic.usercode.frames import FailedFrame, errors
from gpumagic.usercode.syntax import RestOfCode, stored
from gpumagic.usercode.values import globals_of
from gpumagic.usercode.variables import variables_read

_EARLIER = "an earlier exception"
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
        self._allocator, self._made_in = holders_by_name.allocations()
        self._chain = list(errors(error))
        self._earlier = [e for e in earlier if all(e is not each for each in self._chain)]
        traces = list(tracebacks(error))
        handled = [*errors(said)][1:]
        passed = [each for each in self._chain if all(each is not other for other in handled)]
        now = {frame for each in passed for frame, _ in walk_tb(each.__traceback__)}
        then = [frame for each in handled for frame, _ in walk_tb(each.__traceback__)]
        self._handled = [frame for frame in then if frame not in now]
        # Our own objects may not be found as holders.
        ours = [self, vars(self), *frames, *(frame.scope for frame in frames)]
        self._closed = [*ours, *self._chain, *traces, *(t.tb_frame for t in traces)]
        self.beyond = [
            (module, trace.tb_frame)
            for trace in traces
            if (module := module_of(trace.tb_frame.f_code.co_filename)) and trace.tb_frame in now
        ]
        """torch's and libraries' frames that the error passed, with their modules."""

    # -- holders
    @cached_property
    def storages(self) -> list[FoundStorage]:
        """List every storage held now on the GPU, with its paths."""
        more = [Root(_EARLIER, each, EXCEPTION) for each in self._earlier]
        roots = [*more, *self._locals()]
        found = find(
            self.namespace,
            after=roots,
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
        libraries = [dict(frame.f_locals) for _, frame in self.beyond]
        yield Root(self._exception, libraries, EXCEPTION)
        yield Root(self.handled, [dict(frame.f_locals) for frame in self._handled], EXCEPTION)

    def local(self, frame: FailedFrame, name: str) -> str:
        """Return a frame's variable as the table names it: ``"x"`` at the top of a cell."""
        if frame.at_top:
            return name
        return f"{self._exception}: {frame.code.co_name}, {name}"

    @property
    def _exception(self) -> str:
        return f"the exception of {label(self.frames[-1].filename)}"

    @property
    def handled(self) -> str:
        """The row of the frames of an error whose `except` block this error is from."""
        return f"the exception handled in {label(self.frames[-1].filename)}"

    @cached_property
    def _frames(self) -> set[str]:
        return {root.name for root in self._locals()}

    @cached_property
    def device(self) -> DeviceMemory:
        """The GPU's figures at the moment of the error, and who holds its memory now."""
        now = device_now(self.name, self.storages)
        held = holders_by_name.with_holders(
            now, self.storages, self._made_in, holders_by_name.places(), self._allocator
        ).holders
        said = ("free", "allocated", "reserved", "others")
        then = {name: getattr(self.shortage, name) for name in said}
        if now.total is None:
            then["total"] = self.shortage.total
        gone = (self.shortage.allocated or 0) - (now.allocated or 0)
        if self.shortage.exact and gone > 0:
            frame = self.frames[0]
            made = Made(label(frame.filename), getattr(frame.failed, "lineno", None))
            held = (*held, MemoryHolder(_ON_THEIR_WAY, TEMPORARY, self.name, gone, made))
            held = tuple(sorted(held, key=lambda row: -row.nbytes))
        # Names in the frames of this error are no other holders that one could delete.
        names = {*self.namespace, *(name for name in KeptOutputs(self.namespace).numbered())}
        rows = (replace(r, aliases=tuple(a for a in r.aliases if a in names)) for r in held)
        known = {name: value for name, value in then.items() if value is not None}
        return replace(now, **known, holders=tuple(rows))

    # -- figures
    @cached_property
    def capacity(self) -> int:
        """Return the bytes that its framework has taken, plus the driver's free ones."""
        device = self.device
        most = (device.free or 0) + (device.reserved or 0)
        pools = (pool.limit for pool in device.pools if pool.framework == self.shortage.library)
        limits = [self.shortage.total, *pools, most]
        return min(limit for limit in limits if limit is not None)

    @cached_property
    def short_by(self) -> int:
        """Return the bytes to free for the request to fit, if they are in one piece."""
        left: int = self.capacity - (self.device.allocated or 0)
        return self.wanted - left

    def worth(self, nbytes: int) -> bool:
        """Whether freeing or saving this many bytes is worth a line."""
        return nbytes >= max(min(self.short_by, _WORTH * self.capacity), 1)

    @property
    def unreached(self) -> int:
        """Return the bytes that nothing in Python holds: workspaces, and memory held by C++."""
        return sum(r.nbytes for r in self.device.holders if r.kind == UNREACHED)

    def held(self) -> int:
        """Return the bytes that remain held once this error's frames are released."""
        return sum(each.nbytes for each in self.storages if not each.roots <= self._frames)

    @property
    def traceback_holds(self) -> int:
        """The bytes that only the frames of this error hold."""
        return sum(each.nbytes for each in self.storages) - self.held()

    @property
    def kept(self) -> int:
        """Return the bytes that `%gpufree` frees, except the ones held by this error."""
        kept = (each for each in self.storages if each.is_kept)
        return sum(each.nbytes for each in kept if not each.roots <= self._frames)

    def given(self, frame: FailedFrame, names: Iterable[str]) -> int:
        """Return the bytes that a frame's names reach, and that only the error's frames hold."""
        by = {self.local(frame, name) for name in names}
        reached = (each for each in self.storages if by & each.roots)
        return sum(each.nbytes for each in reached if each.roots <= self._frames)

    def alone(self, names: Collection[str], *, in_frames: bool = False) -> int:
        """Return the bytes that only these hold: variables, outputs, names in the error's frames.

        With `in_frames` what else these frames hold is still held, as it was at the moment.
        """
        by, also = set(names), set[str]() if in_frames else self._frames
        found = (each for each in self.storages if by & each.roots)
        return sum(each.nbytes for each in found if each.roots <= by | also)

    def in_graphs(self, name: str, made: set[str], *, in_frames: bool) -> int:
        """Return the bytes that the graphs below a holder keep, and otherwise only names `made`."""
        also = {name} | made | (set[str]() if in_frames else self._frames)
        found = (each for each in self.storages if name in each.roots and GRAPH in each.path)
        return sum(each.nbytes for each in found if each.roots <= also)

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
        loop, frame = rest.loops[0], rest.frame
        cell = label(frame.filename)
        read = {node.id for node in ast.walk(loop) if isinstance(node, ast.Name)}
        read |= self.read if frame.at_top else set()  # what a hook or a function collects in
        collect = {n for n in read if type(frame.scope.name(n)) in (list, dict, set)}
        collect |= stored(loop)
        by_name = {self.local(frame, name) for name in collect}
        for row in self.device.holders:
            made = row.made or Made("")
            line = made.line if made.cell == cell else None
            inside = line is not None and loop.lineno <= line <= (loop.end_lineno or line)
            inside = inside or made.ran_in.partition(",")[0] == cell
            named = row.path not in (self._exception, self.handled, _ON_THEIR_WAY)
            if (inside and named) or row.path in by_name:
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
