"""Gather the facts of an out-of-memory error while its frames are alive, by dry runs too.

The frames of the error are reached only by their names, so what they alone hold is known: it is
freed with them. A dry run follows the innermost loop around the failing statement for a few passes,
or the whole cell or function. The notebook is not touched.
"""

import ast
import gc
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from traceback import walk_tb
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.follow_code import Subject, dry
from gpumagic.errors import GpuError
from gpumagic.fitting.fit_search import largest
from gpumagic.memory import ask
from gpumagic.memory.allocator import Allocator, Shortage
from gpumagic.memory.ask import figures, with_holders, with_other_libraries
from gpumagic.memory.autograd_graph import GRAPH
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.heap import Root
from gpumagic.memory.leftovers import of_kinds
from gpumagic.memory.made_in import MadeIn
from gpumagic.memory.memory_report import (
    EXCEPTION,
    TEMPORARY,
    UNREACHED,
    DeviceMemory,
    Made,
    MemoryHolder,
)
from gpumagic.memory.roots import KeptOutputs, tracebacks
from gpumagic.mismatch.syntax import RestOfCode, function_of, loops_around
from gpumagic.usercode.files import label, module_of
from gpumagic.usercode.frames import FailedFrame, errors
from gpumagic.usercode.program import awaits, compile_cell
from gpumagic.usercode.values import globals_of
from gpumagic.usercode.variables import variables_read

_EARLIER = "an earlier exception"
_ON_THEIR_WAY = "results on their way"
"""The row of what was allocated at the moment and is not now: no name had it yet."""


class Situation:
    """A failed allocation: the figures, the user's frames, and who holds what."""

    def __init__(
        self,
        shortage: Shortage,
        said: BaseException,
        error: BaseException,
        frames: list[FailedFrame],
        namespace: dict[str, Any],
        earlier: Iterable[BaseException],
        line: ProgressLine,
    ) -> None:
        self.shortage, self.error, self.frames = shortage, error, frames
        self.namespace = namespace
        self._allocator = Allocator()
        self.line = line
        self.tried_s = 0.0  # seconds that dry runs took until now
        self.name = f"cuda:{shortage.ordinal}"
        self.rests = [RestOfCode(frame) for frame in frames]
        self.outputs = [*KeptOutputs(namespace).numbered()]
        self._chain = list(errors(error))
        self._earlier = [e for e in earlier if all(e is not each for each in self._chain)]
        traces = list(tracebacks(error))
        handled = [*errors(said)][1:]
        passed = [each for each in self._chain if all(each is not other for other in handled)]
        now = {frame for each in passed for frame, _ in walk_tb(each.__traceback__)}
        then = [frame for each in handled for frame, _ in walk_tb(each.__traceback__)]
        self._handled = [frame for frame in then if frame not in now]
        # What the error leads to is looked at by the names of its frames, and by no other way.
        # What we look with may not be found to hold what we look at.
        self._ours = [self, vars(self), *frames, *(frame.scope for frame in frames)]
        self._closed = [*self._ours, *self._chain, *traces, *(t.tb_frame for t in traces)]
        self.beyond = [
            (module, trace.tb_frame)
            for trace in traces
            if (module := module_of(trace.tb_frame.f_code.co_filename)) and trace.tb_frame in now
        ]
        """torch's and libraries' frames that the error passed, with their modules."""

    @cached_property
    def storages(self) -> list[FoundStorage]:
        """All that is held now on the GPU, each storage with its paths."""
        more = [Root(_EARLIER, each, EXCEPTION) for each in self._earlier]
        roots = [*more, *self._locals()]
        found = find(self.namespace, roots, self._closed, self._allocator, paths=True)
        return [each for each in found if each.device == self.name]

    def _locals(self) -> Iterator[Root]:
        """The names in the frames that the error passed: the user's each, the others together."""
        for frame in self.frames:
            for name, value in frame.scope.local.items() if not frame.at_top else ():
                yield Root(self.local(frame, name), value, EXCEPTION)
        libraries = [dict(frame.f_locals) for _, frame in self.beyond]
        yield Root(self._exception, libraries, EXCEPTION)
        yield Root(self.handled, [dict(frame.f_locals) for frame in self._handled], EXCEPTION)

    def local(self, frame: FailedFrame, name: str) -> str:
        """A variable of a frame, as a holder is told: ``"x"`` at the top of a cell."""
        if frame.at_top:
            return name
        return f"{self._exception}: {frame.code.co_name}, {name}"

    @property
    def _exception(self) -> str:
        return f"the exception of {self.label}"

    @property
    def handled(self) -> str:
        """The row of what the frames of an error hold whose `except` block this error is from."""
        return f"the exception handled in {self.label}"

    @cached_property
    def holding(self) -> set[str]:
        """The names of all that holds something: variables, outputs, exceptions."""
        return {name for each in self.storages for name in each.roots}

    @cached_property
    def device(self) -> DeviceMemory:
        """The GPU's figures at the moment of the error, and who holds its memory now."""
        now = next(d for d in figures() if d.device == self.name)
        all_of_it = with_other_libraries(now, self.storages)
        held = with_holders(
            all_of_it,
            self.storages,
            MadeIn(self._allocator),
            ask.places(),
            self._allocator,
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
        # The frames of this error are told apart.
        names = {*self.namespace, *self.outputs}
        rows = (replace(r, aliases=tuple(a for a in r.aliases if a in names)) for r in held)
        known = {name: value for name, value in then.items() if value is not None}
        return replace(now, **known, pools=all_of_it.pools, holders=tuple(rows))

    @property
    def label(self) -> str:
        """The cell that failed: ``"In [5]"``."""
        return label(self.frames[-1].filename)

    @property
    def dtype(self) -> torch.dtype:
        """That of the tensors which the failing expression reads, else of those made by default."""
        frame = self.frames[0]
        nodes = ast.walk(frame.failed) if frame.failed is not None else ()
        read = (frame.scope.value(node) for node in nodes if isinstance(node, ast.expr))
        found = (value.dtype for value in read if issubclass(type(value), Tensor))
        return next(found, torch.get_default_dtype())

    @property
    def unreached(self) -> int:
        """What nothing in Python leads to: workspaces, and what C++ holds."""
        return sum(r.nbytes for r in self.device.holders if r.kind == UNREACHED)

    @property
    def wanted(self) -> int:
        return self.shortage.wanted or 0

    @cached_property
    def capacity(self) -> int:
        """What torch could have at most: what it has taken, and what the driver has left."""
        device = self.device
        most = (device.free or 0) + (device.reserved or 0)
        return min(most, self.shortage.total or most)

    @cached_property
    def short_by(self) -> int:
        """What would have to be freed for what was wanted to fit, if nothing is torn up."""
        left: int = self.capacity - (self.device.allocated or 0)
        return self.wanted - left

    @cached_property
    def read(self) -> set[str]:
        """The variables that the rest of the code reads, through the notebook's functions too."""
        names = {name for rest in self.rests for name in rest.read}
        # A function that no variable names may be called by anyone: a hook, a method, a closure.
        known = self.namespace
        for each in of_kinds(gc.get_objects(), FunctionType):
            if each.__globals__ is known and known.get(each.__name__) is not each:
                names.update(globals_of(each.__code__))
        return {name for name, _ in variables_read(names, self.namespace)}

    @property
    def traceback_holds(self) -> int:
        """The bytes that only the frames of this error hold."""
        return sum(each.nbytes for each in self.storages) - self.held()

    def let_go(self) -> None:
        """In a copy of this process: have the frames of this error hold nothing any more."""
        for each in self._chain:
            for frame, _ in walk_tb(each.__traceback__):
                with suppress(RuntimeError):  # it runs: nothing has failed in it
                    frame.clear()
                    frame.f_locals  # noqa: B018  before Python 3.13 what was read of it is kept

    def held(self) -> int:
        """The bytes that will be held when this error has let go."""
        return sum(each.nbytes for each in self.storages if not each.roots <= self._frames)

    @property
    def kept(self) -> int:
        """The bytes that `%gpufree` gives back, beside what this error holds."""
        kept = (each for each in self.storages if each.is_kept)
        return sum(each.nbytes for each in kept if not each.roots <= self._frames)

    def given(self, frame: FailedFrame, names: Iterable[str]) -> int:
        """The bytes that these names of a frame reach, and only frames of the error hold."""
        by = {self.local(frame, name) for name in names}
        reached = (each for each in self.storages if by & each.roots)
        return sum(each.nbytes for each in reached if each.roots <= self._frames)

    def alone(self, names: Collection[str], *, in_frames: bool = False) -> int:
        """The bytes that only these hold: variables, outputs, names in frames of this error.

        With `in_frames` what else these frames hold is still held, as it was at the moment.
        """
        by, also = set(names), set[str]() if in_frames else self._frames
        found = (each for each in self.storages if by & each.roots)
        return sum(each.nbytes for each in found if each.roots <= by | also)

    @cached_property
    def _graphs(self) -> dict[str, list[FoundStorage]]:
        """By holder what it reaches through graphs alone."""
        found: dict[str, list[FoundStorage]] = {}
        for each in self.storages:
            direct = {path.root for path in each.paths if GRAPH not in path.path}
            for name in each.roots - direct:
                found.setdefault(name, []).append(each)
        return found

    def graphs(self, name: str, *, in_frames: bool) -> tuple[set[str], int]:
        """The results below a holder that keep their graphs, and the bytes that only these hold."""
        found, also = self._graphs.get(name, []), set[str]() if in_frames else self._frames
        only = [each for each in found if each.roots <= {name} | also]
        paths = (path for each in only for path in each.paths if path.root == name)
        return {path.path.partition(GRAPH)[0] for path in paths}, sum(e.nbytes for e in only)

    @property
    def earlier_errors(self) -> set[str]:
        """The names by which exceptions of earlier cells hold something."""
        ways = (way for each in self.storages for way in each.ways)
        return {way.root for way in ways if way.kind == EXCEPTION} - self._frames

    @cached_property
    def _frames(self) -> set[str]:
        return {root.name for root in self._locals()}


# Of the processor's time, so that a busy machine gives the same advice: for one dry run, and for
# all of one error together. By the clock it may be so many times as long, and no longer.
LIMIT_S, _PATIENCE_S, _BUSY = 5.0, 15.0, 4
# Of storages, which a dry run has to make anew.
_MOST = 20_000
_MARGIN = 0.05
_ENDS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Break, ast.Continue, ast.Nonlocal, ast.Global)
_BEGIN = "begin_ongpu"

Within = Callable[[], AbstractContextManager[Any]]


class DryPeaks:
    """What the code of one frame needs of the GPU that was short of memory, in bytes."""

    def __init__(self, s: Situation, rest: RestOfCode) -> None:
        self._s, self.frame = s, rest.frame
        frame = self.frame
        self.loops = bool(rest.loops)
        self._in_for = any(not isinstance(loop, ast.While) for loop in rest.loops)
        self.code = _code(frame, rest.failed)
        self.names = {
            name: value
            for name, value in frame.scope.local.items()
            if frame.at_top or name not in rest.overwritten
        }

    @property
    def possible(self) -> bool:
        """Whether there is code that can be followed apart from what is around it."""
        return bool(self.code) and len(self._s.storages) <= _MOST

    def room(self, gives: int = 0) -> int:
        """What the code can have, where the error has let go of what it holds."""
        s = self._s
        taken = s.held() + s.unreached
        if not self.frame.at_top:  # what the function was given, and nothing else has
            taken += s.given(self.frame, self.names)
        return s.capacity - taken + gives

    def room_to_spare(self) -> int:
        """The same with a margin: on a real GPU workspaces and what is torn up take some more."""
        return self.room() if self._s.device.virtual else int(self.room() * (1 - _MARGIN))

    def grows(self) -> int | None:
        """What a pass of the loop keeps for good; None where it cannot be followed."""
        if not self._in_for:
            return 0  # all of it is followed
        two, three = self.needed(), self.needed(passes=3)
        return None if two is None or three is None else max(three - two, 0)

    def needed(
        self,
        changed: Mapping[str, Any] | None = None,
        *,
        gone: tuple[str, ...] = (),
        within: Within = nullcontext,
        passes: int = 2,
    ) -> int | None:
        """With some names changed or gone, in a context; None where it cannot be followed."""
        if self._s.tried_s > _PATIENCE_S:
            return None
        space = {**self.frame.scope.outer, **self.names, **(changed or {})}
        for name in gone:
            space.pop(name, None)
        code = self.code * (passes if self._in_for else 1)
        codes = compile_cell(ast.Module(code, []), self.frame.filename)

        def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
            def follow() -> dict[str, Any]:
                into = self._own_namespace(space)
                signal.signal(signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGALRM))
                signal.setitimer(signal.ITIMER_PROF, LIMIT_S, 0.2)
                with within():
                    for code in filter(None, codes):
                        eval(code, into)
                return {}

            return follow

        start, used = time.monotonic(), _used_by_children()
        try:
            self._s.line.update("looking for what would help; Ctrl-C ends it")
            subject = Subject(space, [], prepare, None, False, _BUSY * LIMIT_S)
            result = dry(subject)
        except (GpuError, KeyboardInterrupt):  # no fork here; or whoever waits has seen enough
            return None
        finally:
            elapsed = time.monotonic() - start
            self._s.tried_s += max(_used_by_children() - used, elapsed / _BUSY)
        return result.needed(self._s.name)

    def _own_namespace(self, space: dict[str, Any]) -> dict[str, Any]:
        """In the dry run's process: the notebook's own with what is in `space`, if the code is a
        cell's, so that nothing else holds what the code assigns anew."""
        if not self.frame.at_top:
            return space
        namespace = self._s.namespace
        for name in namespace.keys() - space.keys():
            del namespace[name]
        namespace.update(space)
        space.clear()
        self.names.clear()
        self._s.let_go()
        return namespace


def _used_by_children() -> float:
    """Seconds of the processor's time that processes which this one has started took, and ended."""
    times = os.times()
    return times.children_user + times.children_system


def largest_that_fits(
    values: Sequence[float], needed: Callable[[int], int | None], known: int, room: int
) -> tuple[int, int] | None:
    """The largest of ascending values that fits, and what it needs; of the last one it is known."""
    found: dict[float, float] = {values[-1]: known}

    def need(value: float) -> float:
        if value not in found:
            needs = needed(int(value))
            found[value] = math.inf if needs is None else needs
        return found[value]

    fits = largest(values, need, room)
    return None if fits is None else (int(fits), int(need(fits)))


def _code(frame: FailedFrame, failed: ast.stmt | None) -> list[ast.stmt]:
    """The statements to follow; none where they do not stand by themselves."""
    if failed is None:
        return []
    loops = [loop for loop in loops_around(failed) if not isinstance(loop, ast.While)]
    if loops:
        body = [*loops[0].body]  # type: ignore[attr-defined]
    else:
        whole = frame.tree if frame.at_top else function_of(failed)
        body = [*getattr(whole, "body", [])]
        if not frame.at_top and body and isinstance(body[-1], ast.Return):
            value = body[-1].value
            body[-1:] = [ast.copy_location(ast.Expr(value), body[-1])] if value else []
    body = [stmt for stmt in body if _BEGIN not in ast.unparse(stmt)]
    nodes = [node for stmt in body for node in ast.walk(stmt)]
    stands = not any(isinstance(node, _ENDS) for node in nodes if not _in_function(node, body))
    asks = any(getattr(node, "id", "") == "get_ipython" for node in nodes)
    return body if stands and not asks and not awaits(ast.Module(body, [])) else []


def _in_function(node: ast.AST, body: list[ast.stmt]) -> bool:
    inside = function_of(node)
    return any(inside is each for stmt in body for each in ast.walk(stmt))
