"""Record where memory of virtual GPUs was allocated, as torch's allocator does.

The innermost line of the user's code is always kept, as a code object and an instruction, which is
made into text when somebody reads it. As on a GPU, whole stacks and a ring of allocations and frees
are kept only after ``torch.cuda.memory._record_memory_history``. A tensor's death is noticed later,
so the code that freed it is not known.
"""

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from types import CodeType, FrameType
from typing import Any

from torch._C._profiler import gather_traceback

from gpumagic.device.caching_allocator import in_blocks
from gpumagic.usercode.files import is_users
from gpumagic.usercode.lines import in_cell

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

    def note_taken(self, block: Allocation) -> None:
        """Add that a block was allocated."""
        made = block.made if self.traces_stacks else None
        self.note("alloc", block.address, block.requested, block.size, made)

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
