"""Watch a stretch of code with `gpumagic.watch()`; find the user's call of an array framework."""

import os
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.device import here
from gpumagic.frameworks.framework import Framework
from gpumagic.frameworks.known import counted_here
from gpumagic.ledger import ledger_view
from gpumagic.ledger.advice import what
from gpumagic.ledger.entry import LIBRARY, PRINT, Count, Entry, Ledger, Tally, locate, of_thread
from gpumagic.usercode.files import in_cell, is_ours, line_at


class watch:
    """Count every copy between devices and every wait for one: ``with gpumagic.watch() as w:``.

    It counts the code within, also in threads that the code starts and in nested watches: of torch,
    and of JAX and TensorFlow once they are imported; CuPy's are not counted. Nothing is counted
    outside of a watch, and a watch counts only its own thread or task.

    Parameters
    ----------
    strict : bool
        Raise `ImplicitCopyError` at the first copy or wait that is implicit.
    warn : bool, default True
        Give a `CrossDeviceWarning` once for each line where torch's tensors are copied or waited
        for again and again.
    frameworks : sequence of Framework, optional
        Count these only.

    Examples
    --------
    >>> with gpumagic.watch() as w:
    ...     for x in batches:
    ...         total += net(x.to("cuda:0")).sum().item()
    >>> w.ledger.transfers, w.ledger.waits, w.ledger.nbytes
    (10, 10, 81920)
    >>> w
    10 transfers: 80.0 KiB to cuda:0; 10 waits at line 3: `net(x.to("cuda:0")).sum().item()`
    """

    def __init__(
        self,
        *,
        strict: bool = False,
        warn: bool = True,
        frameworks: Sequence[Framework] | None = None,
    ) -> None:
        self._strict, self._warn, self._frameworks = strict, warn, frameworks
        self._counting: ExitStack | None = None
        self.checks: AbstractContextManager[Any] | None = None  # to run meanwhile
        self._tally = Tally()
        self.complete = True
        """Whether no framework's counter failed to start."""

    def start(self) -> "watch":
        """Begin to count. `stop` must be called, by any thread."""
        if self._counting is not None:
            raise RuntimeError("this watch runs already")
        self._tally, self.complete = Tally(), True
        counted = counted_here() if self._frameworks is None else self._frameworks
        if any(framework.name != "torch" for framework in counted):
            self._tally.virtual = any(gpu.virtual for gpu in here(memory=False))
        with ExitStack() as stack:
            if self.checks is not None:
                stack.enter_context(self.checks)
            for framework in counted:
                try:
                    counter = framework.count(self._tally, self._strict, warn=self._warn)
                    stack.enter_context(counter)
                except Exception as error:  # noqa: BLE001  the others count
                    faults.keep(f"starting the ledger of {framework.name}", error)
                    self.complete = False
            self._counting = stack.pop_all()
        return self

    def stop(self) -> None:
        """Stop counting; calling it twice does no harm."""
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.close()

    def __enter__(self) -> "watch":
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @property
    def ledger(self) -> Ledger:
        """What was counted, up to now if it still runs."""
        tally = self._tally
        return tally.ledger() if tally.counts else Ledger(virtual=tally.virtual)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The ledger's entries."""
        return self.ledger.entries

    def __repr__(self) -> str:
        return ledger_view.line(self.ledger) or ledger_view.NOTHING

    def _repr_html_(self) -> str:
        return self.ledger._repr_html_()

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return self.ledger._repr_mimebundle_()


PRINTING = {"__repr__", "__str__", "__format__"}


class Inside(dict[str, bool]):
    """Whether a file is a framework's, or one of ours in front of it, by its name."""

    def __init__(self, framework: ModuleType, ours: str) -> None:
        folders = os.path.dirname(str(framework.__file__)), os.path.dirname(__file__)
        its, here = map(os.path.abspath, folders)
        self._starts = os.path.join(its, ""), os.path.join(here, ours)

    def __missing__(self, file: str) -> bool:
        if len(self) > 4096:  # each cell is a file of its own
            self.clear()
        self[file] = file.startswith(self._starts)
        return self[file]


class Call(NamedTuple):
    """Record where a framework was called from."""

    user: FrameType | None
    inner: FrameType | None  # the first frame that is not the framework's
    how: int
    function: str  # the framework's, that was called there
    explicit: bool = False

    def at(self) -> list[tuple[int, int] | None]:
        """Return the position of both frames."""
        return [None if frame is None else (id(frame.f_code), frame.f_lasti) for frame in self[:2]]

    def counting(
        self, copy: bool, operator: str, ends: tuple[str, str], implicit: bool, **about: Any
    ) -> Count:
        """Return a new count for this call."""
        code, at = (None, 0) if self.user is None else in_cell(self.user)
        # Without the code of both frames its address may come to be another's.
        kept = [None if frame is None else frame.f_code for frame in self[:2]]
        return Count(copy, operator, *ends, self.how, code, at, implicit, kept=kept, **about)


def called_from(
    frame: FrameType | None,
    inside: Inside,
    around: Collection[str],
    never: Collection[str] = (),
    threads: Collection[int] = (),
) -> Call | None:
    """Return the caller of a framework; None if it is gpumagic, or a function of `never` alone.

    `around` are functions that wrap the framework's others. If no user's frame led here, one of
    the waiting `threads` did.
    """
    function, printing = "", False
    while frame is not None and inside[frame.f_code.co_filename]:
        name = frame.f_code.co_name
        if name in never:
            return None
        printing = printing or name in PRINTING
        function = function if name in around else name
        frame = frame.f_back
    if frame is not None and is_ours(frame.f_code.co_filename):
        return None
    user, how = locate(frame)
    if user is None:
        user = next(filter(None, map(of_thread, threads)), None)
    return Call(user, frame, PRINT if printing and how == LIBRARY else how, function)


def refusal(count: Count, ask: str, said: str = "") -> str:
    """Return strict's error for an implicit copy or wait, at its line."""
    line = "" if count.code is None else f"{line_at(count.code, count.at).place}: "
    return f"{line}{said or what(count)}, which strict does not allow; {ask}"
