"""Repeat the failed code in dry runs, to measure how much memory it needs.

The code is two passes of the innermost loop around the failing statement; without a loop, the whole
cell. The code's *need* is its peak memory, and its *room* is the memory that it may use. Every pass
is assumed to keep as much memory as the second.
"""

import ast
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from functools import cached_property, partial
from itertools import islice
from types import CodeType, FunctionType
from typing import Any

from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.result import GUESSED, DryRun, Need
from gpumagic.errors import GpuError
from gpumagic.memory.oom_state import TORCH, OutOfMemoryState
from gpumagic.memory.out_of_memory import Lever
from gpumagic.memory.written_forms import Form, expression
from gpumagic.usercode import frames
from gpumagic.usercode.program import passes
from gpumagic.usercode.values import comes_from, is_module, is_tensor, own, torch_here
from gpumagic.usercode.variables import names_read

_LIMIT_S, _PATIENCE_S = 8.0, 60.0  # maximum seconds of a dry run; seconds after which none starts
_MARGIN = 0.05
# A pass keeps much memory if it keeps more than the share `_GROWS` of the need, or if fewer than
# `_MANY` such passes filled the holder to which the loop adds, and the holder exceeds the need.
_GROWS, _MANY = 0.01, 10_000
_WORTH = 0.05  # a change that does not make the cell fit must save this share of the need
_LEFT = 0.75  # in a growing loop, a change helps if at most this share of the growth is left
_HELD, _COUNT = "held after a pass: ", "passes in all: "
_PASSES, _FEW = "_gpumagic_passes", "_gpumagic_few"


class Trials:
    """Make the dry runs for one error, with a `CodeTrial` for each frame of the user's code."""

    def __init__(self, state: OutOfMemoryState, line: ProgressLine) -> None:
        self.state, self._line = state, line
        self._until = time.monotonic() + _PATIENCE_S
        self.ended_early = False
        self.within: Callable[[], AbstractContextManager[Any]] = nullcontext  # for every dry run
        self.every = [CodeTrial(self, rest) for rest in state.rests]  # the innermost first

    @cached_property
    def whole(self) -> "CodeTrial | None":
        """The outermost trial that needs more memory than is available, or None."""
        return next((trial for trial in reversed(self.every) if trial.lacking > 0), None)

    @cached_property
    def loop(self) -> "CodeTrial | None":
        """The trial of the loop that keeps much in each pass and holds the most memory, or None."""
        pairs = [(rest, n) for rest in self.state.rests for n in range(1, len(rest.loops))]
        outer = (CodeTrial(self, rest, around) for rest, around in pairs)
        growing = ([t for t in trials if t.grows_much] for trials in (self.every, outer))
        return max(next(filter(None, growing), []), key=lambda t: t.holds, default=None)

    @property
    def best(self) -> "CodeTrial | None":
        """Return the trial in which to test changes: `loop`, or else `whole`. May be None."""
        return self.loop or self.whole

    def under(self, within: Callable[[], AbstractContextManager[Any]]) -> "Trials":
        """Return trials of the same error with all dry runs in the context `within()`."""
        other = Trials(self.state, self._line)
        other._until, other.within = self._until, within
        return other

    def follow(self, space: dict[str, Any], prepare: Any) -> DryRun | None:
        """Make a dry run; return None if impossible, after Ctrl-C, or after the time limit."""
        from gpumagic.dryrun.follow_code import Subject, dry

        subject = Subject(space, [], prepare, None, False, _LIMIT_S, guesses=True)
        run: DryRun | None = self._in_time(lambda: dry(subject))
        return run

    def in_fork(self, work: Callable[[], Any], room: int) -> Any:
        """Return the result of `work()` in a fork with virtual GPUs; None if that is impossible."""
        from gpumagic.dryrun.follow_code import in_fork

        return self._in_time(lambda: in_fork(work, _LIMIT_S, room))

    def _in_time(self, run: Callable[[], Any]) -> Any:
        begun, result = time.monotonic(), None
        if begun < self._until:
            with suppress(GpuError):
                try:
                    self._line.update("looking for what would help; Ctrl-C ends it")
                    result = run()
                except KeyboardInterrupt:  # no further dry runs
                    self._until = 0.0
        self.ended_early |= time.monotonic() > min(self._until, begun + _LIMIT_S)
        return result


class CodeTrial:
    """Measure how many bytes one frame's code needs on the GPU that was short of memory."""

    def __init__(self, trials: Trials, rest: frames.RestOfCode, around: int = 0) -> None:
        self._trials, self._state, self._around = trials, trials.state, around
        self.rest, self.frame, self.at = copy(rest), rest.frame, trials.state.rests.index(rest)
        self.rest.loops = rest.loops[around:]  # the innermost `around` loops are part of the code
        rest = self.rest
        self._loop: Any = rest.loops[0] if rest.loops else None
        self._step = 1 if rest.loops else 0  # added to the loop's integer variables in each pass
        self._freed = False  # whether a second pass freed memory
        self._count = 0  # the number of passes of the only loop; 0 if unknown
        whole: Any = self.frame.tree if self.frame.at_top and rest.failed is not None else None
        self._body: list[ast.stmt] = getattr(self._loop or whole, "body", [])
        failed: Any = rest.failed
        ran = self._body.index(failed) if not self._loop and failed in self._body else 0
        again = rest.made_before & {*names_read(whole)} if ran else set[str]()
        # After `X = X.cuda()` or `del X`, the first `X` is gone, so do not repeat these lines.
        skips = again or ast.Delete in map(type, self._body[:ran])
        self._skipped = self._body[: ran if skips else 0]
        self._compiled = self._as_loop() if self._state.shortage.library == TORCH else None

    @property
    def code(self) -> list[ast.stmt]:
        """Return the statements that a dry run follows, as `Form.in_place` has changed them."""
        return [stmt for stmt in self._body if stmt not in self._skipped]

    def reads(self, new: dict[str, str]) -> dict[ast.expr, ast.expr]:
        """Map the places where the code reads variables to the expressions in `new`, by name."""
        found = {name: frames.uses(ast.Module(self.code, []), name) for name in new}
        return {use: expression(new[name]) for name in new for use in found[name]}

    @cached_property
    def stale(self) -> set[str]:
        """Names whose values are not needed, because a rerun assigns them before it reads them."""
        made = frames.bound(self.code) - {*names_read(ast.Module(self.code, []))}
        if not self.frame.at_top:  # the loop's variables are needed, as a dry run does not set them
            targets = frames.stored(getattr(self._loop, "target", ast.Pass()))
            return (self.rest.overwritten | made) - targets
        return self.rest.made_before & made

    @property
    def names(self) -> dict[str, Any]:
        return {n: v for n, v in self.frame.scope.local.items() if n not in self.stale}

    @cached_property
    def room(self) -> int:
        """Return the bytes available to the code once the error's frames are released."""
        state = self._state
        room = state.capacity - state.held
        if self.frame.at_top:
            room += state.alone(self.stale)
        else:  # `held` does not count the frame's variables, which the code needs
            room -= state.alone([state.local(self.frame, name) for name in self.names])
        # On a real GPU, workspaces and fragmentation take some of this memory.
        return room if state.device.virtual else int(room * (1 - _MARGIN))

    @cached_property
    def adds_to(self) -> tuple[str, str]:
        """Return the path and the name of the holder to which the loop adds memory, if known."""
        state = self._state
        path = next(iter(state.adds_to(self.rest) if self._loop else ()), "")
        local = (name for name in self.frame.scope.local if state.local(self.frame, name) == path)
        return path, next(local, path if path in state.namespace else "")

    @cached_property
    def also_adds(self) -> list[str]:
        """Return names of further lists and dicts to which the loop adds much memory."""
        state, least = self._state, 0.1 * self.holds
        much = {row.path for row in state.device.holders if row.nbytes >= least}
        much &= {*state.adds_to(self.rest)[1:]}
        lists = [n for n, value in self.frame.scope.local.items() if type(value) in (list, dict)]
        return [name for name in lists if state.local(self.frame, name) in much]

    @property
    def adds_beyond_room(self) -> bool:
        """Whether `room` excludes the memory of the holder in `adds_to`."""
        _, name = self.adds_to
        return bool(name) and name not in self.stale

    @property
    def holds(self) -> int:
        path, _ = self.adds_to
        return sum(row.nbytes for row in self._state.device.holders if row.path == path)

    @cached_property
    def outlives(self) -> bool:
        """Whether the loop adds to a variable that a rerun of the cell does not create again."""
        cell, names = self._state.rests[-1], self._state.namespace.keys()
        return self.adds_to[0] in names - cell.remade() - cell.remade(empty=True)

    @property
    def grown(self) -> int:
        """Return the bytes of the holder in `adds_to`; 0 if `room` includes them."""
        return self.holds * self.adds_beyond_room

    @cached_property
    def need(self) -> Need | None:
        """Return the need of the unchanged code; None if unknown."""
        # The need of a `forward` is unknown, because a dry run of it has no backward pass.
        outward = self._trials.every[self.at :]
        return None if any(t.frame.code.co_name == "forward" for t in outward) else self.tried()

    @property
    def lacking(self) -> int:
        """Return the bytes needed minus the bytes available; 0 if the need is unknown."""
        return self.need.most - self.room if self.need is not None else 0

    @property
    def grows_much(self) -> bool:
        """Whether each pass of the loop keeps much memory, as defined at `_GROWS`."""
        if self.need is None or not self.need.grows:
            return False
        many = self.need.most < self.holds < _MANY * self.need.grows
        return many or self.need.grows > _GROWS * self.need.most

    def fits(self, need: Need | None, gives: int = 0) -> bool | None:
        """Whether the cell fits with this need once `gives` bytes are freed; None if unknown."""
        if need is None:
            return None
        restarts = self.grows_much and not self.outlives
        gives = max(gives, self.grown * restarts)
        count = self._count * bool(need.grows)
        if need.most + max(count - 2, 0) * (need.grows or 0) > self.room + gives:
            first = need.first - max(gives, self.grown)
            return None if not count and self.grows_much and first <= self.room else False
        steady = need.whole and (count > 0 or self._is_steady(need))
        around = self._trials.every[self.at + 1 :]
        return (steady and all(each._is_steady(each.need) for each in around)) or None

    def _is_steady(self, need: Need | None) -> bool:
        """Whether all passes are known to need the same memory; False for nested loops."""
        loops = self.rest.loops
        if len(loops) > 1 or any(map(frames.in_own_scope, self.frame.candidates)):
            return False
        return not loops or (need is not None and need.grows == 0)

    def tried(
        self,
        names: dict[str, Any] | None = None,
        *,
        first: Callable[[dict[str, Any]], object] = lambda into: None,
        keep: tuple[Sequence[str], Any] = ((), None),
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
        form: Form | None = None,
        twice: bool = False,
    ) -> Need | None:
        """Return the need of the changed code; None if a dry run is impossible or raises an error.
        `names` maps variables to new values. `first` changes variables before the code runs. `keep`
        has names of variables, and a function that changes their new tensors after each pass.
        `within` returns a context manager for the code to run in. `form` replaces statements.
        Without a loop, the code runs once, or `twice`."""
        compiled, functions = self._compiled, dict[FunctionType, CodeType]()
        if form is not None:
            with form.in_place():
                compiled = self._as_loop()
                for each in {frame.filename: frame for frame in self._state.frames}.values():
                    functions |= frames.functions_again(each.filename, each.source, each.tree or "")
        if compiled is None:
            return None
        changed = names or {}
        space = {**self.frame.scope.outer, **self.names, **changed}
        if self.frame.at_top:  # `outer` of a cell contains the stale names too
            for name in self.stale - changed.keys():
                space.pop(name, None)

        def prepare(note: Callable[[str], object]) -> Callable[[], dict[str, Any]]:
            self.note = note  # the context manager of `within` may call this

            def follow() -> dict[str, Any]:
                into, fixed = self._own_namespace(space), {*changed}
                changed.clear()  # because `changed` would keep alive values that the code frees
                first(into)
                self._let_go(keep[0], functions)
                into[_PASSES] = self._passes(
                    into, note, keep, fixed, 2 if twice or self._loop else 1
                )
                into[_FEW] = lambda items: islice(items, 2)
                with ExitStack() as contexts:
                    for context in (*self._contexts(), self._trials.within(), within()):
                        contexts.enter_context(context)
                    exec(compiled, into)
                return {}

            return follow

        run = self._trials.follow(space, prepare)
        need = self._need_of(run, changed) if run is not None else None
        # If the loop's next number names no file, or frees memory, run both passes with one number.
        if self._step and (self._freed or getattr(run, "error", None)):
            self._step = 0
            return self.tried(names, first=first, keep=keep, within=within, form=form, twice=twice)
        return need

    def _need_of(self, run: DryRun, changed: dict[str, Any]) -> Need | None:
        reasons = [each.reason for each in run.unknown]
        guessed = GUESSED in reasons
        if run.mismatches or (run.error and not guessed):
            return None
        held = _numbers(reasons, _HELD)
        # If the unchanged code keeps nothing after a pass, one complete pass is enough.
        steady = bool(held) and getattr(self.__dict__.get("need"), "grows", None) == 0
        grows = None if self._loop and not steady else 0
        if len(held) > 1:
            grows = max(held[1] - held[0], 0)
        self._freed = held != sorted(held)
        self._count = max(_numbers(reasons, _COUNT), default=0)
        most = getattr(run.peak.get(self._state.name), "needed", 0)
        # The run frees incomplete optimizer state. `room` has these bytes, but `needed` does not.
        most += self._state.incomplete * (self._state.optimizer_name not in changed)
        return Need(most, grows, (run.complete or steady) and not guessed, run.unknown)

    def _passes(
        self, space: dict[str, Any], note: Any, keep: Any, fixed: set[str], count: int
    ) -> Any:
        """Yield before each pass. After each pass, give `note` the allocated bytes."""
        names, change = keep
        old = dict[int, Any]()  # stored tensors, which stay as they are
        note_old = lambda x: old.setdefault(id(x), x)  # noqa: E731
        for name in names:  # `total += loss` or `losses.append(loss)` must not add to old graphs
            held = space[name]
            space[name] = held.detach() if is_tensor(held) else each_tensor(note_old, held)
        # Restore loop variables before each pass, because `batch = batch.cuda()` changes `batch`.
        targets = frames.stored(getattr(self._loop, "target", ast.Pass())) & space.keys()
        bound = targets & frames.bound(self.code)
        again = bool(bound) and not targets & fixed and self._take_first(space)
        given = {n: space[n] for n in targets if again or not getattr(space[n], "is_cuda", False)}
        for number in range(count):
            space.update(given)
            yield
            for name in names:
                new = lambda x: x if id(x) in old else change(x)  # noqa: E731
                space[name] = each_tensor(new, space[name])
            note(f"{_HELD}{number} {torch_here().cuda.memory_allocated(self._state.name)}")
            # Change the loop's numbers and strings, so that a dict with these keys grows.
            more: Any = {int: self._step, float: self._step * 1e-9, str: " " * self._step}
            given = {n: v + more[type(v)] if type(v) in more else v for n, v in given.items()}
        with suppress(Exception):
            note(f"{_COUNT}{passes(self.rest.loops, space)}")

    def _take_first(self, space: dict[str, Any]) -> bool:
        """Bind the loop's variables to the first item; return False for a data loader."""
        values = map(self.frame.scope.value, ast.walk(self._loop.iter))
        if any(comes_from(type(value), "torch.utils.data.DataLoader") for value in values):
            return False  # its workers must not start
        target, over = ast.unparse(self._loop.target), ast.unparse(self._loop.iter)
        with suppress(Exception):
            exec(f"for {target} in {over}: break", space)
        return True

    def _let_go(self, names: Sequence[str], functions: dict[FunctionType, CodeType]) -> None:
        """Release a function's `names` and the names its code binds; give `functions` new code."""
        for function, code in functions.items():
            function.__code__ = code
        held: list[Any] = [t.frame.scope.local for t in self._trials.every[: self.at + 1]]
        for name in set() if self.frame.at_top else {*names, *frames.bound(self.code)}:
            held[-1].pop(name, None)
        for variables in held[:-1]:  # of functions that the code calls again
            variables.clear()
        self._state.let_go()

    def _contexts(self) -> Iterator[Any]:
        for each in reversed(self._trials.every[self.at + 1 :]):
            yield from frames.contexts(each.rest.failed, each.frame)
        yield from frames.contexts(self._loop, self.frame)

    def _own_namespace(self, space: dict[str, Any]) -> dict[str, Any]:
        """Return `space`, or for a cell the notebook's namespace with only the items of `space`."""
        if not self.frame.at_top:
            return space
        # A second namespace would keep values alive that the code replaces.
        namespace = self._state.namespace
        for name in namespace.keys() - space.keys():
            del namespace[name]
        namespace.update(space)
        space.clear()
        self._state.let_go()
        return namespace

    def _as_loop(self) -> CodeType | None:
        """Compile the code as a loop over the name `_PASSES`; None if it cannot run alone."""
        if not self.code:
            return None
        tree = ast.parse(f"for {_PASSES}_ in {_PASSES}: pass")
        tree.body[0].body = self.code  # type: ignore[attr-defined]
        within = [n for each in self.code for n in ast.walk(each) if isinstance(n, ast.For)]
        over = [(each, each.iter) for each in within if self._around]
        try:
            for each, iterated in over:  # a few passes of an inner loop are enough
                few = ast.Call(ast.Name(_FEW, ast.Load()), [iterated], [])
                each.iter = ast.fix_missing_locations(ast.copy_location(few, iterated))
            # A `return`, `yield` or `await` outside a function is a SyntaxError.
            with suppress(SyntaxError):
                found = compile(tree, self.frame.filename, "exec", dont_inherit=True)
                return found if "get_ipython" not in found.co_names else None
            return None
        finally:
            for each, iterated in over:
                each.iter = iterated


def _numbers(reasons: list[str], start: str) -> list[int]:
    return [int(reason.split()[-1]) for reason in reasons if reason.startswith(start)]


def helps(
    trial: CodeTrial | None,
    do: str,
    gives: int = 0,
    freed: int = 0,
    grown: int = 0,
    then: Need | None = None,
    **change: Any,
) -> Iterator[Lever]:
    """Yield `do` as a `Lever` if the changed code fits, or needs clearly less memory.
    `then` is the need of the changed code. If it is None, a dry run measures the need."""
    if trial is None or trial.need is None or (then := then or trial.tried(**change)) is None:
        return
    need: Any = trial.need
    fits = trial.fits(then, freed)
    if need.whole > then.whole:  # the changed code was not run to its end
        return
    if trial.grows_much:  # only the growth per pass matters
        left = 1.0 if then.grows is None else then.grows / need.grows
        enough, gives = left <= _LEFT, gives or int(grown * (1 - left))
    else:
        enough = fits or need.most - then.most >= _WORTH * need.most
    if enough:
        yield Lever(do, gives or max(need.most - then.most, 0) or None, fits)


def each_tensor(change: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with its tensors changed; an object's attributes are changed in place."""
    from torch.utils._pytree import tree_map_only

    torch = torch_here()
    # Change modules in a container, such as a list of models, but not in an object's attributes.
    kinds = torch.Tensor if own(value) else (torch.Tensor, torch.nn.Module)
    changed = partial(tree_map_only, kinds, change)
    if is_tensor(value) or not own(value):
        return changed(value)
    for name, held in [*own(value).items()]:
        # Skip a module's private attributes, such as `_parameters` and `_modules`.
        if not (is_module(value) and name[0] == "_") and (new := changed(held)) is not held:
            setattr(value, name, new)
    return value
