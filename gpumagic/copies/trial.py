"""Run code on copies of variables, so that the user's variables do not change.

Several threads may use copies at once. No copy remains after `close`, an error or an interrupt.
"""

import builtins
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from gpumagic.copies.copier import Copier
from gpumagic.copies.storages import StorageCopier
from gpumagic.device import cuda_state
from gpumagic.errors import GpuError
from gpumagic.faults import first_line, in_words
from gpumagic.frameworks.framework import NO_OTHERS, FrameworksOn
from gpumagic.frameworks.public import explained_at_once
from gpumagic.moving.moved import Left
from gpumagic.usercode.program import FUNCTION, Program
from gpumagic.usercode.values import comes_from, torch_here

if TYPE_CHECKING:
    import torch

_FUNCTION = "(function)"


class CopiedVariables:
    """Copy the variables that code and its functions read, to one device."""

    def __init__(
        self,
        namespace: dict[str, Any],
        names: Iterable[str],
        device: "torch.device | None",
        *,
        others: FrameworksOn = NO_OTHERS,
        function: Callable[..., Any] | None = None,
        stays: Callable[[Any], bool] | None = None,  # returns True for objects to share
    ) -> None:
        self.seconds = 0.0  # time of copying, including synchronization
        self.notes: tuple[str, ...] = ()
        self.left: list[Left] = []  # values whose tensors stay on their devices, such as datasets
        self.function = function
        # Share variables that the code does not read. torch's dispatch modes need `__builtins__`.
        self.globals = {"__builtins__": builtins, **namespace}
        self.storages = StorageCopier(others)
        values = {n: namespace[n] for n in names if n in namespace and n != "__builtins__"}
        if function is not None:
            values[_FUNCTION] = function
        start = time.perf_counter()
        try:
            self._copy(Copier(namespace, self.globals, self.storages, stays), values, device)
            if device is not None:
                from gpumagic.moving.move import wait_for

                wait_for(device)
            others.wait()
            self.seconds = time.perf_counter() - start
        except BaseException as error:  # noqa: BLE001  the error's frames keep copies alive
            self.close()
            raise error.with_traceback(None) from None

    def close(self, *, emptied: bool = True) -> None:
        """Free the copies at once. If not `emptied`, copied functions in use keep their globals."""
        made = self.storages.made()
        self.storages.clear()
        space, self.globals, self.function = self.globals, {}, None
        if emptied:
            for name in [n for n in space if not n.startswith("__")]:
                del space[name]
        del space
        if any(reference() is not None for reference in made):
            # Functions, classes and hooks form cycles, which only the garbage collector frees.
            cuda_state.collect()

    def _copy(self, copier: Copier, values: dict[str, Any], device: "torch.device | None") -> None:
        try:
            for name, value in values.items():
                try:
                    copier.write(value)
                except Exception as error:  # noqa: BLE001  pickling runs the user's methods
                    if name == _FUNCTION:
                        name = getattr(value, "__name__", "the function")
                    raise GpuError(
                        f"{name} cannot be copied ({first_line(error)}), so each run would change "
                        "it; create it in the cell"
                    ) from None
            every = {**values, **copier.read_by_functions}
            homes, self.notes, self.left = _homes(self.globals, every, device)
            self.storages.copy(homes)
            try:
                made = copier.read(values)
            except Exception as error:
                if comes_from(type(error), "torch.OutOfMemoryError"):
                    raise
                raise GpuError(
                    f"copying {', '.join(values)} raised {in_words(error)}; create them in the cell"
                ) from None
        finally:
            copier.clear()
        self.function = made.pop(_FUNCTION, None)
        self.globals.update(made)


def _homes(
    namespace: Mapping[str, Any], values: Mapping[str, Any], device: "torch.device | None"
) -> tuple[dict[int, "torch.device"], tuple[str, ...], list[Left]]:
    """Return the devices of copies by tensor id, notes on lost graphs, and the values that stay."""
    if device is None:
        return {}, (), []
    from gpumagic.moving.find_tensors import TensorFinder

    finder = TensorFinder(values.items(), namespace.get("__name__") or "__main__")
    tracked = (found.path for found in finder.tensors if found.tensor.grad_fn is not None)
    notes = dict.fromkeys(f"{path}: copied without its autograd graph" for path in tracked)
    left = [*finder.left, *(held.left for held in finder.staying if held.must_move(device))]
    homes = {id(found.tensor): found.home or device for found in finder.tensors}
    return homes, tuple(notes), left


def place(stack: ExitStack, device: "torch.device", space: dict[str, Any]) -> None:
    """Place this thread's new tensors on a device, until `stack` is closed."""
    from gpumagic.placement import suspended
    from gpumagic.placement.swap import enter, leave

    if device.type == "cpu" and torch_here().get_default_device().type == "cpu":
        stack.enter_context(suspended())
    else:
        stack.callback(leave, enter(device, namespace=space))


class Trial:
    """Run a program on one device. Set the variables in `values`; copy its other variables."""

    # `set_up` sets this function, which runs the code once for each item of an iterable.
    loop: Callable[[Iterable[None]], object]

    def __init__(
        self,
        program: Program,
        device: "torch.device | None",  # the device of tensors; None without torch
        namespace: dict[str, Any],
        values: Mapping[str, Any],
        *,
        others: FrameworksOn = NO_OTHERS,
    ) -> None:
        self.device = device
        self.where = str(device or others.device)
        self._others = others
        self._program, self._values = program, values
        self.stack = ExitStack()  # close it on the thread that ran `set_up`
        # Copy last. If an interrupt ended this method after the copy, no code would call `close`.
        self.copies = CopiedVariables(
            namespace,
            [name for name in program.reads if name not in values],
            device,
            others=others,
            function=program.function,
        )

    def set_up(self) -> None:
        """Place this thread's new tensors on the device, set `values`, and run the set-up code."""
        space = self.copies.globals
        if self.device is not None:
            place(self.stack, self.device, space)
        self._others.place(self.stack)
        space.update(self._values)
        if self.copies.function is not None:
            space[FUNCTION] = self.copies.function
        with explained_at_once(str(self.device or "")):
            self._program.set_up(space)
        self.loop = self._program.looped(space)

    def first(self) -> Any:
        with explained_at_once(str(self.device or "")):
            return self._program.once(self.copies.globals)

    def has_copies_there(self) -> bool:
        """Whether the device has copied tensors, which code can use without an allocation there."""
        return any(copy.device == self.device for _, copy in self.copies.storages.tensors())

    def close(self) -> None:
        vars(self).pop("loop", None)
        self.copies.close()
