"""Run a program on one device, on copies of the variables that it reads.

Guarantees: after `close` it leaves nothing on the device or in the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpumagic.copies.namespace import CopiedVariables
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.usercode.program import FUNCTION, Program
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch


def place(stack: ExitStack, device: torch.device, space: dict[str, Any]) -> None:
    """Place this thread's new tensors on a device, until a stack is closed."""
    from gpumagic.placement import suspended
    from gpumagic.placement.swap import enter, leave

    # The CPU needs nothing.
    if device.type == "cpu" and torch_here().get_default_device().type == "cpu":
        stack.enter_context(suspended())
    else:
        stack.callback(leave, enter(device, namespace=space))


class Trial:
    """The program on one device, with the sweep's variable set by `values`."""

    # Set by `set_up`: runs the code once for each item of an iterable.
    loop: Callable[[Iterable[None]], object]

    def __init__(
        self,
        program: Program,
        device: torch.device | None,  # the device of tensors; None without torch
        namespace: dict[str, Any],
        values: Mapping[str, Any],
        *,
        others: FrameworksOn | None = None,
        clock: Callable[[], float],
    ) -> None:
        self.device = device
        self.where = str(device if others is None else others.device)
        self._others = others
        self._program, self._values = program, values
        self.stack = ExitStack()  # to undo on the thread that was set up
        # Last: after an interrupt `close` would not be called.
        self.copies = CopiedVariables(
            namespace,
            [name for name in program.reads if name not in values],
            device,
            others=others,
            function=program.function,
            clock=clock,
        )

    def set_up(self) -> None:
        """Place this thread, set the sweep's variable, and run the set-up."""
        space = self.copies.globals
        if self.device is not None:
            place(self.stack, self.device, space)
        if self._others is not None:
            self._others.place(self.stack)
        space.update(self._values)
        if self.copies.function is not None:
            space[FUNCTION] = self.copies.function
        self._program.set_up(space)
        self.loop = self._program.looped(space)

    def first(self) -> Any:
        """Run once and return the value."""
        return self._program.once(self.copies.globals)

    def close(self) -> None:
        """Free everything."""
        vars(self).pop("loop", None)
        self.copies.close()
