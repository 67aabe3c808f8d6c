"""Define what is asked of a framework of arrays beside torch: its devices, its arrays, its copies.

Each class imports its library when it is made, and that is when a cell needs it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from gpumagic.device import Device
from gpumagic.errors import as_typed
from gpumagic.frameworks.exchange import Place, Pool
from gpumagic.ledger.counts import Tally


class Framework(Protocol):
    """A framework that a kernel has imported; what a body answers is so where it has no other."""

    name: str
    """As its people write it: ``"JAX"``."""

    def started(self) -> bool:
        """Whether it has found its devices: what is asked before may start it."""

    def devices(self) -> list[Device]:
        """The GPUs that it can use here, virtual ones too, by ordinal."""

    def own(self, device: Device) -> Any:
        """Its own object for a device, as its functions or `with` take it; or GpuError."""

    def make_virtual(self, count: int) -> None:
        """Have `count` virtual GPUs beside the CPU, 0 for none; GpuError where it is too late."""

    def place(self, device: Device) -> AbstractContextManager[object]:
        """While this holds, what is made with no device named is made on `device`; or GpuError."""

    def is_array(self, value: object) -> bool:
        """Whether it is an array of this framework's, which has bytes on a device."""

    def where(self, array: Any) -> str:
        """The device that an array is on, ``"cuda:1"``; several with ``" + "`` between them."""

    def nbytes(self, array: Any) -> int:
        """The bytes of its data."""

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """A copy on another device, or GpuError; an object that can move itself comes back.

        Of JAX's arrays one that is not `committed` there may be moved by JAX itself.
        """

    def copy(self, array: Any, device: Device) -> Any:
        """A copy of its own on a device, also where it is there: what is given away is not it."""

    def parts(self, value: object) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        """What a container of its own holds, and what makes such a one of other parts.

        None for all else: lists, dicts and the like are looked into without asking here.
        """
        return None

    def knows(self, kind: type) -> bool:
        """Whether it knows a class by its identity: a copy of the class is another to it."""
        return False

    def wait(self) -> None:
        """Wait until all its devices have finished what they were given."""

    def compile_seconds(self) -> float | None:
        """How long it has compiled since this was first asked; None where it does not tell."""
        return None

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """The bytes of its arrays on a device now, and their peak where it is known."""

    def places(self, array: Any) -> list[Place]:
        """The pieces of memory that an array has: one on each device where it has data."""

    def live(self) -> list[Any]:
        """All its arrays that live, where it can list them: those that no variable leads to, too.

        This starts nothing.
        """
        return []

    def pool(self, device: Device) -> Pool | None:
        """What its allocator has of a GPU; None where it does not tell, or has not started."""

    def count(self, tally: Tally, strict: bool) -> AbstractContextManager[object]:
        """While this holds, count its copies between devices and its waits, by the user's line.

        With `strict`, an implicit one raises `CrossDeviceWarning` at its line.
        """


def too_late(framework: str, there: int, wanted: int) -> str:
    """What to say where a framework has started with too few devices for virtual GPUs."""
    devices = f"{there} CPU device{'s' * (there != 1)}"
    return (
        f"{framework} has started in this kernel with {devices}: restart the kernel, and type "
        f"{as_typed(f'%gpus --virtual {wanted}')} before anything uses {framework}"
    )
