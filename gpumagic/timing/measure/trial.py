"""Run a program on one device at one value: on copies of what it reads, placed there.

Guarantees: after `leave` and `close` nothing of it is left, on the device or in the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from gpumagic.copies.namespace import CopiedVariables
from gpumagic.placement.scope import suspended
from gpumagic.placement.swap import enter, leave
from gpumagic.timing.measure.program import Program
from gpumagic.timing.measure.stopwatch import Lap, Stopwatch
from gpumagic.timing.result.outcome import outcome


class Trial:
    """The program on one device, which finds the sweep's variables set to `values`."""

    # After `set_up`: runs the code once for each item of what it is given.
    loop: Callable[[Iterable[None]], object]

    def __init__(
        self,
        program: Program,
        device: torch.device,
        namespace: dict[str, Any],
        values: Mapping[str, Any],
        *,
        in_place: bool,
        clock: Callable[[], float],
    ) -> None:
        self.device = device
        self._program, self._values = program, values
        self._before = {n: namespace[n] for n in values if n in namespace} if in_place else None
        self._stack = ExitStack()
        # Last: an interrupt after it would not be followed by `close`.
        self._copies = CopiedVariables(
            namespace,
            [name for name in program.reads if name not in values],
            device,
            function=program.function,
            in_place=in_place,
            clock=clock,
        )
        self.copied, self.copy_seconds = self._copies.nbytes, self._copies.seconds
        self.notes = self._copies.notes

    @contextmanager
    def _placed(self) -> Iterator[None]:
        """New tensors are made on the device; on the CPU that is so without any doing of ours."""
        if self.device.type == "cpu" and torch.get_default_device().type == "cpu":
            with suspended():
                yield
            return
        placement = enter(self.device, namespace=self._copies.globals)
        try:
            yield
        finally:
            leave(placement)

    def set_up(self) -> None:
        """Place this thread, set the sweep's variables, and run the set-up."""
        self._stack.enter_context(self._placed())
        space = self._copies.globals
        space.update(self._values)
        self._program.set_up(space)
        self.loop = self._program.looped(space, self._copies.function)

    def first(self) -> Any:
        """Run once; its value."""
        return self._program.once(self._copies.globals, self._copies.function)

    def numbers(self, value: Any) -> dict[str, Any]:
        """The numbers, on the CPU, in `value` and in what the code has assigned."""
        return outcome(self._copies.globals, self._program.assigned, value)

    def leave(self) -> None:
        """End the placement, on the thread that was set up."""
        self._stack.close()

    def close(self) -> None:
        """Let go of everything."""
        space = self._copies.globals
        vars(self).pop("loop", None)
        try:
            self._copies.close()
        finally:
            if self._before is not None:
                for name in self._values:
                    if name in self._before:
                        space[name] = self._before[name]
                    else:
                        space.pop(name, None)


class Alone:
    """One device, in this thread, which can be interrupted at any step of Python.

    In shape as `Together`.
    """

    failed: str | None = None

    def __init__(self, trials: Sequence[Trial], stopwatch: Stopwatch) -> None:
        (self._trial,) = self.trials = trials
        self._stopwatch = stopwatch
        self.lap: Callable[[int], Lap]  # times a block of runs; after `set_up`

    def set_up(self, n: int) -> None:
        """Place this thread on the device and run the set-up there."""
        trial = self._trial
        trial.set_up()
        self.lap = partial(self._stopwatch.lap, trial.loop, on=[trial.device])

    def first(self, n: int) -> Any:
        """The first run; its value."""
        return self._trial.first()

    def close(self) -> None:
        """Leave the device."""
        vars(self).pop("lap", None)
        self._trial.leave()
