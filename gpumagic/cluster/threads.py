"""Run a cell on several devices of this process at once, with one thread for each device.

Each thread has its own variables for the names that the cell assigns. If a thread fails or the user
interrupts the cell, all threads end, and no variable is gathered. A *part* is a share of the
variables in ``--split``. A thread gets one part, or takes parts of ``--chunk`` items from a queue.
"""

import ast
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import ContextVar, copy_context
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import Dataset

from gpumagic.cluster.output import RanksReport, RankTime, sent_in_words, whole_lines
from gpumagic.cluster.scattered import Sharing, SplitValues, check, put_together, sharing_in_words
from gpumagic.copies.trial import CopiedVariables, place
from gpumagic.device import Device
from gpumagic.display.units import some
from gpumagic.errors import GpuError, note
from gpumagic.isolation.settings import deferred, thread_modes
from gpumagic.isolation.worker import Worker, wait_for_all
from gpumagic.ledger.dispatch import MemoryMeter
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.files import innermost_of
from gpumagic.usercode.program import compile_cell, own_code
from gpumagic.usercode.variables import names_assigned, variables_read

_MAGICS = ("run_line_magic", "run_cell_magic")
# Only one thread may copy at a time, because several parts may refer to the same object.
_copying = threading.Lock()
_label: ContextVar[str | None] = ContextVar("gpumagic_label", default=None)
"""The label of this thread's output: the name of a `DeviceThread`'s device, or None."""


def _shared(
    names: Iterable[str], namespace: Mapping[str, Any], own: Iterable[str]
) -> tuple[dict[int, Any], list[str]]:
    """Return the values that all threads share, by id, and the names of variables with tensors."""
    module, mine = namespace.get("__name__", "__main__"), dict.fromkeys(own)
    space = {**mine, **namespace}
    kept: dict[int, Any] = {}
    with_tensors: list[str] = []
    for name, value in variables_read(names, space, module):
        if name not in namespace:  # a closure's value, which is copied with the function
            continue
        reached = list(variables_read([name], space, module))
        finder = TensorFinder(reached, module)
        if any(found.root == name for found in finder.tensors):
            with_tensors.append(name)
        # Share values without tensors, except functions that read a thread's own variables.
        if not finder.tensors and mine.keys().isdisjoint(n for n, _ in reached if n != name):
            kept[id(value)] = value
    return kept, with_tensors


class DeviceThread:
    """A device, its thread, and the thread's variables."""

    def __init__(
        self, device: Device, namespace: dict[str, Any], names: list[str], kept: dict[int, Any]
    ) -> None:
        self.device, self.target = device, as_torch(device)
        self._namespace = namespace
        self.worker = Worker(str(device))
        self.seconds, self.parts = 0.0, 0  # seconds in the cell's code, number of parts run
        self.number = 0  # number of the part that runs or ran last
        self.copies = CopiedVariables(
            namespace,
            names,
            self.target,
            stays=lambda value: id(value) in kept or issubclass(type(value), Dataset),
        )
        self.copied_bytes, self.copy_seconds = self.copies.storages.sent, self.copies.seconds
        self.sent: dict[str, None] = {}  # names of the split variables that were copied
        self._versions = _versions(self.copies.globals, names)

    def run(self, codes: Sequence[CodeType | None], part: dict[str, Any]) -> Any:
        """Run the cell on a part; return the cell's value and the thread's variables."""
        space = self.copies.globals
        space.update(self._brought(part))
        began, value = time.perf_counter(), None
        for code in codes:
            value = None if code is None else FunctionType(code, space)()
        wait_for(self.target)
        self.seconds += time.perf_counter() - began
        self.parts += 1
        return value, space

    def _brought(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return the part's variables, copied to the device if any variable has tensors."""
        finder = TensorFinder(part.items(), self._namespace.get("__name__", "__main__"))
        if not finder.tensors:
            return part
        space = {**self._namespace, **part}
        shared = (type, Dataset)  # classes of objects that are not copied
        with _copying:
            copies = CopiedVariables(
                space, part, self.target, stays=lambda value: issubclass(type(value), shared)
            )
        self.sent |= dict.fromkeys(found.root for found in finder.tensors)
        self.copied_bytes += copies.storages.sent
        self.copy_seconds += copies.seconds
        return {name: copies.globals[name] for name in part}

    def changed(self) -> list[str]:
        """Return the variables whose copies the cell has changed in place, as training does."""
        now = _versions(self.copies.globals, [*self._versions])
        return [name for name, count in now.items() if count != self._versions[name]]

    def close(self, *, failed: bool) -> None:
        """End the thread. Keep its variables unless `failed`: gathered functions may read them."""
        self.worker.close()
        # After a failure, empty the dict of variables: the error's frames keep the dict alive.
        self.copies.close(emptied=failed)


def _versions(space: dict[str, Any], names: Iterable[str]) -> Counter[str]:
    """Return for each variable how many in-place changes and gradients its tensors have."""
    held, counts = [(name, space[name]) for name in names if name in space], Counter[str]()
    finder = TensorFinder(held, space.get("__name__", "__main__"))
    for tensor, root in ((found.tensor, found.root) for found in finder.tensors):
        counts[root] += 0 if tensor.is_inference() else tensor._version
        counts[root] += tensor.is_leaf and tensor.grad is not None
    return counts


class CellOnDevices:
    """Run one cell on several devices; `run` sets `report`."""

    report: RanksReport

    def __init__(
        self,
        tree: ast.Module,
        file: str,
        devices: Sequence[Device],
        asked: Sharing,
        namespace: dict[str, Any],
        names: Iterable[str],  # names that the cell reads
        *,
        flags: int = 0,
        explains: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        _refuse_magics(tree)
        check(asked, tree, namespace)
        self._asked, self._namespace = asked, namespace
        self._devices, self._explains = devices, explains
        self._codes = compile_cell(tree, file, flags)
        self._split = SplitValues(asked, namespace, len(devices))
        self._names = [name for name in names if name not in asked.split]
        assigned = names_assigned(tree)
        self._own = {*assigned, *asked.split}
        self._lost = [] if asked.made else [n for n in assigned if n not in asked.split]
        self._came: dict[int, tuple[Any, dict[str, Any]]] = {}  # (value, variables) by part number
        self._threads: list[DeviceThread] = []
        self._failed = True  # until all threads have succeeded

    def run(self, progress: Callable[[str], object] = lambda step: None) -> Any:
        """Run the cell and gather variables. Return the parts' values, or None if all are None."""
        meter = MemoryMeter()
        with ExitStack() as stack:
            stack.callback(self._close)
            kept, self._sent = _shared(self._names, self._namespace, self._own)
            kept |= {id(value): value for value in map(self._namespace.get, self._asked.split)}
            for device in self._devices:
                progress(f"copying to {device}")
                self._threads.append(DeviceThread(device, self._namespace, self._names, kept))
            stack.callback(meter.stop)
            meter.start()
            stack.enter_context(whole_lines(_label.get, bars=True))
            began = time.perf_counter()
            self._run_all(partial(self._work, thread_modes(), progress))
            seconds = time.perf_counter() - began
            changed = dict.fromkeys(name for each in self._threads for name in each.changed())
            self._changed = [name for name in changed if name not in self._own]
            self._failed = False
            peaks = {memory.device: memory.peak for memory in meter.stop()}
        came = [self._came[number] for number in sorted(self._came)]
        made, wrong = put_together(self._asked, [variables for _, variables in came])
        self._namespace.update(made)
        self.report = self._reported(seconds, peaks, made, wrong)
        values = [value for value, _ in came]
        return None if all(value is None for value in values) else values

    def _run_all(self, work: Callable[[DeviceThread, "deque[int]"], None]) -> None:
        futures: dict[Future[Any], DeviceThread] = {}
        try:
            with deferred():  # delay an interrupt until `futures` has all threads
                for thread, queue in zip(self._threads, self._split.queues, strict=True):
                    # ipykernel uses the copied context to show output under the right cell.
                    job = partial(copy_context().run, work, thread, queue)
                    futures[thread.worker.submit(job)] = thread
            wait_for_all(futures, "FIRST_EXCEPTION")
            for future, thread in futures.items():
                if future.done() and (error := future.exception()):
                    self._end(futures)
                    note(error, self._place(error, thread))
                    raise error
        except KeyboardInterrupt:
            self._end(futures)
            raise KeyboardInterrupt("nothing was gathered") from None

    def _work(
        self,
        modes: Callable[[ExitStack], None],
        progress: Callable[[str], object],
        thread: DeviceThread,
        queue: "deque[int]",
    ) -> None:
        """Run the cell for the parts in `queue`. First, `modes` sets modes of torch and NumPy."""
        _label.set(str(thread.device))
        where = some(str(device) for device in self._devices)
        codes = [None if code is None else own_code(code) for code in self._codes]
        with ExitStack() as stack:
            modes(stack)
            place(stack, thread.target, thread.copies.globals)
            while True:
                progress(f"{where}: {len(self._came)} of {self._split.total} parts")
                try:
                    thread.number = queue.popleft()
                except IndexError:
                    return
                with self._explains(str(thread.target)):
                    value, space = thread.run(codes, self._split.part(thread.number))
                kept = {n: space[n] for n in self._asked.made if n in space}
                self._came[thread.number] = value, kept

    def _end(self, futures: dict[Future[Any], DeviceThread]) -> None:
        for queue in self._split.queues:
            queue.clear()
        for future, thread in futures.items():
            if not future.done():
                thread.worker.interrupt()
        wait_for_all(futures)

    def _place(self, error: BaseException, thread: DeviceThread) -> str:
        line = innermost_of(error.__traceback__)
        start, stop = self._split.bounds[thread.number]
        items = [f"{name}[{start}:{stop}]" for name in self._asked.split]
        return ", ".join(filter(None, [f"on {thread.device}", line.place if line else "", *items]))

    def _reported(
        self, seconds: float, peaks: dict[str, int], made: dict[str, Any], wrong: list[str]
    ) -> RanksReport:
        sent = dict.fromkeys([*self._sent, *(name for each in self._threads for name in each.sent)])
        nbytes = sum(each.copied_bytes for each in self._threads)
        notes = [f"{device}: {device.note}" for device in self._devices if device.note]
        notes += dict.fromkeys(line for each in self._threads for line in each.copies.notes)
        said = [
            str(self._split),
            sent_in_words(sent, nbytes, sum(each.copy_seconds for each in self._threads)),
            *sharing_in_words(self._asked, made, len(self._came)),
        ]
        if lost := self._lost:
            said.append(f"not gathered: {some(lost)} (add --gather {','.join(lost)})")
        if self._changed:
            said.append(f"changed in the copies only, not in the notebook: {some(self._changed)}")
        times = [
            RankTime(name, each.seconds, peaks.get(name), each.parts, each.device.virtual)
            for name, each in zip(map(str, self._devices), self._threads, strict=True)
        ]
        return RanksReport(tuple(times), seconds, tuple(said), tuple(notes), tuple(wrong))

    def _close(self) -> None:
        with deferred():
            for each in self._threads:
                each.close(failed=self._failed)
        if self._failed:
            self._came.clear()


def _refuse_magics(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _MAGICS:
            said = ast.unparse(node.func)
            if node.args and isinstance(node.args[0], ast.Constant):
                said = f"%{node.args[0].value!s}"
            why = "magics use the notebook's variables, not each device's copies"
            raise GpuError(f"{said}: {why}; remove that line")
