"""Run a function or a cell in a forked copy of this process, on tensors without data.

The result describes the code up to the line where it ended, failed, depended on data or reached the
time limit. Shell commands and most magics of IPython are skipped and reported.
"""

import ast
import asyncio
import importlib
import inspect
import linecache
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import torch

from gpumagic import faults
from gpumagic.device import Device
from gpumagic.device.cards import Card
from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.answers import Calls, install
from gpumagic.dryrun.confined import Confinement
from gpumagic.dryrun.count_operators import Crossings, Operators, attend_as_cuda
from gpumagic.dryrun.fakes import Fakes, NotKnown, Stopped, describe, is_refusal, raised
from gpumagic.dryrun.forked import let_backward_run, run_forked
from gpumagic.dryrun.held_memory import Before, HeldMemory, measure, on_card, peaks, target_of
from gpumagic.dryrun.result import LIMIT_S, DryRun, Mismatch, Unknown
from gpumagic.errors import GpuError, show_as
from gpumagic.isolation.settings import deferred
from gpumagic.mismatch.explainer import explain
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import move_all
from gpumagic.moving.moved import Moved
from gpumagic.placement import Placement, placement, put_in_force
from gpumagic.placement.swap import enter, find_swaps
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.files import BEFORE, UserLine, innermost, innermost_of
from gpumagic.usercode.frames import errors
from gpumagic.usercode.program import compile_cell
from gpumagic.usercode.variables import names_read, variables_read
from gpumagic.virtual import switch
from gpumagic.virtual.virtual_gpus import GPUS, keep_after_fork

_GRACE_S = 5.0  # seconds that the child has after the limit to send its result
_following = False
Note = Callable[[str], object]


@dataclass(frozen=True)
class Subject:
    """Describe the code of a dry run."""

    namespace: dict[str, Any]
    reads: list[tuple[str, Any]]  # names and values that the code reads
    # Takes a function that reports skipped code, and returns a function that runs the code.
    prepare: Callable[[Note], Callable[[], dict[str, Any]]]
    device: Device | None  # where new tensors are placed
    move: bool  # whether variables that the code reads are moved to `device`
    limit: float  # seconds
    cards: tuple[Card, ...] = ()  # absent GPU models; `device` simulates the first of them
    target: str = ""  # the device to which a fix should move tensors; empty for the best device
    guesses: bool = False  # whether to guess numbers that depend on data, instead of ending the run
    batches: int | None = None  # the number of batches that each DataLoader yields; None for all

    @property
    def where(self) -> str:
        """The name of the first card, or of the device; empty if there is neither."""
        return self.cards[0].name if self.cards else str(self.device or "")

    @property
    def virtual(self) -> bool:
        return self.device is not None and self.device.virtual


def dry(subject: Subject) -> DryRun:
    """Make a dry run of `subject` in a forked child; raise `GpuError` if that is impossible."""
    if _following:
        raise GpuError("a dry run is under way and cannot start another; call the function itself")
    device = subject.device
    before = measure(None if device is None else as_torch(device), next(iter(subject.cards), None))
    with deferred():  # an interrupt would leave the import incomplete
        importlib.import_module("torch._dynamo")  # imported once here, not in every child
    outer = placement()
    # Visit objects before the fork. In the child, a visit would make Linux copy a page of memory.
    find_swaps()
    finders = [TensorFinder([*subject.reads, *subject.namespace.items()])]

    def work() -> DryRun:
        global _following
        _following = True
        _prepare_fork(before, outer)
        return _Following(subject).run(before, finders)

    result: DryRun | None = run_forked(work, subject.limit + _GRACE_S)
    if result is not None:
        return result
    limit = f"the time limit of {subject.limit:g} s"
    end = Unknown(None, f"{limit}, in code that cannot be interrupted", True)
    seconds = time.monotonic() - before.time
    return DryRun(subject.where, unknown=(end,), seconds=seconds, virtual=subject.virtual)


def in_fork(work: Callable[[], Any], limit: float, room: int) -> Any:
    """Return the result of `work()` in a forked child whose virtual GPUs have `room` bytes free."""
    before, outer = measure(None), placement()

    def run() -> Any:
        _prepare_fork(before, outer)
        for gpu in GPUS:
            gpu.account.limit = gpu.account.allocator.bytes.current + room
        Confinement().begin()
        return work()

    return run_forked(run, limit)


def _prepare_fork(before: Before, outer: Placement | None) -> None:
    """In a forked child, replace real GPUs by virtual ones. Place new tensors as `outer` says."""
    if before.real:
        switch.stand_in(before.real)
    let_backward_run()
    if outer is not None:
        put_in_force(outer)
    keep_after_fork()


class _Following:
    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._target = None if subject.device is None else as_torch(subject.device)
        self._held, self._crossings = HeldMemory(), Crossings()
        self._operators = Operators(self._held, self._crossings, subject.guesses)
        self._unknown: dict[tuple[UserLine | None, str], Unknown] = {}
        self._error: BaseException | None = None
        self._error_at: UserLine | None = None
        self._moved: tuple[Moved, ...] = ()
        self._timed = False  # whether the time limit applies now

    def note(self, reason: str, where: UserLine | None = None, *, ended: bool = False) -> None:
        """Record something unknown or skipped, at the user's line."""
        where = where or innermost()
        self._unknown.setdefault((where, reason), Unknown(where, reason, ended))

    def run(self, before: Before, finders: list[TensorFinder]) -> DryRun:
        subject, named, variables = self._subject, dict[str, Any](), _Variables({})
        confinement = Confinement()
        earlier = "this backward pass reaches an earlier cell's graph, which dry runs cannot follow"
        mode = Fakes(partial(self._held.add, existing=True), partial(self.note, earlier))
        mode.with_graphs = not subject.cards  # absent cards hold no earlier graphs
        mode.take_over(finders.pop())  # popped, because a finder keeps its tensors alive
        self._held.begin()
        go = subject.prepare(self.note)
        calls = Calls(mode.fake, self._crossings, self.note if subject.guesses else None)
        install(calls, self.note, self._held, before.virtual, subject.batches)
        attention = None if before.virtual else attend_as_cuda()
        with calls, mode, self._operators:
            if not confinement.begin():
                self.note(
                    "C++ code may write files or send data: no Landlock or no seccomp", BEFORE
                )
            with self._caught():
                if self._target is not None:
                    self._bring(self._target)
                subject.reads.clear()  # `reads` would keep deleted tensors alive
                variables = _Variables(subject.namespace)
                self._timed = True
                signal.signal(signal.SIGALRM, self._time_is_up)
                # Repeat the signal, because Python ignores the exception if a finalizer is running.
                signal.setitimer(signal.ITIMER_REAL, subject.limit, 0.2)
                named = go()
            new = [*variables.assigned(), *((n, v) for n, v in named.items() if v is not None)]
            assigned = tuple(describe(name, value) for name, value in new)
        del attention
        mismatches = self._mismatches()
        return DryRun(
            device=subject.where,
            assigned=assigned,
            peak=peaks(self._held, before),
            moved=self._moved,
            ledger=self._crossings.ledger(subject.virtual),
            unknown=tuple(self._unknown.values()),
            mismatches=mismatches,
            error=faults.in_words(self._error) if self._error and not mismatches else None,
            error_at=self._error_at,
            printed=confinement.printed.getvalue(),
            operators=self._operators.count,
            backward=self._operators.backward,
            seconds=time.monotonic() - before.time,
            virtual=subject.virtual,
            cards=tuple(on_card(self._held, card) for card in subject.cards),
        )

    def _bring(self, target: torch.device) -> None:
        subject, old = self._subject, dict[str, tuple[str, ...]]()
        if subject.cards:  # an absent card has no tensors, so all variables start on the CPU
            every = [*subject.reads, *subject.namespace.items()]
            moves = move_all(every, torch.device("cpu"), subject.namespace, check_room=False)
            old = {moved.name: moved.sources for moved in moves.moved}
            self._held.begin()
        if subject.move:
            moves = move_all(subject.reads, target, subject.namespace, check_room=False)
            self._moved = tuple(replace(m, sources=old.get(m.name, m.sources)) for m in moves.moved)
            for left in moves.left:
                self.note(f"{left.name} stays: {left.reason}", BEFORE)
            self._held.reset_peak()
        self._crossings.counts.clear()  # moves are reported separately
        enter(target, batches=subject.move, namespace=subject.namespace)

    @contextmanager
    def _caught(self) -> Iterator[None]:
        handled = sys.exc_info()[1]  # the user's error that is being explained, or None
        try:
            yield
            for stopped in raised:
                self.note(f"{stopped.reason}; the code caught the error and went on", stopped.where)
        except Stopped as stopped:
            self._timed = False
            self.note(stopped.reason, stopped.where, ended=True)
        except KeyboardInterrupt as error:
            self.note("interrupted", innermost_of(error.__traceback__), ended=True)
        except BaseException as error:  # noqa: BLE001  the user's error is a result
            where = innermost_of(error.__traceback__)
            if raised and raised[-1].where == where:  # C++ has converted `Stopped` to another error
                self.note(raised[-1].reason, raised[-1].where, ended=True)
            elif is_refusal(error):
                self.note(f"{faults.in_words(error)}: a dry run writes no file", where, ended=True)
            elif isinstance(error, TypeError) and NotKnown.__name__ in str(error):
                self.note("this needs a value that depends on data", where, ended=True)
            else:
                for each in errors(error):
                    if each.__context__ is handled:
                        each.__context__ = None
                self._error, self._error_at = error, where
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _time_is_up(self, number: int, frame: FrameType | None) -> None:
        if self._timed:
            count, limit = self._operators.count, self._subject.limit
            reason = f"the time limit of {limit:g} s, after {count} operators"
            raise Stopped(reason, innermost(frame))

    def _mismatches(self) -> tuple[Mismatch, ...]:
        error, explanation = self._error, None
        if not isinstance(error, Exception):
            return ()
        with faults.kept("explaining the error of a dry run"):
            namespace, target = self._subject.namespace, self._subject.target
            explanation = explain(error, namespace=namespace, target=target)
        text = faults.in_words(error)
        if explanation is None and "same device" not in text:
            return ()
        return (Mismatch(self._error_at, text, explanation),)


class _Variables:
    """Remember a namespace's objects by weak references, so that the objects can be freed."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace
        self._before = {name: (id(v), _reference(v)) for name, v in namespace.items()}

    def assigned(self) -> Iterator[tuple[str, Any]]:
        """Yield names and new values of the variables that were assigned since `__init__`."""
        for name, value in self._namespace.items():
            number, reference = self._before.get(name, (None, None))
            same = number == id(value) and (reference is None or reference() is value)
            if not same and not name.startswith("_"):
                yield name, value


def _reference(value: Any) -> Any:
    with suppress(TypeError):
        return weakref.ref(value)
    return None


# A dry run runs the code of these magics once, and skips all other magics.
_PYTHON = {"time", "timeit", "capture", "prun"}
_ENDED = "KeyboardInterrupt: the dry run was interrupted; your variables have not changed"


def dry_run_cell(shell: Any, tree: Any, file: str, on: object, *, move: bool = True) -> DryRun:
    """Predict what the parsed code of a cell would do; `on` is as in `dry_run`."""
    from IPython.core.compilerop import PyCF_MASK  # IPython takes long to import

    namespace, flags = shell.user_ns, shell.compile.flags & PyCF_MASK
    names = names_read(tree, shell.transform_cell)
    reads = list(variables_read(names, namespace, on_host=False))

    def prepare(note: Note) -> Callable[[], dict[str, Any]]:
        execute = leave_out_magics(namespace, note, file, shell.transform_cell, flags)
        return lambda: {"Out": execute(tree)}

    try:
        with ProgressLine(shell) as line:
            device, cards = target_of(on)
            line.update("dry run; Ctrl-C ends it")
            return dry(Subject(namespace, reads, prepare, device, move, LIMIT_S, cards))
    except KeyboardInterrupt as error:
        show_as(error, lambda: [_ENDED])
        raise


def leave_out_magics(
    namespace: dict[str, Any],
    note: Note,
    file: str,
    transform: Callable[[str], str],
    flags: int = 0,
) -> Callable[[ast.Module], Any]:
    """In a forked child, make `get_ipython()` skip magics; return a function that runs code."""

    def execute(part: ast.Module) -> Any:
        value = None
        for code in filter(None, compile_cell(part, file, flags)):
            value = eval(code, namespace)
            if code.co_flags & inspect.CO_COROUTINE:
                value = asyncio.new_event_loop().run_until_complete(value)
        return value

    stand_in = _DryShell(note, file, transform, execute)
    namespace["get_ipython"] = lambda: stand_in
    return execute


@dataclass(frozen=True)
class _DryShell:
    """Replace IPython's shell in a dry run; skip and report shell commands and most magics."""

    _note: Note
    _file: str
    _transform: Callable[[str], str]
    _execute: Callable[[ast.Module], Any]

    def run_line_magic(self, name: str, line: str = "", _stack_depth: int = 1) -> Any:
        return self._magic(name, "%", line, sys._getframe(1).f_lineno - 1)

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        number = sys._getframe(1).f_lineno
        # If gpumagic has removed the line `%%ongpu`, the line number is too low by one.
        below = "%%ongpu" in linecache.getline(self._file, number)
        return self._magic(name, "%%", cell, number + below)

    def system(self, command: str) -> None:
        self._left_out(f"!{command}")

    def getoutput(self, command: str, **options: Any) -> Any:
        return self._left_out(f"!{command}")

    def __getattr__(self, name: str) -> Any:
        raise Stopped(f"get_ipython().{name} is not available in a dry run")

    def _magic(self, name: str, mark: str, text: str, above: int) -> Any:
        if name not in _PYTHON or not text.strip():
            return self._left_out(f"{mark}{name}")
        try:
            # Prepend blank lines, so that line numbers are right for the whole cell.
            tree = ast.parse("\n" * max(above, 0) + self._transform(text))
        except SyntaxError:  # the magic has options
            return self._left_out(f"{mark}{name} {text.strip()}")
        if name != "time":
            self._note(f"{mark}{name} was skipped; its code was followed once")
        return self._execute(tree)

    def _left_out(self, what: str) -> Any:
        self._note(f"{what} was skipped")
        return NotKnown(f"the result of {what}", whole=None)
