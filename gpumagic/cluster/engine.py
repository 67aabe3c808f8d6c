"""Run this process as a rank: join the process group, run cells, report the current line.

A collective waits in C++, where Ctrl-C has no effect. To end a collective, a thread closes the
process group's connections. Then the collective raises an error, and the rank keeps its variables.
"""

import ast
import contextlib
import json
import linecache
import os
import signal
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from gpumagic import faults, virtual
from gpumagic.cell.run import Run
from gpumagic.cluster import launching, sending
from gpumagic.cluster.output import MOST, WholeLines, whole_lines
from gpumagic.cluster.sending import Fingerprint
from gpumagic.errors import GpuError
from gpumagic.memory.explain_out_of_memory import explain_out_of_memory
from gpumagic.mismatch.explainer import explain
from gpumagic.placement.torch_devices import find
from gpumagic.telemetry.host import host_name
from gpumagic.usercode.files import innermost_of, is_users, shell
from gpumagic.usercode.frames import cut_ours, errors, steps_of
from gpumagic.usercode.program import compile_cell
from gpumagic.usercode.variables import names_assigned, names_read

_dist: Any = dist  # Any, because torch's annotations lack TCPStore and PrefixStore
_PULSE_S = 0.5  # seconds between reports of the current line

# Keys in the notebook's `TCPStore`. If the key `ENDING.format(cell)` exists, that cell must end.
# Each cell has its own key, so that a late interrupt cannot end the next cell.
ENDING = "end/{}"
PULSE = "pulse/{}"  # the key of a rank's last report; ``{}`` is the rank's number

_connections: set[int] = set()  # file descriptors of the process group's sockets
_make_group = distributed_c10d._new_process_group_helper
_init = dist.init_process_group


def _sockets() -> set[int]:
    found = set()
    for each in os.listdir("/proc/self/fd" if sys.platform == "linux" else "/dev/fd"):
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISSOCK(os.fstat(int(each)).st_mode):
                found.add(int(each))
    return found


def _make_and_record_sockets(*args: Any, **kwargs: Any) -> Any:
    before = _sockets()
    try:
        return _make_group(*args, **kwargs)
    finally:
        _connections.update(_sockets() - before)


def _init_once(*args: Any, **kwargs: Any) -> None:
    """Replacement for `init_process_group`, so that a script's call keeps an existing group."""
    if not dist.is_initialized():
        _init(*args, **kwargs)


def join(generation: int) -> None:
    """Leave the process group, if there is one, and join a new group with all other ranks."""
    if dist.is_initialized():
        with faults.kept("leaving a process group"):  # fails if the group is broken
            dist.destroy_process_group()
    _connections.clear()
    distributed_c10d._new_process_group_helper = _make_and_record_sockets
    dist.init_process_group = distributed_c10d.init_process_group = _init_once
    real = not _this.device.virtual and dist.is_nccl_available()
    # Connect to the store again, because a group's wait for a key would block `_this.store`.
    store = _dist.PrefixStore(f"generation-{generation}", _dist.TCPStore(*_this.at))
    backend, ranks = "cpu:gloo,cuda:nccl" if real else "gloo", int(os.environ["WORLD_SIZE"])
    _init(backend, store=store, rank=_this.rank, world_size=ranks)


def _cut() -> bool:
    """Close the group's connections, so that collectives fail. Return False if there are none."""
    if not dist.is_initialized():
        return False
    if "nccl" in dist.get_backend_config():
        distributed_c10d._abort_process_group()
    for number in _connections:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
            connection.getpeername()  # raises for gloo's listening socket, which stays open
            connection.shutdown(socket.SHUT_RDWR)
    return bool(_connections)


def _collectives() -> int:
    """Return the number of collectives that this rank has begun; -1 if unknown."""
    try:
        group: Any = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, ValueError, AttributeError):
        return -1


def _place_of(thread: int) -> tuple[str, int, str]:
    """Return the file and line of user code that a thread runs, and its collective call or ""."""
    call = ""
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        if is_users(code.co_filename):
            return code.co_filename, frame.f_lineno, call
        if code.co_filename == distributed_c10d.__file__ and code.co_name != "wrapper":
            call = code.co_name
        elif code.co_name == "_engine_run_backward":
            call = call or "backward"
        frame = frame.f_back
    return "", 0, call


class ThisRank:
    """This process as a rank, connected to the notebook's `TCPStore`."""

    def __init__(self, store: tuple[str, int]) -> None:
        self.rank, self.device = int(os.environ["RANK"]), find("cuda:0")
        self.at, self.store = store, _dist.TCPStore(*store)
        self.output: WholeLines | None = None  # the cell's output
        self.cut = False  # whether `_cut` has closed connections of the process group
        self.in_code = self.left_code = False  # whether the user's code is running; has ended
        self._main = threading.get_ident()
        self._running = ""  # the id of the running cell
        threading.Thread(target=self._pulse, daemon=True).start()

    @contextmanager
    def runs(self, cell: str, name: str) -> Iterator[None]:
        """Within the context, report the cell's current line, and let an interrupt end the cell."""
        handler = signal.signal(signal.SIGINT, self._interrupt)
        self.cut = self.left_code = False
        self._running = cell
        try:
            with whole_lines(lambda: name, MOST) as self.output:
                yield
        finally:
            self._running = ""
            signal.signal(signal.SIGINT, handler)

    def _is_to_end(self, cell: str) -> bool:
        return bool(cell) and bool(self._call("check", [ENDING.format(cell)]))

    def _call(self, method: str, *args: Any) -> Any:
        """Call the notebook's store; end this process if the notebook is gone."""
        try:
            return getattr(self.store, method)(*args)
        except RuntimeError:  # the notebook is gone
            launching.end(os.environ[launching.MARK])  # also ends child processes
            os._exit(1)

    def _interrupt(self, *_: object) -> None:
        """Raise KeyboardInterrupt if the user's code is running and the cell must end."""
        if self.in_code and self._is_to_end(self._running):
            self.in_code = False
            raise KeyboardInterrupt

    def _pulse(self) -> None:
        """Report the cell's line and idle time twice a second; interrupt a cell that must end."""
        last, since, used, ending_for = None, 0.0, 0.0, 0
        while True:
            time.sleep(_PULSE_S)
            cell, said = self._running, dict[str, Any]()
            ending_for = ending_for + 1 if self._is_to_end(cell) else 0
            # Interrupt repeatedly, because an interrupt has no effect before the user's code runs.
            if ending_for and self._running == cell:
                signal.pthread_kill(self._main, signal.SIGINT)
            if ending_for >= 3 and self._running == cell:  # the cell probably waits in a collective
                self.cut |= _cut()
            if cell:
                now, busy = time.monotonic(), time.process_time()
                place = cell, *_place_of(self._main)
                if place != last or busy - used > _PULSE_S / 4:
                    last, since = place, now
                used = busy
                said = dict(zip(("cell", "file", "line", "call"), place, strict=True))
                bar = self.output.unfinished() if self.output else ""
                ending_s = 0.0 if self.left_code else ending_for * _PULSE_S
                said |= {"idle": now - since, "bar": bar, "ending_s": ending_s}
            self._call("set", PULSE.format(self.rank), json.dumps(said))


_this: ThisRank


def set_up(store: tuple[str, int], path: list[str], memory: int) -> dict[str, Any]:
    """Make this process a rank; if there is no GPU, create a virtual GPU of `memory` bytes."""
    global _this
    sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
    if not torch.cuda.is_available():
        virtual.enable(1, memory)
    _this = ThisRank(store)
    return about()


def about() -> dict[str, Any]:
    """Return this rank's row of the table of ranks."""
    device = _this.device
    return {
        "host": host_name(),
        "pid": os.getpid(),
        "device": str(device),
        "virtual": device.virtual,
        "name": device.name,
        "total": device.memory_total,
        "used": torch.cuda.memory_allocated(),
    }


@dataclass
class CellOrder:
    """A cell to run on a rank, as plain data."""

    cell: str  # the cell's id, the same for all ranks
    tree: ast.Module
    file: str
    sources: dict[str, str]  # cells' source text by file name, for tracebacks
    keep: tuple[str, ...]  # names of the variables to return
    assigned: dict[str, Fingerprint]  # the notebook's hashes of the variables that the cell assigns
    label: str = ""  # printed before each line of output
    given: bytes = b""  # this run's part of each split variable, pickled


@dataclass
class ErrorInRank:
    """An error of the user's code in a rank, as text."""

    kind: str
    message: str
    place: str = ""  # "In [4], line 3"
    lines: str = ""  # the traceback, as IPython formats it

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind


@dataclass
class Outcome:
    """The result of a cell on a rank."""

    rank: int
    seconds: float = 0.0
    value: bytes = b""  # the last expression's value, pickled; empty if None
    kept: dict[str, bytes] = field(default_factory=dict)  # variables to return, pickled
    error: ErrorInRank | None = None
    moved: int = 0  # bytes that were moved to the GPU
    peak: int | None = None  # bytes
    collectives: int = -1  # see `_collectives`
    cut: bool = False  # whether an interrupt ended a collective and broke the group


def pull(names: list[str]) -> dict[str, bytes]:
    """Return the named variables, pickled; omit missing names."""
    space = shell().user_ns
    return {name: sending.pack_any(_unwrapped(space[name])) for name in names if name in space}


def _unwrapped(value: Any) -> Any:
    """Return a value without its DDP wrapper. The wrapper works only in the process group."""
    return value.module if isinstance(value, DistributedDataParallel) else value


def run(order: CellOrder) -> Outcome:
    """Run a cell and return its outcome, which includes any error of the user's code."""
    outcome, space = Outcome(_this.rank), shell().user_ns
    with _this.runs(order.cell, order.label):
        parts = sending.unpack(order.given) or {}
        # After the cell, restore the whole values of split variables that the cell did not assign.
        split = parts.keys() & space.keys() - {*names_assigned(order.tree)}
        whole = {name: space[name] for name in split}
        space.update(parts)
        for file, text in order.sources.items():
            linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        before = {name: id(space[name]) for name in order.assigned if name in space}
        _run(order, outcome, space)
        there = {name: hashed for name, hashed in order.assigned.items() if name in space}
        if outcome.error:  # the cell may have failed before it assigned some of these names
            there = {n: hashed for n, hashed in there.items() if before.get(n) != id(space[n])}
        sending.receive(b"", there)  # record hashes, so that the notebook sends no older values
        space.update(whole)
    outcome.cut, outcome.collectives = _this.cut, _collectives()
    return outcome


def _run(order: CellOrder, outcome: Outcome, space: dict[str, Any]) -> None:
    placed = Run(_this.device, space, names_read(order.tree, shell().transform_cell, space))
    error: BaseException | None = None
    began = time.perf_counter()
    try:
        placed.start()
        sending.note_received()
        body, last = compile_cell(order.tree, order.file)
        _this.in_code = True
        exec(body, space)
        value = None if last is None else eval(last, space)
        shell().events.trigger("post_execute")  # on this event, matplotlib draws its figures
        _this.in_code, _this.left_code = False, True
    except BaseException as raised:  # noqa: BLE001  including interrupts
        _this.in_code, _this.left_code = False, True
        error = raised
        outcome.error = _in_words(raised)
    report = placed.finish(error)
    outcome.seconds = time.perf_counter() - began
    if report is not None:
        outcome.moved = report.moved_bytes
        outcome.peak = max((m.peak for m in report.memory), default=None)
    if error is None:
        outcome.value = sending.pack_any(_unwrapped(value)) if value is not None else b""
        outcome.kept = pull(list(order.keep))
    else:
        for each in errors(error):
            traceback.clear_frames(each.__traceback__)


def _in_words(error: BaseException) -> ErrorInRank:
    """Return an error as text: the traceback from the user's first frame, and an explanation."""
    cut_ours(error)
    steps = steps_of(error.__traceback__)
    trace = next((tb for tb in steps if is_users(tb.tb_frame.f_code.co_filename)), None)
    line = innermost_of(trace)
    place = f"{line.label}, line {line.line}" if line else ""
    if isinstance(error, GpuError) or trace is None:
        lines = [f"{type(error).__name__}: {error}"]
    else:
        lines = shell().InteractiveTB.structured_traceback(type(error), error, trace)
        error.__traceback__ = trace
        with faults.kept("explaining an error of a rank"):
            found = explain(error) or explain_out_of_memory(error)
            lines = [*lines, *([str(found)] if found else [])]
    return ErrorInRank(type(error).__name__, str(error), place, "\n".join(lines))
