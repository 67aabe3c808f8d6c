"""One dry run from its beginning to its end: stand-ins in, the code under the modes, all back."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from gpumagic.device import Device
from gpumagic.dryrun import patches, sandbox
from gpumagic.dryrun.answers import Calls
from gpumagic.dryrun.describe import describe
from gpumagic.dryrun.doubles import Doubles
from gpumagic.dryrun.fake_operators import Clock, Operators
from gpumagic.dryrun.fakes import Fakes
from gpumagic.dryrun.held_memory import Ledger
from gpumagic.dryrun.peaks import peaks, room
from gpumagic.dryrun.result import DryRun, Mismatch, Unknown
from gpumagic.dryrun.running_line import BEFORE, Place, is_users, place
from gpumagic.dryrun.stand_ins import StandingIn, check_threads
from gpumagic.dryrun.transfers import Transfers
from gpumagic.dryrun.unknown import Stopped, raised
from gpumagic.errors import GpuError
from gpumagic.moving.find_tensors import TensorFinder, optimizers_in
from gpumagic.moving.move import move_all
from gpumagic.moving.plan import has_plain_storage
from gpumagic.placement.swap import enter, leave
from gpumagic.placement.torch_devices import as_torch

_busy = threading.Lock()


@dataclass
class Subject:
    """What a dry run is of.

    Attributes
    ----------
    namespace : dict
        The variables of the code.
    roots : list of (name, value)
        What the code reads; names that are not in the namespace are arguments.
    prepare : callable
        Given the `Doubles`, returns what runs: a callable that returns the value to describe, as
        a dict of names, or nothing.
    """

    namespace: dict[str, Any]
    roots: list[tuple[str, Any]]
    prepare: Callable[[Doubles], Callable[[], dict[str, Any] | None]]


class Session:
    """A dry run in progress.

    Parameters
    ----------
    device : Device or None
        Where new tensors are made, as `%%ongpu` does.
    move : bool
        Whether what the code reads is brought there.
    limit : float
        Seconds.
    progress : callable, optional
        Told the seconds and operators so far, about once a second.
    """

    def __init__(
        self,
        device: Device | None,
        *,
        move: bool = True,
        limit: float = 30.0,
        progress: Callable[[float, int], object] | None = None,
    ) -> None:
        self._device, self._move = device, move
        self._ledger, self._transfers = Ledger(), Transfers()
        self._limit, self._progress = limit, progress
        self._unknown: dict[tuple[Place | None, str], Unknown] = {}
        self._error: BaseException | None = None
        self._error_at: Place | None = None

    def note(self, reason: str, where: Place | None = None, *, ended: bool = False) -> None:
        """Something that is not known or was left out, at the user's line."""
        where = where or place()
        self._unknown.setdefault((where, reason), Unknown(where, reason, ended))

    def run(self, subject: Subject) -> DryRun:
        """Follow the code of `subject`.

        Raises
        ------
        GpuError
            It cannot begin: another dry run, or another thread in the notebook's code.
        """
        if not _busy.acquire(blocking=False):
            raise GpuError("a dry run is under way; wait for it or interrupt it")
        try:
            check_threads(subject.namespace)
            with ExitStack() as stack:
                stack.enter_context(patches.settings())
                # Neither what torch says of the stand-ins nor what the code would warn of.
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")
                return self._run(subject)
        finally:
            _busy.release()

    def _run(self, subject: Subject) -> DryRun:
        clock = Clock(self._limit, self._report_progress)
        target = as_torch(self._device) if self._device is not None else None
        mode = Fakes(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        doubles = Doubles(mode, self._ledger.add_existing, self._tracked)
        standing = StandingIn(subject.namespace, doubles)
        before = room(target)
        named: dict[str, Any] = {}
        with standing.place(subject.roots):
            go = subject.prepare(doubles)
            followers = self._followers(subject, doubles)
            held = _held(subject, doubles)
            moving = self._to_move(subject, doubles)
            standing.begin()
            doubles.release()
            self._ledger.begin()
            with ExitStack() as stack:
                printed = stack.enter_context(sandbox.kept_out())
                calls = Calls(doubles.tensor, self._transfers)
                patches.install(stack, mode, calls, self.note, self._waited)
                stack.enter_context(torch.autograd.set_multithreading_enabled(False))
                stack.enter_context(calls)
                stack.enter_context(mode)
                Operators(self._ledger, self._transfers, clock).install(stack)
                with self._caught():
                    if target is not None:
                        self._bring(moving, target, followers)
                    del moving
                    stack.enter_context(_placed(target, self._move, subject.namespace))
                    named = go() or {}
            new = [
                *standing.assigned(),
                *((name, value) for name, value in named.items() if value is not None),
            ]
            assigned = tuple(describe(name, value) for name, value in new)
            mismatches = self._mismatches(subject.namespace)
            del new, named, held, go, followers
            result = DryRun(
                device=str(self._device) if self._device is not None else "",
                assigned=assigned,
                peak=peaks(self._ledger, before),
                transfers=self._transfers.all(),
                unknown=tuple(self._unknown.values()),
                mismatches=mismatches,
                error=_one_line(self._error) if self._error and not mismatches else None,
                error_at=self._error_at,
                printed=printed.getvalue(),
                operators=clock.operators,
                seconds=clock.elapsed,
                virtual=self._device is not None and self._device.virtual,
            )
            self._error = None
        return result

    # -- before the code
    def _to_move(self, subject: Subject, doubles: Doubles) -> list[tuple[str, Any]]:
        if self._device is None or not self._move:
            return []
        return [(name, doubles.of(value)) for name, value in subject.roots]

    def _followers(self, subject: Subject, doubles: Doubles) -> list[tuple[str, Any]]:
        return [
            (name, doubles.of(optimizer))
            for name, optimizer in optimizers_in(subject.namespace)
            if any(
                doubles.known(parameter) is not None
                for group in optimizer.param_groups
                for parameter in group["params"]
            )
        ]

    def _bring(self, moving: Any, target: torch.device, followers: Any) -> None:
        self._transfers.silent = True
        moves = move_all(moving, target, followers=followers)
        self._transfers.silent = False
        for moved in moves.moved:
            where = Place(0, moved.name)
            source = ", ".join(moved.sources)
            self._transfers.add("copy", "move", source, str(target), moved.nbytes, where)
        for left in moves.left:
            self.note(f"{left.name} stays: {left.reason}", BEFORE)
        self._ledger.reset_peak()

    # -- while it runs
    @contextmanager
    def _caught(self) -> Iterator[None]:
        raised.clear()
        try:
            yield
            for stopped in raised:
                self.note(f"{stopped.reason}; the code went on as if it had failed", stopped.where)
        except Stopped as stopped:
            self.note(stopped.reason, stopped.where, ended=True)
        except KeyboardInterrupt as error:
            self.note("interrupted", _place_of(error.__traceback__), ended=True)
        except BaseException as error:  # noqa: BLE001  what the user's code raises is the result
            self._error, self._error_at = error, _place_of(error.__traceback__)
        finally:
            raised.clear()  # their frames hold the user's tensors

    def _tracked(self) -> None:
        reason = "this backward pass goes on into what an earlier cell computed: not followed"
        self.note(reason)

    def _waited(self, device: Any = None) -> None:
        name = str(torch.device("cuda", torch.cuda.current_device()) if device is None else device)
        self._transfers.note("wait", "synchronize", name, "cpu", 0)

    def _report_progress(self, seconds: float, operators: int) -> None:
        if self._progress is not None:
            with sandbox.let_out(), torch._C.DisableTorchFunction():
                self._progress(seconds, operators)

    # -- after it
    def _mismatches(self, namespace: dict[str, Any]) -> tuple[Mismatch, ...]:
        error = self._error
        if not isinstance(error, Exception):
            return ()
        try:
            from gpumagic.mismatch import explain

            explanation = explain(error, namespace=namespace)
        except Exception:  # noqa: BLE001  an error without its explanation is an error still
            explanation = None
        text = _one_line(error)
        if explanation is None and "same device" not in text:
            return ()
        shown = str(explanation) if explanation is not None else None
        html = explanation._repr_html_() if explanation is not None else None
        return (Mismatch(self._error_at, text, shown, html),)


@contextmanager
def _placed(
    target: torch.device | None, batches: bool, namespace: dict[str, Any]
) -> Iterator[None]:
    if target is None:
        yield
        return
    placement = enter(target, batches=batches, namespace=namespace)
    try:
        yield
    finally:
        leave(placement)


def _held(subject: Subject, doubles: Doubles) -> list[Any]:
    """Stand-ins of tensors whose memory other variables keep, whatever the code lets go."""
    names = {name for name, _ in subject.roots}
    mine = {t.untyped_storage()._cdata for t in doubles.tensors() if has_plain_storage(t)}
    finder = TensorFinder()
    finder.variables((n, v) for n, v in list(subject.namespace.items()) if n not in names)
    return [
        doubles.tensor(found.tensor)
        for found in finder.found
        if has_plain_storage(found.tensor) and found.tensor.untyped_storage()._cdata in mine
    ]


def _place_of(traceback: TracebackType | None) -> Place | None:
    found = None
    while traceback is not None:
        if is_users(traceback.tb_frame.f_code.co_filename):
            found = place(traceback.tb_frame)
            if found is not None:
                found = found.at(traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
