"""Run a program on one device, on copies of the variables that it reads.

Guarantees: after `close` nothing of it is left, on the device or in the variables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpumagic.copies.namespace import CopiedVariables
from gpumagic.frameworks.beside import Beside
from gpumagic.usercode.program import FUNCTION, Program
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    import torch


def place(stack: ExitStack, device: torch.device, space: dict[str, Any]) -> None:
    """Have this thread make new tensors on a device, until a stack is closed."""
    from gpumagic.placement.scope import suspended
    from gpumagic.placement.swap import enter, leave

    # On the CPU that is so without any doing of ours.
    if device.type == "cpu" and torch_here().get_default_device().type == "cpu":
        stack.enter_context(suspended())
    else:
        stack.callback(leave, enter(device, namespace=space))


class Trial:
    """The program on one device, which finds the sweep's variables set to `values`."""

    # After `set_up`: runs the code once for each item of what it is given.
    loop: Callable[[Iterable[None]], object]

    def __init__(
        self,
        program: Program,
        device: torch.device | None,  # where tensors are; None without torch
        namespace: dict[str, Any],
        values: Mapping[str, Any],
        *,
        beside: Beside | None = None,
        in_place: bool,
        clock: Callable[[], float],
    ) -> None:
        self.device = device
        self.where = str(device if beside is None else beside.device)
        self._beside = beside
        self._program, self._values = program, values
        ours = (*values, FUNCTION)  # which one within another's code finds there
        self._before = {n: namespace[n] for n in ours if n in namespace} if in_place else None
        self.stack = ExitStack()  # what is to be undone on the thread that was set up
        # Last: an interrupt after it would not be followed by `close`.
        self.copies = CopiedVariables(
            namespace,
            [name for name in program.reads if name not in values],
            device,
            beside=beside,
            function=program.function,
            in_place=in_place,
            clock=clock,
        )

    def set_up(self) -> None:
        """Place this thread, set the sweep's variables, and run the set-up."""
        space = self.copies.globals
        if self.device is not None:
            place(self.stack, self.device, space)
        if self._beside is not None:
            self._beside.place(self.stack)
        space.update(self._values)
        if self.copies.function is not None:
            space[FUNCTION] = self.copies.function
        self._program.set_up(space)
        self.loop = self._program.looped(space)

    def first(self) -> Any:
        """Run once; its value."""
        return self._program.once(self.copies.globals)

    def close(self) -> None:
        """Let go of everything."""
        space = self.copies.globals
        vars(self).pop("loop", None)
        try:
            self.copies.close()
        finally:
            if self._before is not None:
                for name in {*self._values, FUNCTION} - self._before.keys():
                    space.pop(name, None)
                space.update(self._before)
