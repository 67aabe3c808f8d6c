"""Run a cell on several devices of this process at the same time, a thread for each.

Each runs the cell on its part of what is split, or with `--chunk` on one part after the other as
long as there are any. Guarantees: the notebook's variables stay where they are; when one thread
fails or the user interrupts, all end; what is gathered is set at the end, or nothing is.
"""

import ast
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpumagic.cluster.device_thread import DeviceThread, Staying
from gpumagic.cluster.ranks_report import RanksReport
from gpumagic.cluster.shared_out import SharedOut, Sharing, check, put_together, said
from gpumagic.cluster.whole_lines import whole_lines
from gpumagic.device import Device
from gpumagic.display.units import some
from gpumagic.errors import GpuError, note
from gpumagic.isolation.settings import deferred, thread_modes
from gpumagic.isolation.worker import wait_for_all
from gpumagic.ledger.memory_meter import MemoryMeter
from gpumagic.usercode.lines import innermost_of
from gpumagic.usercode.program import awaits, compile_cell
from gpumagic.usercode.variables import names_assigned

_MAGICS = ("run_line_magic", "run_cell_magic")


@dataclass(frozen=True)
class PartsDone:
    """How many parts are done."""

    done: int
    total: int
    where: str

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.done / self.total

    def __str__(self) -> str:
        return f"{self.where}: {self.done} of {self.total} parts"


class CellOnDevices:
    """One cell that several devices share; after `run`, `report` says how it went."""

    report: RanksReport

    def __init__(
        self,
        tree: ast.Module,
        file: str,
        devices: Sequence[Device],
        asked: Sharing,
        namespace: dict[str, Any],
        names: Iterable[str],  # that the cell reads
        *,
        flags: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _refuse(tree)
        check(asked, tree, namespace)
        self._asked, self._namespace, self._clock = asked, namespace, clock
        self._devices = devices
        self._codes = compile_cell(tree, file, flags)
        self._shared_out = SharedOut(asked, namespace, len(devices))
        self._names = [name for name in names if name not in asked.split]
        self._own = {*names_assigned(tree), *asked.split}
        self._gathered = (*asked.gather, *dict(asked.reduce))
        self._came: dict[int, tuple[Any, dict[str, Any]]] = {}  # of each part: value, and variables
        self._threads: list[DeviceThread] = []
        self._failed = True  # until all have ended well

    def run(self, told: Callable[[PartsDone | str], object] = lambda progress: None) -> Any:
        """The values of the cell's last expression by part, None if all are; sets the variables."""
        labels: dict[int, str] = {}
        meter = MemoryMeter()
        with ExitStack() as stack:
            stack.callback(self._close)
            self._copy(told)
            stack.callback(meter.stop)
            meter.start()
            stack.enter_context(whole_lines(labels))
            modes = thread_modes()
            set_up = [each.submit(partial(each.set_up, modes, labels)) for each in self._threads]
            wait_for_all(set_up)
            for future in set_up:
                future.result()
            began = self._clock()
            self._run_all(told)
            seconds = self._clock() - began
            self._failed = False
            peaks = {memory.device: memory.peak for memory in meter.stop().values()}
        came = [self._came[number] for number in sorted(self._came)]
        made, wrong = put_together(self._asked, [variables for _, variables in came])
        self._namespace.update(made)
        self._tell(seconds, peaks, made, wrong)
        values = [value for value, _ in came]
        return None if all(value is None for value in values) else values

    def _copy(self, told: Callable[[str], object]) -> None:
        stays = Staying(self._names, self._namespace, self._own)
        for name in self._asked.split:
            stays.keep(self._namespace[name])
        self._sent = stays.with_tensors
        for device in self._devices:
            told(f"copying to {device}")
            self._threads.append(
                DeviceThread(device, self._codes, self._namespace, self._names, stays, self._clock)
            )

    def _run_all(self, told: Callable[[PartsDone], object]) -> None:
        futures: dict[Future[Any], DeviceThread] = {}
        try:
            for thread, queue in zip(self._threads, self._shared_out.queues, strict=True):
                futures[thread.submit(partial(self._work, thread, queue, told))] = thread
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
        for queue in self._shared_out.queues:
            queue.clear()
        for future, thread in futures.items():
            if not future.done():
                thread.interrupt()
        wait_for_all(futures)

    def _work(
        self, thread: DeviceThread, queue: "deque[int]", told: Callable[[PartsDone], object]
    ) -> None:
        """On a thread: run parts as long as there are any."""
        where = some(str(device) for device in self._devices)
        while True:
            told(PartsDone(len(self._came), self._shared_out.total, where))
            try:
                number = queue.popleft()
            except IndexError:
                return
            thread.number = number
            value = thread.run(self._shared_out.part(number))
            self._came[number] = value, thread.has(self._gathered)

    def _place(self, error: BaseException, thread: DeviceThread) -> str:
        """Where an error was: the device, the line, and in pieces of which items."""
        line = innermost_of(error.__traceback__)
        where = [f"on {thread.device}", line.place if line else ""]
        if self._asked.chunk:
            start, stop = self._shared_out.bounds[thread.number]
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
            str(self._shared_out),
            tuple(sent),
            sum(each.copied_bytes for each in threads),
            sum(each.copy_seconds for each in threads),
            made=said(self._asked, made, len(self._came)),
            notes=tuple(notes),
            wrong=tuple(wrong),
        )

    def _close(self) -> None:
        with deferred():
            wait_for_all([each.submit(each.leave) for each in self._threads])
            for each in self._threads:
                each.close(failed=self._failed)
        if self._failed:
            self._came.clear()


def _interrupted(futures: dict[Future[Any], DeviceThread]) -> KeyboardInterrupt:
    """An interrupt that says where the threads were."""
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
