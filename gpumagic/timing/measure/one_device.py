"""One device: its world, in this thread, which can be interrupted at any step of Python."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from gpumagic.isolation.output import Quiet
from gpumagic.timing.measure.stopwatch import Lap, Stopwatch
from gpumagic.timing.measure.trial import Trial


class Alone:
    """The program on one device; in shape as `Together`."""

    failed: str | None = None

    def __init__(self, trials: Sequence[Trial], stopwatch: Stopwatch, quiet: Quiet) -> None:
        (self._trial,) = self.trials = trials
        self._stopwatch, self._quiet = stopwatch, quiet
        self._stack = ExitStack()

    def set_up(self, n: int) -> None:
        """Place this thread on the device and run the set-up there."""
        self._stack.enter_context(self._trial.placed())
        self._trial.set_up()

    def first(self, n: int) -> Any:
        """The first run; its value."""
        return self._trial.first()

    def lap(self, number: int) -> Lap:
        """A block of runs."""
        with self._quiet:
            return self._stopwatch.lap(self._trial.run, number, [self._trial.device])

    def close(self) -> None:
        """Leave the device."""
        self._stack.close()
