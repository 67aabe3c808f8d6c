"""Hold the frameworks beside torch that code uses, and the device that it is to run on."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gpumagic.device import Device
from gpumagic.frameworks.framework import Framework


@dataclass(frozen=True)
class Beside:
    """One device, for each framework beside torch."""

    device: Device
    frameworks: tuple[Framework, ...] = ()

    def place(self, stack: ExitStack) -> None:
        """Have this thread make new arrays on the device, until a stack is closed."""
        for framework in self.frameworks:
            stack.enter_context(framework.place(self.device))

    def wait(self) -> None:
        """Wait until all have finished what they were given."""
        for framework in self.frameworks:
            framework.wait()

    def know(self, kind: type) -> bool:
        """Whether one of them knows a class by its identity."""
        return any(framework.knows(kind) for framework in self.frameworks)

    def parts(self, value: object) -> Any:
        """What a container of theirs holds, as `Framework.parts` says it; None of all else."""
        for framework in self.frameworks:
            if (split := framework.parts(value)) is not None:
                return split
        return None

    def of(self, value: object) -> Framework | None:
        """The framework whose array a value is."""
        return next((each for each in self.frameworks if each.is_array(value)), None)
