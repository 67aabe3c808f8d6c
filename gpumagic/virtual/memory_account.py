"""Count what lies on one virtual GPU: bytes, blocks, peaks, and the capacity they must fit in.

Guarantees: the numbers are right whichever threads allocate and free, and when a garbage collection
frees in the midst of an allocation. What was freed is counted, and the published row of counters
written, at the next allocation or reading. Which line of the user's took each block is known (see
:mod:`gpumagic.virtual.memory_history`).
"""

import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from time import perf_counter_ns, time_ns
from typing import Any

import torch

from gpumagic.device.blocks import BLOCK, in_blocks
from gpumagic.telemetry.virtual_state import (
    ALLOCATED,
    BUSY_NS,
    COUNTERS,
    RESERVED,
    WINDOW_END_NS,
    WINDOW_NS,
)
from gpumagic.virtual import host_memory
from gpumagic.virtual.memory_history import (
    USERS,
    Allocation,
    Recording,
    Ring,
    history,
    outer_line,
    owner_of,
    stack,
)

SEGMENT = 2 * 2**20
"""Bytes: it asks the driver for at least as much at a time."""
SMALL = 2**17
"""Elements up to which nobody asks before they are made whether they fit."""
_TOUCHED = 64 * 2**20
"""Bytes from which on the host is asked too, which takes some ten microseconds."""
_getframe = sys._getframe
_HOST_REFUSES = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")


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
        self.ring: Ring | None = None
        self._keeps_stacks = False
        self._row: Any = row
        self.refusal = ""  # why nothing can be allocated
        self._lock = threading.RLock()  # a garbage collection may read the numbers within
        # A weak reference calls back only while it lives itself.
        self._live: dict[int, Allocation] = {}
        # An owner may die on any thread and at any moment. What is called then is one function of
        # C: in one of Python an interrupt may arrive, which Python would drop there.
        self._freed: deque[Allocation] = deque()
        self._note_freed: Callable[[Any], None] = self._freed.append
        self._busy = 0
        self._window = perf_counter_ns()

    def charge(self, owner: Any, nbytes: int, depth: int = 1) -> None:
        """Allocate until `owner` dies, or raise ``torch.OutOfMemoryError``.

        `depth`: how many calls above this one torch, or whoever it is, asked for memory.
        """
        if self.refusal:
            raise RuntimeError(self.refusal)
        block = Allocation(owner, self._note_freed)
        size = block.size = -(-nbytes // BLOCK) * BLOCK
        block.requested = nbytes
        block.metadata = history.metadata
        ring = self.ring
        # Here and not in a function: this is on the way of every operator.
        try:
            frame = _getframe(depth)
        except ValueError:  # on a thread of C++
            block.made, block.at = None, 0
        else:
            code = block.made = frame.f_code
            block.at = frame.f_lasti
            if self._keeps_stacks or owner_of[code.co_filename] != USERS:
                block.made, block.at = (stack(), 0) if self._keeps_stacks else outer_line(frame)
        with self._lock:
            if self._freed:
                self._take_freed()
            used = self.bytes.current + size
            fits = used <= self.limit
            if fits:
                self._live[id(block)] = block
                if ring is not None:
                    block.address = owner.data_ptr()
                    ring.note_taken(block)
                # As `add`, without a call.
                held, count = self.bytes, self.blocks
                held.current, count.current = used, count.current + 1
                held.allocated += size
                count.allocated += 1
                held.peak = used if used > held.peak else held.peak
                count.peak = count.current if count.current > count.peak else count.peak
                grown = used - self.reserved.current
                if grown > 0:
                    self.reserved.add(-(-grown // SEGMENT) * SEGMENT)
                    self._row[RESERVED] = self.reserved.current
                self._row[ALLOCATED] = used
        if not fits:
            # Never counted: it may not live on in the error's frames, and then be counted as freed.
            del block
            raise self.out_of_memory(size)

    def require(self, size: Iterable[int], dtype: torch.dtype | None) -> None:
        """Raise ``torch.OutOfMemoryError`` if a tensor that is still to be made would not fit."""
        if self.refusal:
            return
        nbytes = prod(size) * (dtype or torch.get_default_dtype()).itemsize
        self.refresh()
        if self.bytes.current + nbytes > self.limit:
            raise self.out_of_memory(in_blocks(nbytes))
        if nbytes >= _TOUCHED and nbytes > host_memory.available():
            raise self.out_of_memory(in_blocks(nbytes), host=True)

    def record(self, recording: Recording) -> None:
        """Keep a ring of what happens from now on, or no longer."""
        with self._lock:
            self._take_freed()
            for block in self._live.values():
                block.find_address()
            self.ring = Ring(recording, self.ring) if recording.enabled else None
            self._keeps_stacks = recording.keeps("state")

    def blocks_now(self) -> list[Allocation]:
        """Every allocation that lives, by address."""
        with self._lock:
            self._take_freed()
            live = list(self._live.values())
        return sorted(filter(Allocation.find_address, live), key=attrgetter("address"))

    def refresh(self) -> None:
        """Count what was freed since the last allocation."""
        with self._lock:
            self._take_freed()
            self._publish()

    def _take_freed(self) -> None:
        freed, live, held, count = self._freed, self._live, self.bytes, self.blocks
        while freed:
            block = freed.popleft()
            del live[id(block)]
            held.current -= block.size
            held.freed += block.size
            count.current -= 1
            count.freed += 1
            if self.ring is not None:
                self.ring.note("free", block.address, block.requested, block.size)

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

    def out_of_memory(self, size: int, *, host: bool = False) -> torch.OutOfMemoryError:
        """The error that CUDA's allocator raises; `host`: it is the host that has no more."""
        self.empty_cache()  # as CUDA's allocator does before it gives up
        self.retries += 1
        self.ooms += 1
        for observer in history.observers:
            observer(self.ordinal, size, self.limit, self.free)
        if self.ring is not None:
            lines = stack() if self.ring.traces_stacks else None
            self.ring.note("oom", self.free, size, size, lines)
        allowed = f"{readable(self.limit)} allowed; " if self.limit < self.capacity else ""
        text = (
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
        if host:
            there = readable(host_memory.available())
            text += f" A virtual GPU's memory is the host's, which has {there} left."
        return torch.OutOfMemoryError(text)


def refuse_as_cuda(error: RuntimeError, account: MemoryAccount) -> None:
    """Raise ``torch.OutOfMemoryError`` where the host's allocator has just refused."""
    __tracebackhide__ = True
    if found := _HOST_REFUSES.search(str(error)):
        raise account.out_of_memory(int(found[1]), host=True) from None


def readable(nbytes: int) -> str:
    """A size as CUDA's allocator writes it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"
