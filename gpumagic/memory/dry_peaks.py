"""Find by dry runs what the code that failed needs: as it is, and changed in a way that may help.

The code is that of the innermost loop around the failing statement, a few times, for each pass has
what the one before left; without a loop it is all of the cell or function. Nothing of the notebook
is touched, and nothing is computed.
"""

import ast
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from gpumagic.dryrun.follow_code import Subject, dry
from gpumagic.errors import GpuError
from gpumagic.fitting.fit_search import largest
from gpumagic.memory.shortage import Situation
from gpumagic.mismatch.read.rest_of_code import RestOfCode
from gpumagic.mismatch.read.syntax import function_of, loops_around
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.program import awaits, compile_cell

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
        peak = result.peak.get(self._s.name)
        return (peak.needed if peak else 0) if result.complete else None

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
