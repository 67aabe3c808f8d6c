"""Measure every value of a sweep on every device, one after the other.

Guarantees: Ctrl-C keeps what is finished, and what code has set for the process is put back.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from gpumagic.isolation.settings import deferred, kept
from gpumagic.timing.ask.targets import TimedDevices
from gpumagic.timing.measure.failures import is_out_of_memory, say_where, short
from gpumagic.timing.measure.measurement import Measuring, Task
from gpumagic.timing.result.agreement import Agreeing
from gpumagic.timing.result.timing import Timing

OUT_OF_MEMORY, INTERRUPTED = "out of memory", "interrupted"
PRINTED = "what the code prints or displays is shown of its first run only"


class Comparing:
    """All measurements: each value on every device before the next."""

    def __init__(self, task: Task, points: Sequence[Mapping[str, Any]]) -> None:
        self.timings: list[Timing] = []
        self.notes: dict[str, None] = dict.fromkeys(t.note for t in task.targets if t.note)
        self.interrupted = False
        self.agreeing = Agreeing(task.in_place)
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
                    self.agreeing.forget()
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
                where, virtual = target.where, target.virtual
                self.timings.append(
                    Timing(where, name=target.name, values=at, virtual=virtual, error=INTERRUPTED)
                )

    def _measure(self, target: TimedDevices, values: Mapping[str, Any]) -> None:
        task = self._task
        one = Measuring(task, target, values, self.agreeing)
        failure: str | None = None
        try:
            task.reporter.begin(target.where, values)
            with kept():
                one.run()
            self._add(one, None)
        except KeyboardInterrupt:
            self._add(one, None if one.measured else INTERRUPTED)
            raise
        except Exception as error:
            if is_out_of_memory(error) and len(task.targets) * len(self._points) > 1:
                failure = OUT_OF_MEMORY
                self._ended.setdefault(target.where, []).append(values)
            elif any(t.where == target.where and t.seconds for t in self.timings):
                failure = short(error, task.program.filename)
            else:
                say_where(error, task.program.filename, one.failed, values)
                raise
        # Out here: the exception's traceback would keep what was allocated.
        if failure is not None:
            self._add(one, failure)
            _give_back()

    def _add(self, one: Measuring, error: str | None) -> None:
        if self._added is one:  # an interrupt came just after
            return
        timing = one.timing(error)
        if error is not None:
            timing = replace(timing, seconds=(), host=(), device=None, alone=(), energy=None)
        self.timings.append(timing)
        self._added = one
        self.notes |= dict.fromkeys((*one.notes, *([PRINTED] if one.dropped else [])))
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
