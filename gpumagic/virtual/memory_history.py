"""Record where memory of virtual GPUs was allocated, and give it to ``torch.cuda.memory``.

The innermost line of the user's code is always kept, as a code object and an instruction, which is
made into text when somebody reads it. As on a GPU, a ring of allocations and frees is kept only
after ``torch.cuda.memory._record_memory_history``; its stacks have that one line. A tensor's death
is noticed later, so the code that freed it is not known. Snapshots have the layout of C++. The
host's allocator puts each block of a virtual GPU wherever it likes, so each is a segment of its
own, at the address that its storage has; the rest of the reserved memory is one more, and inactive.
"""

import gc
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import time_ns
from types import CodeType, FrameType
from typing import Any

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.usercode.files import in_cell, is_users, line_of

Line = tuple[CodeType | None, int]
"""Code, and the instruction that runs in it; None if no code of the user's runs."""
Observer = Callable[[int, int, int, int], object]

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
    made: CodeType | None  # the user's code that asked for it
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
    lines: bool = False
    skip: frozenset[str] = frozenset()


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
        self._lines = recording.lines
        self._entries: deque[tuple[Any, ...]] = deque(kept, recording.max_entries)

    def note(
        self, action: str, address: int, size: int, block: int, line: Line = (None, 0)
    ) -> None:
        """Add an entry: the size that was asked for, and that of the block."""
        # Plain data, as few as can be: this is on the way of every operator.
        metadata = history.thread.metadata
        self._entries.append((action, address, size, block, time_ns(), metadata, line))

    def note_taken(self, block: Allocation) -> None:
        """Add that a block was allocated."""
        line = (block.made, block.at) if self._lines else (None, 0)
        self.note("alloc", block.address, block.requested, block.size, line)

    def events(self) -> list[tuple[dict[str, Any], Line]]:
        """Return the events in torch's format, with the line instead of frames."""
        told: list[tuple[dict[str, Any], Line]] = [
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
                line if name != "segment_alloc" else (None, 0),
            )
            for action, address, size, block, time, metadata, line in [*self._entries]
            for name, requested in _TOLD.get(action, ((action, True),))
            if name not in self._skip
        ]
        return told[-self._most :]


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
    """Lines as torch gives them; each is made once for a snapshot."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[dict[str, Any]]] = {}

    def of(self, code: CodeType | None, at: int) -> list[dict[str, Any]]:
        """Return the frame of a line; empty if it is unknown."""
        if code is None:
            return []
        try:
            return self._known[id(code), at]
        except KeyError:
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
            "_cuda_isHistoryEnabled": lambda: history.recording.enabled,
            "_cuda_memoryMetadataSupported": lambda: True,
            "_cuda_setMemoryMetadata": history.set_metadata,
            "_cuda_getMemoryMetadata": lambda: history.thread.metadata,
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
        recording = Recording(enabled is not None, entries, context is not None, frozenset(skip))
        history.recording = recording
        for gpu in self._gpus:
            if clear:
                gpu.account.record(Recording())
            gpu.account.record(recording)


def _segments(gpu: Any, frames: _Frames) -> list[dict[str, Any]]:
    blocks, of, device = gpu.account.blocks_now(), frames.of, gpu.index
    sizes = [block.place[1] for block in blocks]
    segments = [
        _segment(
            device, block.address, size, block.requested, of(block.made, block.at), block.metadata
        )
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
    return [each | {"pool_id": _POOL, "frames": frames.of(*line)} for each, line in events]
