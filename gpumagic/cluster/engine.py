"""Run cells in a rank for the notebook, and report their line meanwhile.

The notebook's process calls these functions by name; they run in the engine's process.
"""

import ast
import linecache
import os
import sys
import time
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gpumagic import faults, virtual
from gpumagic.cell.run import Run
from gpumagic.cluster import sending, this_rank
from gpumagic.cluster.output import bounded_output
from gpumagic.cluster.sending import Print, State
from gpumagic.cluster.this_rank import ThisRank
from gpumagic.errors import GpuError
from gpumagic.memory.explain_out_of_memory import explain_out_of_memory
from gpumagic.mismatch.explainer import explain
from gpumagic.placement.torch_devices import find
from gpumagic.telemetry.host import host_name
from gpumagic.usercode.files import is_users, label, shell
from gpumagic.usercode.frames import cut_ours, errors, folded
from gpumagic.usercode.program import compile_cell
from gpumagic.usercode.variables import names_assigned, names_read


@dataclass
class CellOrder:
    """A cell for a rank to run: plain data, with variables as bytes."""

    cell: str  # its number, the same for all ranks
    tree: ast.Module
    file: str
    sources: dict[str, str]  # the text of the cells, for tracebacks
    given: bytes = b""  # this rank's own variables
    keep: tuple[str, ...] = ()  # names whose values are returned
    assigned: dict[str, Print] = field(default_factory=dict)  # variables that the notebook has too


@dataclass
class Outcome:
    """The result of a cell on a rank."""

    rank: int
    seconds: float = 0.0
    value: bytes = b""
    kept: dict[str, bytes] = field(default_factory=dict)
    error: "ErrorInRank | None" = None
    moved: int = 0
    peak: int | None = None
    sequence: int = -1
    cut: bool = False  # it was freed from a collective, so the group is broken


@dataclass
class ErrorInRank:
    """An error of the user's code in a rank, as text."""

    kind: str
    message: str
    place: str  # "In [4], line 3"
    lines: str  # the traceback, as IPython draws it

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" if self.message else self.kind

    @property
    def is_of_the_group(self) -> bool:
        """Whether the error is a lost connection to another rank."""
        words = ("gloo", "Connection closed by peer", "NCCL", "Connection reset by peer")
        return any(word in self.message for word in words)


_this: ThisRank


def set_up(store: tuple[str, int], path: list[str], memory: int) -> dict[str, Any]:
    """Become a rank, on a virtual GPU of `memory` if there is no real one; return its facts."""
    global _this
    sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
    if not torch.cuda.is_available():
        virtual.enable(1, memory)
    _this = ThisRank(int(os.environ["RANK"]), find("cuda:0"), store)
    return about()


def about() -> dict[str, Any]:
    """Return this rank's row of the table of ranks."""
    device = _this.device
    return {
        "host": host_name(),
        "pid": os.getpid(),
        "device": str(device),
        "virtual": device.virtual,
        "uuid": device.uuid,
        "name": device.name,
        "total": device.memory_total,
        "used": torch.cuda.memory_allocated(),
    }


def join(generation: int) -> None:
    """Join the process group of this generation."""
    real = not _this.device.virtual and dist.is_nccl_available()
    this_rank.join(generation, "cpu:gloo,cuda:nccl" if real else "gloo")


def pull(names: list[str]) -> dict[str, bytes]:
    """Return the values of names as bytes; missing names are left out."""
    space = shell().user_ns
    return {name: sending.pack_any(_unwrapped(space[name])) for name in names if name in space}


def _unwrapped(value: Any) -> Any:
    """Remove a wrapper such as DDP, which is useless outside the ranks' group."""
    return value.module if isinstance(value, DistributedDataParallel) else value


_sent: dict[str, Print] = {}
"""The notebook's variables that this rank has received, or replaced by its own."""
_received: dict[str, bytes | None] = {}
"""Fingerprints of the variables sent to this rank, from the start of the first cell with them."""
_fresh: set[str] = set()


@dataclass
class Wants:
    """What a rank lacks of the variables that a cell reads."""

    names: dict[str, bool]  # whether it has had another value from the notebook
    kept: list[str]  # the notebook and this rank have changed the same object
    tensors: dict[int, State]  # tensors that the rank has


def wanted(prints: dict[str, Print]) -> Wants:
    """Return which of these variables of the notebook this rank needs."""
    wants, space = Wants({}, [], sending.known_tensors()), shell().user_ns
    for name, (now, thing) in prints.items():
        before = _sent.get(name) if name in space else None
        if before is None or before[0] != now:
            same = before is not None and before[1] == thing
            if same and _received.get(name) != _print_of(name):
                wants.kept.append(name)
            else:
                wants.names[name] = before is not None
    return wants


def receive(variables: bytes, prints: dict[str, Print]) -> "ErrorInRank | None":
    """Take variables and remember what the notebook has; or return why not."""
    try:
        got = sending.unpack(variables) if variables else {}
    except Exception as error:  # noqa: BLE001  whatever the user's own object raises
        words = f"{type(error).__name__}: {error}"
        lines = f"{words} (where the rank made what the notebook has sent)"
        return ErrorInRank(type(error).__name__, str(error), "", lines)
    shell().user_ns.update(got)
    _fresh.update(got)
    _sent.update(prints)
    return None


def _print_of(name: str) -> bytes | None:
    try:
        return sending.fingerprint(name, shell().user_ns[name])
    except GpuError:
        return None


def bring(order: CellOrder) -> dict[str, Any]:
    """Take this rank's own variables, and the text of the cells.

    Return the previous values of the split names, to restore them.
    """
    space = shell().user_ns
    parts = sending.unpack(order.given) if order.given else {}
    kept = parts.keys() & space.keys() - {*names_assigned(order.tree)}
    whole = {name: space[name] for name in kept}
    space.update(parts)
    for file, text in order.sources.items():
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    return whole


def run(order: CellOrder) -> Outcome:
    """Run a cell and return its outcome. The user's errors are not raised."""
    outcome, space = Outcome(_this.rank), shell().user_ns
    with _this.runs(order.cell):
        whole = bring(order)
        before = {name: id(space[name]) for name in order.assigned if name in space}
        _run(order, outcome, space)
        for name, printed in order.assigned.items():
            # A failed cell may not have assigned it.
            same = name in space and before.get(name) == id(space[name])
            if name in space and not (outcome.error and same):
                _sent[name] = printed
        space.update(whole)
    outcome.cut, outcome.sequence = _this.cut, this_rank.sequence()
    return outcome


def _run(order: CellOrder, outcome: Outcome, space: dict[str, Any]) -> None:
    names = names_read(order.tree, shell().transform_cell, space)
    placed = Run(_this.device, space, names)
    error: BaseException | None = None
    value, began = None, time.perf_counter()
    with bounded_output():
        try:
            placed.start()
            _received.update({name: _print_of(name) for name in _fresh if name in space})
            _fresh.clear()
            body, last = compile_cell(order.tree, order.file)
            _this.in_code = True
            exec(body, space)
            value = None if last is None else eval(last, space)
            # Figures of matplotlib are drawn at the end of a cell.
            shell().events.trigger("post_execute")
            _this.in_code = False
        except BaseException as raised:  # noqa: BLE001  the user's, and an interrupt
            _this.in_code = False
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
    """Return the error as text, from the user's first frame on, with its explanation."""
    cut_ours(error)
    trace = error.__traceback__
    while trace is not None and not is_users(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    frames = traceback.extract_tb(trace)
    users = [each for each in frames if is_users(each.filename)]
    place = f"{label(users[-1].filename)}, line {users[-1].lineno}" if users else ""
    if isinstance(error, GpuError) or trace is None:
        lines = [f"{type(error).__name__}: {error}"]
    else:
        error.__traceback__ = trace
        draw = shell().InteractiveTB.structured_traceback
        with folded(error) as left_out:
            lines = draw(type(error), error, error.__traceback__)
        if left_out:
            lines.insert(-1, f"[… {left_out:,} more frames at lines that stand above]\n")
        with faults.kept("explaining an error of a rank"):
            found = explain(error) or explain_out_of_memory(error)
            lines = [*lines, *([str(found)] if found else [])]
    return ErrorInRank(type(error).__name__, str(error), place, "\n".join(lines))
