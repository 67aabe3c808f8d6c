"""Count what lies on one virtual GPU: bytes, blocks, peaks, and the capacity they must fit in.

Guarantees: the numbers are right whichever threads allocate and free, and when a garbage collection
frees in the midst of an allocation. What was freed is counted, and the published row of counters
written, at the next allocation or reading.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns, time_ns
from typing import Any

import torch

from gpumagic.telemetry.virtual_state import (
    ALLOCATED,
    BUSY_NS,
    COUNTERS,
    RESERVED,
    WINDOW_END_NS,
    WINDOW_NS,
)

BLOCK = 512
"""Bytes: CUDA's caching allocator rounds every request up to a multiple of this."""
SEGMENT = 2 * 2**20
"""Bytes: it asks the driver for at least as much at a time."""


@dataclass
class MemoryStat:
    """Something counted the way ``torch.cuda.memory_stats`` reports it."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, n: int) -> None:
        self.current += n
        self.allocated += n
        if self.current > self.peak:
            self.peak = self.current

    def take(self, n: int) -> None:
        self.current -= n
        self.freed += n


class _Block(weakref.ref[Any]):
    """An allocation. It dies with the object that owns the bytes."""

    __slots__ = ("size",)
    size: int


class MemoryAccount:
    """The memory of one virtual GPU; ``limit`` is how many bytes of its capacity may be allocated.

    The numbers are published in ``row`` (see :mod:`gpumagic.telemetry.virtual_state`).
    """

    def __init__(self, ordinal: int, capacity: int, row: Any) -> None:
        self.ordinal = ordinal
        self.capacity = capacity
        self.limit = capacity
        self.bytes, self.blocks, self.reserved = MemoryStat(), MemoryStat(), MemoryStat()
        self.ooms = self.retries = 0
        self._row: Any = row
        self.refusal = ""  # why nothing can be allocated
        self._lock = threading.RLock()  # a garbage collection may read the numbers within
        # A weak reference calls back only while it lives itself.
        self._live: dict[int, _Block] = {}
        # An owner may die on any thread and at any moment. What is called then is one function of
        # C: in one of Python an interrupt may arrive, which Python would drop there.
        self._freed: deque[_Block] = deque()
        self._note_freed: Callable[[Any], None] = self._freed.append
        self._busy = 0
        self._window = perf_counter_ns()

    def charge(self, owner: Any, nbytes: int) -> None:
        """Allocate until `owner` dies, or raise ``torch.OutOfMemoryError``."""
        if self.refusal:
            raise RuntimeError(self.refusal)
        block = _Block(owner, self._note_freed)
        size = block.size = -(-nbytes // BLOCK) * BLOCK
        with self._lock:
            if self._freed:
                self._take_freed()
            used = self.bytes.current + size
            fits = used <= self.limit
            if fits:
                self._live[id(block)] = block
                self.bytes.add(size)
                self.blocks.add(1)
                grown = used - self.reserved.current
                if grown > 0:
                    self.reserved.add(-(-grown // SEGMENT) * SEGMENT)
                    self._row[RESERVED] = self.reserved.current
                self._row[ALLOCATED] = used
        if not fits:
            # Never counted: it may not live on in the error's frames, and then be counted as freed.
            del block
            raise self._out_of_memory(size)

    def refresh(self) -> None:
        """Count what was freed since the last allocation."""
        with self._lock:
            self._take_freed()
            self._publish()

    def _take_freed(self) -> None:
        while self._freed:
            block = self._freed.popleft()
            del self._live[id(block)]
            self.bytes.take(block.size)
            self.blocks.take(1)

    def empty_cache(self) -> None:
        """Give back to the "driver" what is reserved but not allocated."""
        with self._lock:
            self._take_freed()
            unused = self.reserved.current - -(-self.bytes.current // SEGMENT) * SEGMENT
            if unused > 0:
                self.reserved.take(unused)
            self._publish()

    def reset_peak(self) -> None:
        with self._lock:
            self._take_freed()
            for stat in (self.bytes, self.blocks, self.reserved):
                stat.peak = stat.current

    def reset_accumulated(self) -> None:
        with self._lock:
            self._take_freed()
            for stat in (self.bytes, self.blocks, self.reserved):
                stat.allocated = stat.freed = 0
            self.ooms = self.retries = 0

    @property
    def free(self) -> int:
        """Bytes that the "driver" has left."""
        self.refresh()
        return max(self.capacity - self.reserved.current, 0)

    def worked(self, since: int) -> None:
        """An operator ran from `since` (``perf_counter_ns``) until now."""
        now = perf_counter_ns()
        self._busy += now - since
        if now - self._window < WINDOW_NS:
            return
        with self._lock:
            elapsed = now - self._window
            if elapsed >= WINDOW_NS:
                self._row[BUSY_NS] = min(self._busy * WINDOW_NS // elapsed, WINDOW_NS)
                self._row[WINDOW_END_NS] = time_ns()
                self._busy, self._window = 0, now

    def unpublish(self) -> None:
        """Count on, but for this process alone (and with a lock that no other thread holds)."""
        self._row = [0] * COUNTERS
        self._lock = threading.RLock()

    def _publish(self) -> None:
        self._row[ALLOCATED] = self.bytes.current
        self._row[RESERVED] = self.reserved.current

    def _out_of_memory(self, size: int) -> torch.OutOfMemoryError:
        self.empty_cache()  # as CUDA's allocator does before it gives up
        self.retries += 1
        self.ooms += 1
        allowed = f"{readable(self.limit)} allowed; " if self.limit < self.capacity else ""
        return torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {readable(size)}. GPU {self.ordinal} has a "
            f"total capacity of {readable(self.capacity)} of which {readable(self.free)} is free. "
            f"Including non-PyTorch memory, this process has {readable(self.reserved.current)} "
            f"memory in use. {allowed}Of the allocated memory {readable(self.bytes.current)} is "
            f"allocated by PyTorch, and {readable(self.reserved.current - self.bytes.current)} is "
            "reserved by PyTorch but unallocated. If reserved but unallocated memory is large try "
            "setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
            "documentation for Memory Management  "
            "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
        )


def readable(nbytes: int) -> str:
    """A size as CUDA's allocator writes it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
