"""Run parts of a cell on one device, on a thread that is placed there.

The thread has variables of its own over the notebook's: copies, on its device, of those that lead
to tensors, its part of those that are split, and what the cell assigns. What holds no tensors is
shared with the notebook.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import Dataset

from gpumagic.cluster.ranks_report import RankTime
from gpumagic.copies.namespace import CopiedVariables
from gpumagic.copies.trial import place
from gpumagic.device import Device
from gpumagic.isolation.worker import Worker
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.compile import own_code
from gpumagic.usercode.variables import variables_read

Codes = tuple[CodeType, CodeType | None]
# One thread at a time: of an object with a lock two copies cannot be made at once.
_copying = threading.Lock()


class Staying:
    """Which of the variables that a cell reads are shared, and the names of those with tensors.

    A function is copied where it leads to a tensor, or to a name that is the thread's own.
    """

    def __init__(
        self, names: Iterable[str], namespace: Mapping[str, Any], own: Iterable[str]
    ) -> None:
        module = namespace.get("__name__", "__main__")
        mine = dict.fromkeys(own)
        space = {**mine, **namespace}
        self._kept: dict[int, Any] = {}
        self.with_tensors: list[str] = []
        for name, value in variables_read(names, space, module):
            if name not in namespace:  # what a function's closure holds is of that function
                continue
            reached = list(variables_read([name], space, module))
            finder = TensorFinder(module)
            finder.variables(reached)
            if any(found.root == name for found in finder.tensors):
                self.with_tensors.append(name)
            if not finder.tensors and mine.keys().isdisjoint(n for n, _ in reached if n != name):
                self._kept[id(value)] = value

    def keep(self, value: Any) -> None:
        """Share one value more."""
        self._kept[id(value)] = value

    def __call__(self, value: Any) -> bool:
        return id(value) in self._kept or issubclass(type(value), Dataset)


def _is_plain(value: Any) -> bool:
    # The notebook's own class is the one of all parts, and of what comes of them.
    return issubclass(type(value), (type, Dataset))


class DeviceThread:
    """A device, its thread, and the variables that this one has."""

    def __init__(
        self,
        device: Device,
        codes: Codes,
        namespace: dict[str, Any],
        names: Iterable[str],
        stays: Staying,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self._target, self._clock = device, as_torch(device), clock
        self._namespace = namespace
        self._codes = [None if code is None else own_code(code) for code in codes]
        self._context, self._stack = copy_context(), ExitStack()
        self._worker = Worker(str(device))
        self.seconds, self.parts = 0.0, 0  # of the cell's own code
        self.number = 0  # of the part that it runs, or ran last
        self._copies = CopiedVariables(
            namespace, names, self._target, stays=stays, otherwise="", clock=clock
        )
        self.copied_bytes, self.copy_seconds = self._copies.sent, self._copies.seconds
        self.notes = self._copies.notes
        self.sent: dict[str, None] = {}  # the names of parts that were copied

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Have the thread do it, after what it was given before."""
        # The notebook knows by its context which cell it is that prints.
        return self._worker.submit(partial(self._context.run, job))

    def interrupt(self) -> None:
        """As Ctrl-C does."""
        self._worker.interrupt()

    def set_up(self, modes: Callable[[ExitStack], None], labels: dict[int, str]) -> None:
        """On the thread: be placed, with the modes of who asked for it."""
        labels[threading.get_ident()] = str(self.device)
        modes(self._stack)
        place(self._stack, self._target, self._copies.globals)

    def run(self, part: dict[str, Any]) -> Any:
        """On the thread: run the cell on a part; its value."""
        space = self._copies.globals
        space.update(self._brought(part))
        began, value = self._clock(), None
        for code in self._codes:
            value = None if code is None else FunctionType(code, space)()
        wait_for(self._target)
        self.seconds += self._clock() - began
        self.parts += 1
        return value

    def _brought(self, part: dict[str, Any]) -> dict[str, Any]:
        """A copy of a part on the device; what holds no tensors is as it is."""
        finder = TensorFinder(self._namespace.get("__name__", "__main__"))
        finder.variables(part.items())
        if not finder.tensors:
            return part
        space = {**self._namespace, **part}
        with _copying:
            copies = CopiedVariables(
                space, part, self._target, stays=_is_plain, otherwise="", clock=self._clock
            )
        self.sent |= dict.fromkeys(found.root for found in finder.tensors)
        self.copied_bytes += copies.sent
        self.copy_seconds += copies.seconds
        return {name: copies.globals[name] for name in part}

    def has(self, names: Iterable[str]) -> dict[str, Any]:
        """Its variables of these names."""
        return {n: self._copies.globals[n] for n in names if n in self._copies.globals}

    def time(self, rank: int, peaks: Mapping[str, int]) -> RankTime:
        """How it fared, with the peaks of memory by device."""
        peak, virtual = peaks.get(str(self.device)), self.device.virtual
        return RankTime(rank, self.seconds, peak, self.parts, virtual, str(self.device))

    def leave(self) -> None:
        """On the thread: be placed no longer."""
        self._stack.close()

    def close(self, *, failed: bool) -> None:
        """End the thread. What was gathered and is defined in its variables goes on having them;
        an error has them no longer, or its frames would keep copies on every device."""
        self._worker.close()
        self._copies.close(emptied=failed)
