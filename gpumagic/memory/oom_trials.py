"""Try the code again by dry runs, from the state after an out-of-memory error.

A dry run follows the innermost loop around the failing statement for two passes, or the whole cell
or function. The notebook is not touched.
"""

import ast
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.follow_code import Subject, dry
from gpumagic.errors import GpuError
from gpumagic.memory.oom_state import OutOfMemoryState
from gpumagic.usercode.frames import (
    FailedFrame,
    RestOfCode,
    bound,
    function_of,
    in_own_scope,
    loops_around,
    parents,
)
from gpumagic.usercode.program import awaits, compile_cell
from gpumagic.usercode.variables import names_read

# Of the processor's time, so that a busy machine gives the same advice: for one dry run, and for
# all of one error together. By the clock it may be so many times as long, and no longer.
_LIMIT_S, _PATIENCE_S, _BUSY = 5.0, 15.0, 4
# The number of storages, each of which a dry run has to recreate.
_MOST = 20_000
_MARGIN = 0.05
# The part of its need that a pass keeps for good; less is only a number, such as its loss.
_GROWS = 0.01
_ENDS = (ast.Return, ast.Yield, ast.YieldFrom, ast.Break, ast.Continue, ast.Nonlocal, ast.Global)

Note = Callable[[str], object]
Within = Callable[[Note], AbstractContextManager[Any]]
"""Makes a context for the code of a dry run, given what notes a phrase about it."""


class Need(NamedTuple):
    """Record what a dry run needed, in bytes, what each pass keeps, and what it noted."""

    most: int
    grows: int | None = 0  # None if unknown
    notes: tuple[str, ...] = ()


class Trials:
    """Make the dry runs for one error: of the whole cell, and of each frame that allows it."""

    def __init__(self, state: OutOfMemoryState, line: ProgressLine) -> None:
        self.state, self._line = state, line
        self._tried_s = 0.0
        # What a module's `forward` keeps, its backward pass frees.
        inside = [n for n, rest in enumerate(state.rests) if rest.frame.code.co_name == "forward"]
        within = max(inside, default=-1)
        self.every = [CodeTrial(self, rest, n > within) for n, rest in enumerate(state.rests)]
        """A trial for each frame, the innermost first."""

    @cached_property
    def whole(self) -> "CodeTrial | None":
        """The outermost trial that runs out of memory as the cell did; None if none does."""
        return next((trial for trial in reversed(self.every) if trial.is_short), None)

    @cached_property
    def loop(self) -> "CodeTrial | None":
        """The innermost loop that keeps more with each pass; None if none does."""
        return next((trial for trial in self.every if trial.grows_much), None)

    def settled(self, trial: "CodeTrial", grows: int | None) -> bool:
        """Whether no loop around keeps more with each pass, if the one of `trial` keeps `grows`."""
        outer = self.every[self.every.index(trial) + 1 :]
        return trial.keeps_nothing(grows) and all(each.keeps_nothing() for each in outer)

    def contexts_of(self, trial: "CodeTrial") -> Iterator[Any]:
        """Make torch's contexts that were entered before a trial's code, the outermost first."""
        at = self.every.index(trial)
        for each in reversed(self.every[at + 1 :]):
            yield from _contexts(each.rest.failed, each.frame)
        yield from _contexts(trial.start, trial.frame)

    def follow(self, subject: Subject, device: str) -> Need | None:
        """Return what a subject's code needs on top of what is held; None if unknown."""
        if self._tried_s > _PATIENCE_S:
            return None
        start, used = time.monotonic(), _used_by_children()
        try:
            self._line.update("looking for what would help; Ctrl-C ends it")
            result = dry(subject)
        except GpuError:  # no fork here
            return None
        except KeyboardInterrupt:  # whoever waits has seen enough
            self._tried_s = math.inf
            return None
        finally:
            elapsed = time.monotonic() - start
            self._tried_s += max(_used_by_children() - used, elapsed / _BUSY)
        needed = result.needed(device)
        notes = tuple(each.reason for each in result.unknown)
        return None if needed is None else Need(needed, notes=notes)


def _contexts(start: ast.AST | None, frame: FailedFrame) -> Iterator[Any]:
    """Make torch's contexts around a node in its function, and its function's decorators."""
    around = [start, *parents(start)] if start is not None else []
    inside = [*takewhile(lambda node: not hasattr(node, "decorator_list"), around)]
    for node in reversed(around[: len(inside) + 1]):
        written = [item.context_expr for item in getattr(node, "items", ())]
        for expression in (*getattr(node, "decorator_list", ()), *written):
            made_by = frame.scope.value(getattr(expression, "func", expression))
            if getattr(made_by, "__module__", "").startswith("torch"):
                made = eval(ast.unparse(expression), {**frame.scope.outer, **frame.scope.local})
                yield made() if isinstance(made, type) else made


def _used_by_children() -> float:
    """Seconds of the processor's time that processes which this one has started took, and ended."""
    times = os.times()
    return times.children_user + times.children_system


class CodeTrial:
    """Measure how many bytes one frame's code needs of the GPU that was short of memory."""

    def __init__(self, trials: Trials, rest: RestOfCode, is_step: bool) -> None:
        self._trials, self._state = trials, trials.state
        self.rest, self.frame = rest, rest.frame
        loops = [loop for loop in rest.loops if not isinstance(loop, ast.While)]
        whole = None if self.frame.at_top or rest.failed is None else function_of(rest.failed)
        self.start = loops[0] if loops else whole
        """The loop or function whose body is followed; None for a whole cell."""
        self._in_for = bool(loops)
        self.code = _code(self.frame, rest.failed)
        # A function may be a part of a step alone, of which the rest needs more.
        is_step = is_step and bool(self.frame.at_top or rest.loops or rest.backward)
        self._possible = is_step and bool(self.code) and len(self._state.storages) <= _MOST
        self._next = _next_pass(rest)

    @cached_property
    def stale(self) -> set[str]:
        """The names that the failed run of this code bound, and that it binds again unread."""
        if not self.frame.at_top:
            return self.rest.overwritten
        return (self.rest.made_before & bound(self.code)) - {*names_read(ast.Module(self.code, []))}

    @property
    def stale_holders(self) -> tuple[str, ...]:
        """The stale variables of a cell that hold memory worth a line, in order."""
        state, top = self._state, self.frame.at_top
        return tuple(sorted(n for n in self.stale if top and state.worth(state.alone([n]))))

    @property
    def names(self) -> dict[str, Any]:
        """Return the frame's variables, except the stale ones."""
        return {n: v for n, v in self.frame.scope.local.items() if n not in self.stale}

    @cached_property
    def room(self) -> int:
        """Return the bytes that the code can have once the error's frames are released.

        On a real GPU a margin is left for workspaces and for memory in pieces.
        """
        state = self._state
        room = state.capacity - state.held()
        if self.frame.at_top:
            room += state.alone(self.stale)
        else:  # what the function was given, and nothing else has
            room -= state.alone([state.local(self.frame, name) for name in self.names])
        return room if state.device.virtual else int(room * (1 - _MARGIN))

    @cached_property
    def need(self) -> Need | None:
        """What the code needs as it is; None if it cannot be followed."""
        return self.tried() if self._possible else None

    @property
    def is_short(self) -> bool:
        """Whether a dry run fails where the cell did."""
        return self.need is not None and self.need.most > self.room

    @property
    def grows_much(self) -> bool:
        """Whether a loop keeps so much with each pass that a smaller batch would not help."""
        return bool(self.need and self.need.grows and self.need.grows > _GROWS * self.need.most)

    def keeps_nothing(self, grows: int | None = None) -> bool:
        """Whether no loop here keeps more with each pass; `grows` is what a change leaves."""
        if len(self.rest.loops) > 1 or any(map(in_own_scope, self.frame.candidates)):
            return False  # only the innermost loop is followed
        if grows is None and self.need is not None:
            grows = self.need.grows
        return not self.rest.loops or (self.need is not None and grows == 0)

    def fits(self, need: Need, gives: int = 0) -> bool | None:
        """Whether the cell then runs to its end, if `gives` is freed before; None if that is not
        shown for all passes."""
        if need.most > self.room + gives:
            return None if self.grows_much else False
        return (need.grows is not None and self._trials.settled(self, need.grows)) or None

    def tried(self, **changed: Any) -> Need | None:
        """Return what the code needs and keeps with the changes that `needed` takes."""
        need, before = self.needed(**changed), vars(self).get("need")
        if need is None or not self._in_for:
            more = need
        elif before is not None and before.grows is not None and not self.grows_much:
            return need._replace(grows=before.grows)  # it is not the loop that keeps too much
        else:
            more = self.needed(**changed, passes=3)
        if more is None and self._next:  # there may be no such pass
            self._next = ""
            return self.tried(**changed)
        if need is None or more is None:
            return need and need._replace(grows=None)
        return need._replace(grows=max(more.most - need.most, 0))

    def needed(
        self,
        names: dict[str, Any] | None = None,
        *,
        gone: tuple[str, ...] = (),
        before: str = "",
        after: str = "",
        within: Within | None = None,
        passes: int = 2,
    ) -> Need | None:
        """What it needs with other values of some names, some names gone, a line before the failing
        statement, one at the end of each pass, or in a context; None if it cannot be followed."""
        names = dict(names or {})
        space = {**self.frame.scope.outer, **self.names, **names}
        # The globals of a cell have its stale names too.
        for name in {*gone, *(self.stale if self.frame.at_top else ())} - names.keys():
            space.pop(name, None)
        with _line_before(self.rest.failed, before):
            code = _code(self.frame, self.rest.failed)
            code += _parsed(f"{after}\n{self._next}", self.rest.failed)
            code *= passes if self._in_for else 1
            codes = compile_cell(ast.Module(code, []), self.frame.filename)

        def prepare(note: Note) -> Callable[[], dict[str, Any]]:
            def follow() -> dict[str, Any]:
                into = self._own_namespace(space)
                names.clear()  # else what the code lets go would be held here
                signal.signal(signal.SIGPROF, lambda *_: signal.raise_signal(signal.SIGALRM))
                signal.setitimer(signal.ITIMER_PROF, _LIMIT_S, 0.2)
                with ExitStack() as contexts:
                    for context in self._trials.contexts_of(self):
                        contexts.enter_context(context)
                    contexts.enter_context(within(note) if within else nullcontext())
                    for code in filter(None, codes):
                        eval(code, into)
                return {}

            return follow

        subject = Subject(space, [], prepare, None, False, _BUSY * _LIMIT_S)
        return self._trials.follow(subject, self._state.name)

    def _own_namespace(self, space: dict[str, Any]) -> dict[str, Any]:
        """Return `space`; for a cell's code the notebook's own namespace, updated with it. Then no
        other namespace holds what the code assigns again. Only for a dry run's process."""
        if not self.frame.at_top:
            return space
        namespace = self._state.namespace
        for name in namespace.keys() - space.keys():
            del namespace[name]
        namespace.update(space)
        space.clear()
        self._state.let_go()
        return namespace


def _next_pass(rest: RestOfCode) -> str:
    """Return code that changes a loop's counter for the next pass, as for a key of a cache."""
    loop = rest.loops[0] if rest.loops else None
    name = loop.target.id if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name) else ""
    return f"{name} += 1" if name and type(rest.frame.scope.name(name)) is int else ""


def _parsed(text: str, near: ast.stmt | None) -> list[ast.stmt]:
    line = getattr(near, "lineno", 1)
    return [ast.increment_lineno(stmt, line - 1) for stmt in ast.parse(text).body]


@contextmanager
def _line_before(failed: ast.stmt | None, text: str) -> Iterator[None]:
    """Insert a statement before the failing one, in its block, within the context."""
    fields = vars(getattr(failed, "parent", None) or ast.Pass()).values() if text else ()
    block = next((b for b in fields if isinstance(b, list) and failed in b), [])
    before = [*block]
    if block:
        at = block.index(failed)
        block[at:at] = _parsed(text, failed)
    try:
        yield
    finally:
        block[:] = before


def _code(frame: Any, failed: ast.stmt | None) -> list[ast.stmt]:
    """Return the statements to follow; empty if they cannot run by themselves."""
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
    nodes = [node for stmt in body for node in ast.walk(stmt)]
    functions = {function_of(node) for node in nodes} & {*nodes}
    stands = not any(isinstance(n, _ENDS) for n in nodes if function_of(n) not in functions)
    asks = any(getattr(node, "id", "") == "get_ipython" for node in nodes)
    return body if stands and not asks and not awaits(ast.Module(body, [])) else []
