"""Run a cell on several devices of this process at once, one thread each.

A thread has its own variables above the notebook's: copies on its device of the values that hold
tensors, its parts of split variables, and what the cell assigns. Everything else is shared with the
notebook.

Each thread runs the cell on its part, or with `--chunk` on one part after the other. Guarantees:
the notebook's variables stay where they are; if one thread fails or the user interrupts, all end;
gathered variables are assigned at the end, all or none.
"""

import ast
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch.utils.data import Dataset

from gpumagic.cluster.output import whole_lines
from gpumagic.cluster.ranks_report import RanksReport, RankTime
from gpumagic.cluster.scattered import Sharing, SplitValues, check, put_together, sharing_in_words
from gpumagic.copies.trial import CopiedVariables, place
from gpumagic.device import Device
from gpumagic.display.units import some
from gpumagic.errors import GpuError, note
from gpumagic.isolation.settings import deferred, thread_modes
from gpumagic.isolation.worker import Worker, wait_for_all
from gpumagic.ledger.memory_meter import MemoryMeter
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.moving.move import wait_for
from gpumagic.placement.torch_devices import as_torch
from gpumagic.usercode.lines import innermost_of
from gpumagic.usercode.program import awaits, compile_cell, own_code
from gpumagic.usercode.variables import names_assigned, variables_read

Codes = tuple[CodeType, CodeType | None]
# One thread at a time: an object with a lock cannot be copied twice at once.
_copying = threading.Lock()


class SharedVariables:
    """Decides which variables of a cell are shared, and which names hold tensors.

    A function is copied if it reaches a tensor, or a name of the thread's own.
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
            if name not in namespace:  # values of a closure belong to its function
                continue
            reached = list(variables_read([name], space, module))
            finder = TensorFinder(module)
            finder.variables(reached)
            if any(found.root == name for found in finder.tensors):
                self.with_tensors.append(name)
            if not finder.tensors and mine.keys().isdisjoint(n for n, _ in reached if n != name):
                self._kept[id(value)] = value

    def keep(self, value: Any) -> None:
        """Add a shared value."""
        self._kept[id(value)] = value

    def __call__(self, value: Any) -> bool:
        return id(value) in self._kept or issubclass(type(value), Dataset)


def _is_plain(value: Any) -> bool:
    # Classes of the notebook are shared by all parts, not copied.
    return issubclass(type(value), (type, Dataset))


class DeviceThread:
    """A device, its thread, and the thread's variables."""

    def __init__(
        self,
        device: Device,
        codes: Codes,
        namespace: dict[str, Any],
        names: Iterable[str],
        stays: SharedVariables,
    ) -> None:
        self.device, self._target = device, as_torch(device)
        self._namespace = namespace
        self._codes = [None if code is None else own_code(code) for code in codes]
        self._context, self.stack = copy_context(), ExitStack()
        self.worker = Worker(str(device))
        self.seconds, self.parts = 0.0, 0  # the seconds of the cell's code
        self.number = 0  # the number of its current or last part
        self._copies = CopiedVariables(namespace, names, self._target, stays=stays)
        self.copied_bytes, self.copy_seconds = self._copies.sent, self._copies.seconds
        self.notes = self._copies.notes
        self.sent: dict[str, None] = {}  # names of copied parts

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        """Queue a job for the thread."""
        # The notebook finds the printing cell by the context.
        return self.worker.submit(partial(self._context.run, job))

    def set_up(self, modes: Callable[[ExitStack], None], labels: dict[int, str]) -> None:
        """On the thread: enter the placement, with the caller's modes."""
        labels[threading.get_ident()] = str(self.device)
        modes(self.stack)
        place(self.stack, self._target, self._copies.globals)

    def run(self, part: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """On the thread: run the cell on a part; return its value and its variables."""
        space = self._copies.globals
        space.update(self._brought(part))
        began, value = time.perf_counter(), None
        for code in self._codes:
            value = None if code is None else FunctionType(code, space)()
        wait_for(self._target)
        self.seconds += time.perf_counter() - began
        self.parts += 1
        return value, space

    def _brought(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a part on the device; a part without tensors itself."""
        finder = TensorFinder(self._namespace.get("__name__", "__main__"))
        finder.variables(part.items())
        if not finder.tensors:
            return part
        space = {**self._namespace, **part}
        with _copying:
            copies = CopiedVariables(space, part, self._target, stays=_is_plain)
        self.sent |= dict.fromkeys(found.root for found in finder.tensors)
        self.copied_bytes += copies.sent
        self.copy_seconds += copies.seconds
        return {name: copies.globals[name] for name in part}

    def time(self, rank: int, peaks: Mapping[str, int]) -> RankTime:
        """Return its time, with the peak memory by device."""
        peak, virtual = peaks.get(str(self.device)), self.device.virtual
        return RankTime(rank, self.seconds, peak, self.parts, virtual, str(self.device))

    def close(self, *, failed: bool) -> None:
        """End the thread. Gathered functions keep its variables. An error loses them, or its frames
        would keep copies on every device."""
        self.worker.close()
        self._copies.close(emptied=failed)


_MAGICS = ("run_line_magic", "run_cell_magic")


class CellOnDevices:
    """One cell on several devices; `report` is set after `run`."""

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
    ) -> None:
        _refuse(tree)
        check(asked, tree, namespace)
        self._asked, self._namespace = asked, namespace
        self._devices = devices
        self._codes = compile_cell(tree, file, flags)
        self._split = SplitValues(asked, namespace, len(devices))
        self._names = [name for name in names if name not in asked.split]
        self._own = {*names_assigned(tree), *asked.split}
        self._gathered = (*asked.gather, *dict(asked.reduce))
        self._came: dict[int, tuple[Any, dict[str, Any]]] = {}  # by part: value and variables
        self._threads: list[DeviceThread] = []
        self._failed = True  # until all have succeeded

    def run(self, progress: Callable[[str], object] = lambda step: None) -> Any:
        """Run the cell; return its last expression by part, None if all are; set the variables."""
        labels: dict[int, str] = {}
        meter = MemoryMeter()
        with ExitStack() as stack:
            stack.callback(self._close)
            self._copy(progress)
            stack.callback(meter.stop)
            meter.start()
            stack.enter_context(whole_lines(labels))
            modes = thread_modes()
            set_up = [each.submit(partial(each.set_up, modes, labels)) for each in self._threads]
            wait_for_all(set_up)
            for future in set_up:
                future.result()
            began = time.perf_counter()
            self._run_all(progress)
            seconds = time.perf_counter() - began
            self._failed = False
            peaks = {memory.device: memory.peak for memory in meter.stop()}
        came = [self._came[number] for number in sorted(self._came)]
        made, wrong = put_together(self._asked, [variables for _, variables in came])
        self._namespace.update(made)
        self._tell(seconds, peaks, made, wrong)
        values = [value for value, _ in came]
        return None if all(value is None for value in values) else values

    def _copy(self, progress: Callable[[str], object]) -> None:
        stays = SharedVariables(self._names, self._namespace, self._own)
        for name in self._asked.split:
            stays.keep(self._namespace[name])
        self._sent = stays.with_tensors
        for device in self._devices:
            progress(f"copying to {device}")
            self._threads.append(
                DeviceThread(device, self._codes, self._namespace, self._names, stays)
            )

    def _run_all(self, progress: Callable[[str], object]) -> None:
        futures: dict[Future[Any], DeviceThread] = {}
        try:
            for thread, queue in zip(self._threads, self._split.queues, strict=True):
                futures[thread.submit(partial(self._work, thread, queue, progress))] = thread
            wait_for_all(futures, "FIRST_EXCEPTION")
            failed = [(f, error) for f in futures if f.done() and (error := f.exception())]
            if failed:
                self._end(futures)
                future, error = failed[0]
                note(error, self._place(error, futures[future]))
                raise error
        except KeyboardInterrupt:
            self._end(futures)
            raise _interrupted(futures) from None

    def _end(self, futures: dict[Future[Any], DeviceThread]) -> None:
        for queue in self._split.queues:
            queue.clear()
        for future, thread in futures.items():
            if not future.done():
                thread.worker.interrupt()
        wait_for_all(futures)

    def _work(
        self, thread: DeviceThread, queue: "deque[int]", progress: Callable[[str], object]
    ) -> None:
        """On a thread: run parts until none is left."""
        where = some(str(device) for device in self._devices)
        while True:
            progress(f"{where}: {len(self._came)} of {self._split.total} parts")
            try:
                number = queue.popleft()
            except IndexError:
                return
            thread.number = number
            value, space = thread.run(self._split.part(number))
            self._came[number] = value, {n: space[n] for n in self._gathered if n in space}

    def _place(self, error: BaseException, thread: DeviceThread) -> str:
        """Return an error's place: the device, the line, and the items of the part."""
        line = innermost_of(error.__traceback__)
        where = [f"on {thread.device}", line.place if line else ""]
        if self._asked.chunk:
            start, stop = self._split.bounds[thread.number]
            where += [f"{name}[{start}:{stop}]" for name in self._asked.split]
        return ", ".join(filter(None, where))

    def _tell(
        self, seconds: float, peaks: dict[str, int], made: dict[str, Any], wrong: list[str]
    ) -> None:
        threads = self._threads
        sent = dict.fromkeys(self._sent) | {n: None for each in threads for n in each.sent}
        fallen = [f"{device}: {device.note}" for device in self._devices if device.note]
        notes = dict.fromkeys([*fallen, *(line for each in threads for line in each.notes)])
        self.report = RanksReport(
            tuple(each.time(rank, peaks) for rank, each in enumerate(threads)),
            seconds,
            str(self._split),
            tuple(sent),
            sum(each.copied_bytes for each in threads),
            sum(each.copy_seconds for each in threads),
            made=sharing_in_words(self._asked, made, len(self._came)),
            notes=tuple(notes),
            wrong=tuple(wrong),
        )

    def _close(self) -> None:
        with deferred():
            wait_for_all([each.submit(each.stack.close) for each in self._threads])
            for each in self._threads:
                each.close(failed=self._failed)
        if self._failed:
            self._came.clear()


def _interrupted(futures: dict[Future[Any], DeviceThread]) -> KeyboardInterrupt:
    """Return an interrupt that says where the threads were."""
    places = []
    for future, thread in futures.items():
        error = future.exception()
        line = innermost_of(error.__traceback__) if error else None
        places += [f"{thread.device} was at {line.place}: {line.source}"] if line else []
    return KeyboardInterrupt("; ".join([*places, "nothing was gathered"]))


def _refuse(tree: ast.Module) -> None:
    if line := awaits(tree):
        raise GpuError(f"line {line} awaits, and threads have no loop; await it in a cell before")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _MAGICS:
            name = "%" + str(ast.literal_eval(node.args[0]))
            raise GpuError(
                f"the cell says {name}, and a magic runs on the notebook's own variables; "
                "leave that line out"
            )
