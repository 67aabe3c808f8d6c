"""Measure every value of a sweep on every device, one after the other.

Guarantees: Ctrl-C keeps what is finished, and what code has set for the process is put back.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from gpumagic.isolation.settings import deferred, kept
from gpumagic.timing.ask.targets import TimedDevices
from gpumagic.timing.measure.measurement import Measuring, Task
from gpumagic.timing.result.timing import Timing

_OUT_OF_MEMORY, _INTERRUPTED = "out of memory", "interrupted"
_PRINTED = "what the code prints or displays is shown of its first run only"


class Comparing:
    """All measurements: each value on every device before the next."""

    def __init__(self, task: Task, points: Sequence[Mapping[str, Any]]) -> None:
        self.timings: list[Timing] = []
        self.notes: dict[str, None] = dict.fromkeys(t.note for t in task.targets if t.note)
        self.interrupted = False
        self._task, self._points = task, points
        self._added: Measuring | None = None
        self._ended: dict[str, list[Mapping[str, Any]]] = {}

    def run(self) -> None:
        """Measure; Ctrl-C ends it, with what there is by then."""
        try:
            try:
                for values in self._points:
                    for target in self._task.targets:
                        if not self._is_beyond(target.where, values):
                            self._measure(target, values)
                self._task.reporter.close()
            finally:
                with deferred():
                    self._task.agreeing.forget()
                    _give_back()
        except KeyboardInterrupt:
            self.interrupted = True
            self._leave_out()
        if self.interrupted:  # only now: the exception's traceback kept what it met
            _give_back()

    def _leave_out(self) -> None:
        """Say of the devices whose turn did not come that there is nothing of them."""
        known = {timing.where for timing in self.timings}
        at = self.timings[-1].values if self.timings else self._points[0]
        for target in self._task.targets:
            if target.where not in known:
                self.timings.append(Measuring(self._task, target, at).timing(_INTERRUPTED))

    def _measure(self, target: TimedDevices, values: Mapping[str, Any]) -> None:
        task = self._task
        one = Measuring(task, target, values)
        failure: str | None = None
        try:
            task.reporter.begin(target.where, values)
            with kept():
                one.run()
            self._add(one, None)
        except KeyboardInterrupt:
            self._add(one, None if one.timing().seconds else _INTERRUPTED)
            raise
        except Exception as error:
            if _is_out_of_memory(error) and len(task.targets) * len(self._points) > 1:
                failure = _OUT_OF_MEMORY
                self._ended.setdefault(target.where, []).append(values)
            elif any(t.where == target.where and t.seconds for t in self.timings):
                failure = _short(error, task.program.filename)
            else:
                _say_where(error, task.program.filename, one.failed, values)
                raise
        # Out here: the exception's traceback would keep what was allocated.
        if failure is not None:
            self._add(one, failure)
            _give_back()

    def _add(self, one: Measuring, error: str | None) -> None:
        if self._added is one:  # an interrupt came just after
            return
        timing = one.timing(error)
        self.timings.append(timing)
        self._added = one
        self.notes |= dict.fromkeys((*one.notes, *([_PRINTED] if one.quiet.dropped else [])))
        self._task.reporter.end(timing.median, error or "done")

    def _is_beyond(self, where: str, values: Mapping[str, Any]) -> bool:
        """Whether the device had no memory for a value that is no larger."""
        for ended in self._ended.get(where, []):
            with suppress(TypeError):
                if all(values[name] >= value for name, value in ended.items()):
                    return True
        return False


def _give_back() -> None:
    """Free what torch keeps for tensors to come, which there were only here."""
    gc.collect()
    # A GPU that has failed says so here too, and the cell's own error tells more.
    with suppress(RuntimeError, AssertionError):
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        elif torch.backends.mps.is_available():
            torch.mps.empty_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: that of a GPU, by torch's own class, or the host's."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    # The host's allocator raises a plain RuntimeError.
    return known or "DefaultCPUAllocator" in str(error)


def _line_of(error: BaseException, filename: str, before: str) -> str:
    """The line of the user's own code that the error came through last, where that is known."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == filename]
    return f"{before}line {lines[-1]}" if lines else ""


def _short(error: BaseException, filename: str) -> str:
    """``"ValueError at line 3: shapes differ"``."""
    text = str(error).strip().partition("\n")[0]
    at = _line_of(error, filename, " at ")
    return f"{type(error).__name__}{at}{f': {text}' if text else ''}"


def _say_where(error: BaseException, filename: str, where: str, values: Mapping[str, Any]) -> None:
    """Have the error's traceback say which device it was on, and at which line and value."""
    at = "".join(f", {name} = {value!r}" for name, value in values.items())
    note = f"timed on {where}{at}{_line_of(error, filename, ', ')}"
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        print(f"{type(error).__name__}: {note}", file=sys.stderr)
