"""One device at one value: a world of its own, its set-up, its first run, its blocks of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from gpumagic.copies.namespace import CopiedVariables
from gpumagic.placement.scope import suspended
from gpumagic.placement.swap import enter, leave
from gpumagic.timing.measure.program import Program
from gpumagic.timing.result.outcome import outcome


class Trial:
    """The program on one device, on copies of what it reads.

    Parameters
    ----------
    program : Program
    device : torch.device
    namespace : dict
        The user's variables.
    values : mapping
        The sweep's variables, which the program finds set.
    in_place : bool
        On the variables themselves.
    clock : callable
        Seconds.
    """

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
        self._run: Callable[[Iterable[None]], None] | None = None
        # Last: an interrupt after it would not be followed by `close`.
        self._world: CopiedVariables | None = CopiedVariables(
            namespace,
            [name for name in program.reads if name not in values],
            device,
            function=program.function,
            in_place=in_place,
            clock=clock,
        )
        self.copied, self.copy_seconds = self._world.nbytes, self._world.seconds
        self.notes = self._world.notes

    @property
    def world(self) -> CopiedVariables:
        """What the program sees."""
        if self._world is None:
            raise RuntimeError("this trial is over")
        return self._world

    @contextmanager
    def placed(self) -> Iterator[None]:
        """New tensors are made on the device; on the CPU that is so without any doing of ours."""
        if self.device.type == "cpu" and torch.get_default_device().type == "cpu":
            with suspended():
                yield
            return
        place = enter(self.device, namespace=self.world.globals)
        try:
            yield
        finally:
            leave(place)

    def set_up(self) -> None:
        """Set the sweep's variables, and run the set-up."""
        self.world.globals.update(self._values)
        self._program.set_up(self.world.globals)
        self._run = self._program.looped(self.world.globals, self.world.function)

    def first(self) -> Any:
        """Run once; its value."""
        return self._program.once(self.world.globals, self.world.function)

    def numbers(self, value: Any) -> dict[str, Any]:
        """The numbers, on the CPU, in `value` and in what the code has assigned."""
        return outcome(self.world.globals, self._program.assigned, value)

    def run(self, runs: Iterable[None]) -> None:
        """Run once for each item."""
        assert self._run is not None
        self._run(runs)

    def close(self) -> None:
        """Let go of everything."""
        world, self._world, self._run = self._world, None, None
        if world is None:
            return
        space = world.globals
        try:
            world.close()
        finally:
            if self._before is not None:
                for name in self._values:
                    if name in self._before:
                        space[name] = self._before[name]
                    else:
                        space.pop(name, None)
