"""Record what a stretch of code allocates on one GPU, and what it is for, for `MemoryPeak`.

torch's own record of its allocator is turned on meanwhile, a ring of the last 100,000 events; it
costs about 2 µs for each. What the user records already is read, and left as it is. Before each
backward pass the graph is read, after it the gradients; the time that this takes is measured.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter, time_ns
from typing import Any

import torch
from torch.cuda import memory

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.memory.allocation_site import users
from gpumagic.memory.find_holders import find
from gpumagic.memory.memory_report import SAVED
from gpumagic.memory.peak import UNKNOWN, MemoryPeak, Note, Replay, peak_of
from gpumagic.memory.references import edges_of_node
from gpumagic.usercode.lines import UserLine, innermost, source_of

RING = 100_000
_ROUNDED = 0.05
"""Of what is allocated: a real allocator gives more than was asked for, and records what was."""
_C: Any = torch._C
_GRAPHS = (torch.autograd, torch.autograd.graph)
_RUN = "_engine_run_backward"


class PeakRecorder:
    """Record one stretch of code: `start`, run the code, then always `stop`."""

    def __init__(
        self, device: torch.device, namespace: Mapping[str, Any], save: str | None = None
    ) -> None:
        if device.type != "cuda" or not hasattr(_C, "_cuda_memorySnapshot"):
            raise GpuError(f"--memory is about the memory of a CUDA GPU, and {device} is none")
        if save and not Path(save).absolute().parent.is_dir():
            raise GpuError(f"--save: there is no folder {Path(save).absolute().parent}")
        self._device = device
        self._index = device.index or 0
        self._namespace = namespace
        self._save = save
        self._notes: list[Note] = []
        self._backwards: list[tuple[int, int, str]] = []
        self._stack = ExitStack()
        self._before: list[Mapping[str, Any]] = []
        self._start = 0
        self._added_seconds = 0.0

    def start(self) -> None:
        """Begin to record; memory allocated now counts as there before."""
        self._note(self._held())
        if not _C._cuda_isHistoryEnabled():
            memory._record_memory_history("all", context="alloc", stacks="python", max_entries=RING)
            self._stack.callback(memory._record_memory_history, None)
        for module in _GRAPHS:
            run = getattr(module, _RUN)
            self._stack.callback(setattr, module, _RUN, run)
            setattr(module, _RUN, self._noting(run))
        self._before = [
            block
            for segment in torch.cuda.memory_snapshot()
            for block in segment["blocks"]
            if segment["device"] == self._index and block["state"] == "active_allocated"
        ]
        self._start = time_ns() // 1000

    def stop(self) -> MemoryPeak | None:
        """Put back what was changed, and return what the peak was made of."""
        began = perf_counter()
        with self._stack:
            self._note(self._held())
            snapshot = memory._snapshot()
            if self._save:
                Path(self._save).write_bytes(pickle.dumps(snapshot))
        whole = snapshot["device_traces"][self._index]
        trace = [entry for entry in whole if entry["time_us"] >= self._start]
        replay = Replay()
        replay.run(self._before, trace, self._notes, self._line)
        missing = abs(replay.now - torch.cuda.memory_allocated(self._index))
        complete = len(whole) < RING and missing <= _ROUNDED * replay.most
        return peak_of(
            replay,
            str(self._device),
            self._start,
            complete=complete,
            saved=self._save or "",
            events=len(trace),
            added_seconds=self._added_seconds + perf_counter() - began,
        )

    def _held(self) -> dict[int, str]:
        """What is held now, by address."""
        found = find(self._namespace)
        return {s.address: s.ways[0].kind for s in found if s.device == str(self._device)}

    def _note(self, kinds: Mapping[int, str]) -> None:
        self._notes.append(Note(time_ns() // 1000, kinds))

    def _noting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            leaves: list[Any] = []
            with self._measured("reading a graph for the peak of memory"):
                leaves = self._note_graph(tensors)
            start, line = time_ns() // 1000, innermost()
            try:
                return run(tensors, *args, **kwargs)
            finally:
                self._backwards.append((start, time_ns() // 1000, _written(line)))
                with self._measured("reading gradients for the peak of memory"):
                    grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
                    self._note({_address(grad): "gradient" for grad in grads})

        return backward

    @contextmanager
    def _measured(self, what: str) -> Iterator[None]:
        """Count the time of reading as the recording's, and keep a fault of our own."""
        began = perf_counter()
        with faults.kept(what):
            yield
        self._added_seconds += perf_counter() - began

    def _note_graph(self, tensors: Any) -> list[Any]:
        """Note what the graphs that end in some tensors have saved; the leaves that they reach."""
        leaves, saved = [], {}
        for value, step in _graph(tensors):
            if step == ".variable":
                leaves.append(value)
            else:
                saved[_address(value)] = SAVED
        for leaf in leaves:
            if isinstance(leaf, torch.nn.Parameter):
                saved[_address(leaf)] = "parameter"
        self._note(saved)
        return leaves

    def _line(self, entry: Mapping[str, Any]) -> str:
        frame = users(entry.get("frames", ()))
        if frame is not None:
            file, line, name = frame["filename"], frame["line"], frame["name"]
            function = "" if name.startswith("<") else name
            return _written(UserLine(line, source_of(file, line), function, file))
        # A thread of autograd has no line of its own.
        when = entry["time_us"]
        return next((line for a, b, line in self._backwards if a <= when <= b), UNKNOWN)


def _graph(tensors: Any) -> Iterator[tuple[Any, str]]:
    """List what the graphs behind some tensors hold, each with the step that reaches it."""
    nodes = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        for value, step in edges_of_node(nodes.pop()):
            if isinstance(value, torch.Tensor):
                yield value, step
            elif step.startswith(": ") and value not in seen:
                seen.add(value)
                nodes.append(value)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _written(line: UserLine | None) -> str:
    if line is None:
        return UNKNOWN
    return f"{line.place}: {line.source}" if line.source else line.place
