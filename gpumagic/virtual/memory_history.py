"""Record where memory of virtual GPUs was allocated, and give it to ``torch.cuda.memory``.

The innermost line of the user's code is always kept, as a code object and an instruction, which is
made into text when somebody reads it. As on a GPU, whole stacks and a ring of allocations and frees
are kept only after ``torch.cuda.memory._record_memory_history``. A tensor's death is noticed later,
so the code that freed it is not known. Snapshots have the layout of C++. The host's allocator puts
each block of a virtual GPU wherever it likes, so each is a segment of its own, at the address that
its storage has; the rest of the reserved memory is one more, and inactive.
"""

import gc
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from time import time_ns
from types import CodeType, FrameType
from typing import Any

from torch._C._profiler import gather_traceback, symbolize_tracebacks

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.usercode.files import is_users
from gpumagic.usercode.lines import in_cell, line_of

Line = tuple[CodeType, int]
"""Code, and the instruction that runs in it."""
Stack = Any
"""All lines that run on a thread, as torch notes them: without a frame of Python's."""
Observer = Callable[[int, int, int, int], object]

_RECORDED = ("state", "alloc", "all")
_getframe = sys._getframe


OTHERS, USERS, TIMED = range(3)


class _Owners(dict[str, int]):
    """Cache whether a file is the user's, a library's, or of `%%time` (its lines are looked up)."""

    def __missing__(self, file: str) -> int:
        users = TIMED if file.startswith("<timed ") else USERS if is_users(file) else OTHERS
        self[file] = users
        return users


class _ThisThread(threading.local):
    metadata = ""


class Allocation(weakref.ref[Any]):
    """An allocation. It dies with the object that owns the bytes."""

    __slots__ = ("address", "at", "made", "metadata", "place", "requested")
    requested: int  # bytes
    made: CodeType | Stack  # the user's code that asked for it, or all that ran; None if nobody's
    at: int  # the instruction in that code
    metadata: str
    place: tuple[int, int]  # address and size of the block in the model of CUDA's allocator
    # Only when it was asked for: whoever has died can no longer be asked.
    address: int

    @property
    def size(self) -> int:
        """Bytes of the block; before it is counted, of the smallest that it can be."""
        return self.place[1] if hasattr(self, "place") else in_blocks(self.requested)

    def find_address(self) -> int:
        """Where it lies; 0 if it has just died."""
        if not getattr(self, "address", 0):
            owner: Any = self()
            if hasattr(owner, "_fix_weakref"):
                owner._fix_weakref()  # else torch would not know that Python has it again
            self.address = 0 if owner is None else owner.data_ptr()
        return self.address


@dataclass(frozen=True)
class Recording:
    """Keep the options given to ``_record_memory_history``; by default nothing is recorded."""

    enabled: bool = False
    max_entries: int = 0
    context: str | None = None
    skip: frozenset[str] = frozenset()

    def keeps(self, context: str) -> bool:
        """Whether stacks are recorded in this context or a wider one."""
        asked = self.context if self.enabled else None
        return asked is not None and _RECORDED.index(asked) >= _RECORDED.index(context)


class MemoryHistory:
    """Keep the options of this process's recording; each GPU has a ring of its own."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.thread = _ThisThread()
        self.metadata = ""  # that any thread has set last; to look up a thread's own takes longer
        self.recording = Recording()
        self.observers: list[Observer] = []

    def set_metadata(self, text: str) -> None:
        self.metadata = self.thread.metadata = text


history = MemoryHistory()
owner_of = _Owners()
_timed: tuple[CodeType, CodeType] | None = None


def outer_line(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Return the innermost line of the user's code above `frame`; its cell's, under `%%time`."""
    while frame is not None:
        code = frame.f_code
        if owner := owner_of[code.co_filename]:
            return (code, frame.f_lasti) if owner == USERS else _in_cell(frame)
        frame = frame.f_back
    return None, 0


def _in_cell(frame: FrameType) -> Line:
    """Return the line in its cell of a line that `%%time` runs; looked up once for each code."""
    global _timed
    if _timed is None or _timed[0] is not frame.f_code:
        _timed = frame.f_code, in_cell(frame)[0]
    return _timed[1], frame.f_lasti


def stack() -> Stack:
    """All that runs on this thread."""
    return gather_traceback(True, False, False)


# What torch tells of one event, and whether it is about what was asked for or the whole block.
_TOLD = {
    "alloc": (("segment_alloc", False), ("alloc", True)),
    "free": (("free_requested", True), ("free_completed", True), ("segment_free", False)),
}


class Ring:
    """Keep the last events on one GPU, at most as many as requested."""

    def __init__(self, recording: Recording, before: "Ring | None" = None) -> None:
        kept = before._entries if before is not None else ()
        self._most, self._skip = recording.max_entries, recording.skip
        self.traces_stacks = recording.keeps("alloc")
        self._entries: deque[tuple[Any, ...]] = deque(kept, recording.max_entries)

    def note(
        self, action: str, address: int, size: int, block: int, stack: Stack = None, text: str = ""
    ) -> None:
        """Add an entry: the size that was asked for, and that of the block. `text` is its metadata,
        by default this thread's."""
        # Plain data, as few as can be: this is on the way of every operator.
        metadata = text or history.thread.metadata
        self._entries.append((action, address, size, block, time_ns(), metadata, stack))

    def note_taken(self, block: Allocation, action: str = "alloc", text: str = "") -> None:
        """Add that a block was allocated, or annotated."""
        recorded = self.traces_stacks and not isinstance(block.made, CodeType)
        made = block.made if recorded else None
        self.note(action, block.address, block.requested, block.size, made, text)

    def events(self) -> list[tuple[dict[str, Any], Stack]]:
        """Return the events in torch's format, with the stack instead of frames."""
        told: list[tuple[dict[str, Any], Stack]] = [
            (
                {
                    "action": name,
                    "device_free" if name == "oom" else "addr": address,
                    "size": size if requested else block,
                    "stream": 0,
                    "time_us": time // 1000,
                    "compile_context": "",
                    "user_metadata": metadata,
                },
                stack if name != "segment_alloc" else None,
            )
            for action, address, size, block, time, metadata, stack in [*self._entries]
            for name, requested in _TOLD.get(action, ((action, True),))
            if name not in self._skip
        ]
        return told[-self._most :]


_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_LARGE_SEGMENT = 2**20
_NOWHERE = 2**12
"""An address at which no memory lies."""
_POOL = (0, 0)
_SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {},
}


class _Frames:
    """Lines as torch gives them; each is made once for a snapshot, and so are those of a block."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._stacks: dict[int, list[dict[str, Any]]] = {}

    def learn(self, stacks: Iterable[Stack]) -> None:
        """Read some stacks, all at once: what they have in common is shared."""
        new = [each for each in stacks if each is not None and id(each) not in self._stacks]
        for each, lines in zip(new, symbolize_tracebacks(new), strict=True):
            others = [line for line in lines if not line["filename"].startswith(_OURS)]
            self._stacks[id(each)] = others

    def of(self, stack: Stack) -> list[dict[str, Any]]:
        """Return the frames of a learned stack."""
        return [] if stack is None else self._stacks[id(stack)]

    def of_block(self, block: Allocation) -> list[dict[str, Any]]:
        code, at = block.made, block.at
        try:
            return self._known[id(code), at]
        except KeyError:
            if not isinstance(code, CodeType):
                return self.of(code)
            name, file = code.co_name, code.co_filename
            found = [{"name": name, "filename": file, "line": line_of(code, at)}]
            self._known[id(code), at] = found
            return found


class MemoryApi:
    """Provide the functions of ``torch._C`` on allocations of some virtual GPUs."""

    def __init__(self, gpus: Sequence[Any]) -> None:
        self._gpus = gpus

    def functions(self, stack: ExitStack) -> dict[str, Any]:
        """Return the functions by name; closing `stack` forgets the record."""
        stack.callback(history.forget)
        return {
            "_cuda_memorySnapshot": self._snapshot,
            "_cuda_record_memory_history": self._record,
            "_cuda_record_memory_history_legacy": self._record_as_before,
            "_cuda_isHistoryEnabled": lambda: history.recording.enabled,
            "_cuda_allocationTraceback": self._traceback_of,
            "_cuda_memoryMetadataSupported": lambda: True,
            "_cuda_setMemoryMetadata": history.set_metadata,
            "_cuda_getMemoryMetadata": lambda: history.thread.metadata,
            "_cuda_annotateMemory": self._annotate,
            "_cuda_attach_out_of_memory_observer": lambda o: history.observers.append(o),
            "_cuda_getAllocatorBackend": lambda: "native",
        }

    def _snapshot(self, pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
        """Return what ``torch.cuda.memory._snapshot`` and ``memory_snapshot`` return."""
        traces = pool is None or len(pool) < 3 or pool[2]
        mine = pool is None or tuple(pool[:2]) == _POOL
        frames = _Frames()
        collects = gc.isenabled()
        gc.disable()  # hundreds of thousands of dicts, none of them garbage
        try:
            return {
                "segments": [s for gpu in self._gpus if mine for s in _segments(gpu, frames)],
                "device_traces": [_trace(gpu, frames) for gpu in self._gpus] if traces else [],
                "allocator_settings": dict(_SETTINGS),
                "external_annotations": [],
            }
        finally:
            if collects:
                gc.enable()

    def _record(
        self,
        enabled: str | None = "all",
        context: str | None = "all",
        stacks: str = "all",
        max_entries: int = 2**63 - 1,
        clear: bool = False,
        compile_context: bool = False,
        annotations: bool = False,
        skip: Any = (),
        *rest: Any,
    ) -> None:
        for what, given, known in (
            ("state", enabled, ("state", "all", None)),
            ("context", context, ("state", "alloc", "all", None)),
            ("stacks", stacks, ("python", "all")),
        ):
            if given not in known:
                *others, last = map(repr, known)
                raise RuntimeError(f"expected {what} to be {', '.join(others)}, or {last}")
        entries = max_entries if enabled == "all" else 1
        recording = Recording(enabled is not None, entries, context, frozenset(skip))
        history.recording = recording
        for gpu in self._gpus:
            if clear:
                gpu.account.record(Recording())
            gpu.account.record(recording)

    def _record_as_before(
        self, enabled: bool, state: bool, entries: int, allocs: bool, cpp: bool, *options: Any
    ) -> None:
        context = "alloc" if allocs else "state" if state else None
        self._record("all" if enabled else None, context, "all", entries, *options)

    def _traceback_of(self, address: int) -> list[dict[str, Any]] | None:
        segments = (segment for gpu in self._gpus for segment in _segments(gpu, _Frames()))
        found = (s["blocks"][0]["frames"] for s in segments if s["address"] == address)
        return next(found, None) or None

    def _annotate(self, address: int, metadata: str) -> None:
        for gpu in self._gpus:
            ring = gpu.account.ring
            for block in gpu.account.blocks_now() if ring is not None else ():
                if block.address == address:
                    ring.note_taken(block, "annotate", metadata)


def _segments(gpu: Any, frames: _Frames) -> list[dict[str, Any]]:
    blocks, of, device = gpu.account.blocks_now(), frames.of_block, gpu.index
    if {*map(type, map(attrgetter("made"), blocks))} - {CodeType}:
        frames.learn(block.made for block in blocks if not isinstance(block.made, CodeType))
    sizes = [block.place[1] for block in blocks]
    segments = [
        _segment(device, block.address, size, block.requested, of(block), block.metadata)
        for block, size in zip(blocks, sizes, strict=True)
    ]
    cached = gpu.account.allocator.reserved.current - sum(sizes)
    if cached > 0:
        above = blocks[-1].address + sizes[-1] if blocks else _NOWHERE
        unused = _segment(device, above, cached, cached, [], "")
        unused |= {"allocated_size": 0, "active_size": 0, "requested_size": 0}
        unused["blocks"][0]["state"] = "inactive"
        segments.append(unused)
    return segments


def _segment(
    device: int, address: int, size: int, requested: int, frames: list[Any], metadata: str
) -> dict[str, Any]:
    """Return a segment with one block, which is allocated."""
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": requested,
        "stream": 0,
        "segment_type": "large" if size > _LARGE_SEGMENT else "small",
        "segment_pool_id": _POOL,
        "is_expandable": False,
        "frames": [],
        "blocks": [
            {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": "active_allocated",
                "frames": frames,
                "user_metadata": metadata,
            }
        ],
    }


def _trace(gpu: Any, frames: _Frames) -> list[dict[str, Any]]:
    gpu.account.refresh()
    ring = gpu.account.ring
    events = [] if ring is None else ring.events()
    frames.learn(stack for _, stack in events)
    return [each | {"pool_id": _POOL, "frames": frames.of(stack)} for each, stack in events]
