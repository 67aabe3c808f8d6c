"""Count the copies of other frameworks in `gpumagic.watch`, by the user's call."""

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.device import here
from gpumagic.frameworks.known import imported
from gpumagic.ledger.advice import what
from gpumagic.ledger.entry import LIBRARY, PRINT, Count, Tally, locate, of_thread
from gpumagic.ledger.watch import BESIDE
from gpumagic.ledger.watch import watch as watch
from gpumagic.usercode.files import is_ours
from gpumagic.usercode.lines import in_cell, line_at


@contextmanager
def _counting(tally: Tally, strict: bool) -> Iterator[None]:
    """Count the copies and waits of all imported frameworks."""
    with ExitStack() as stack:
        others = imported()
        tally.virtual |= bool(others) and any(gpu.virtual for gpu in here(memory=False))
        for framework in others:
            with faults.kept(f"starting the ledger of {framework.name}"):
                stack.enter_context(framework.count(tally, strict))
        yield


BESIDE.append(_counting)


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
