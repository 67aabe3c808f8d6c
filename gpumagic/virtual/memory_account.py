"""Count what lies on one virtual GPU: bytes, blocks, peaks, and the capacity they must fit in.

Guarantees: the numbers are right whichever threads allocate and free, and when a garbage collection
frees in the midst of an allocation. What is allocated and freed is noted in order, and counted when
somebody reads, when it could be too much, and otherwise after some MiB; then the row of counters is
published too. Which line of the user's took each block is known (see
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

from gpumagic.device.cards import BLOCK, in_blocks
from gpumagic.telemetry.virtual_state import (
    ALLOCATED,
    BUSY_NS,
    COUNTERS,
    RESERVED,
    WINDOW_END_NS,
    WINDOW_NS,
)
from gpumagic.virtual import host_memory
from gpumagic.virtual.allocator_refusal import refusal
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
_UNCOUNTED, _LEAST = 16 * 2**20, 64 * 2**10
"""Bytes that may be noted before they are counted; and what a smaller allocation is taken for."""
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
        # Each allocation when it is made and again when its owner dies, which may be on any thread
        # and at any moment. What is called then is one function of C: in one of Python an interrupt
        # may arrive, which Python would drop there.
        self._log: deque[Allocation] = deque()
        self._note: Callable[[Any], None] = self._log.append
        self._room = -1  # bytes that may still be allocated before it is counted
        self._busy = 0
        self._window = perf_counter_ns()

    def charge(self, owner: Any, nbytes: int, depth: int = 1) -> None:
        """Allocate until `owner` dies, or raise ``torch.OutOfMemoryError``.

        `depth`: how many calls above this one torch, or whoever it is, asked for memory.
        """
        # On the way of every operator, between kernels that fill the processor's caches: what is
        # touched here is what it costs, so the rest is left to `_count`.
        room = self._room - max(nbytes, _LEAST)
        if room < 0:
            self._make_room(nbytes)
        try:
            frame = _getframe(depth)
        except ValueError:  # on a thread of C++
            made, at = None, 0
        else:
            made, at = frame.f_code, frame.f_lasti
            if self._keeps_stacks or owner_of[made.co_filename] != USERS:
                made, at = (stack(), 0) if self._keeps_stacks else outer_line(frame)
        # From here to its being noted nothing is called that an interrupt could follow.
        block = Allocation(owner, self._note)
        block.requested, block.made, block.at = nbytes, made, at
        block.metadata = history.metadata
        self._note(block)
        self._room = room
        if room < 0:
            if self.ring is not None:
                block.address = owner.data_ptr()
                self.ring.note_taken(block)
            self.refresh()

    def _make_room(self, nbytes: int) -> None:
        """Raise an error if there is no room for so many bytes."""
        if self.refusal:
            raise RuntimeError(self.refusal)
        with self._lock:
            self._count()
        if self.bytes.current + in_blocks(nbytes) > self.limit:
            raise self.out_of_memory(in_blocks(nbytes))

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
            self._count()
            for block in self._live.values():
                block.find_address()
            self.ring = Ring(recording, self.ring) if recording.enabled else None
            self._keeps_stacks = recording.keeps("state")
            self._room = -1

    def blocks_now(self) -> list[Allocation]:
        """Every allocation that lives, by address."""
        with self._lock:
            self._count()
            live = list(self._live.values())
        return sorted(filter(Allocation.find_address, live), key=attrgetter("address"))

    def refresh(self) -> None:
        """Count what was allocated and freed until now, and publish it."""
        with self._lock:
            self._count()
            self._publish()

    def _count(self) -> None:
        """Count what was allocated and freed since it was last done, in the order of both."""
        log, live, ring = self._log, self._live, self.ring
        held, blocks = self.bytes, self.blocks
        while log:
            block = log[0]
            key, size = id(block), -(-block.requested // BLOCK) * BLOCK
            # As `MemoryStat.add` and `take`, but without a call: an interrupt may follow each.
            if key in live:  # it is noted for the second time: freed
                del live[key]
                held.current -= size
                held.freed += size
                blocks.current -= 1
                blocks.freed += 1
                del log[0]
                if ring is not None:
                    ring.note("free", block.address, block.requested, size)
                continue
            live[key] = block
            held.current += size
            held.allocated += size
            blocks.current += 1
            blocks.allocated += 1
            if held.current > held.peak:
                held.peak = held.current
            if blocks.current > blocks.peak:
                blocks.peak = blocks.current
            del log[0]
            grown = held.current - self.reserved.current
            if grown > 0:
                self.reserved.add(-(-grown // SEGMENT) * SEGMENT)
        left = self.limit - self.bytes.current
        self._room = -1 if ring is not None or self.refusal else min(left, _UNCOUNTED)

    def empty_cache(self) -> None:
        """Give back to the "driver" what is reserved but not allocated."""
        with self._lock:
            self._count()
            unused = self.reserved.current - -(-self.bytes.current // SEGMENT) * SEGMENT
            if unused > 0:
                self.reserved.take(unused)
            self._publish()

    def reset_peak(self) -> None:
        with self._lock:
            self._count()
            for stat in (self.bytes, self.blocks, self.reserved):
                stat.peak = stat.current

    def reset_accumulated(self) -> None:
        with self._lock:
            self._count()
            for stat in (self.bytes, self.blocks, self.reserved):
                stat.allocated = stat.freed = 0
            self.ooms = self.retries = 0

    def allow(self, limit: int) -> None:
        """Let so many bytes be allocated."""
        self.limit = limit
        self.refresh()

    def refuse(self, why: str) -> None:
        """Let nothing be allocated from now on."""
        self.refusal = why
        self._room = -1

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
                self._count()
                self._publish()
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
        held = self.bytes.current, self.reserved.current
        text = refusal(size, self.ordinal, self.capacity, self.limit, *held, host=host)
        return torch.OutOfMemoryError(text)


def refuse_as_cuda(error: RuntimeError, account: MemoryAccount) -> None:
    """Raise ``torch.OutOfMemoryError`` where the host's allocator has just refused."""
    __tracebackhide__ = True
    if found := _HOST_REFUSES.search(str(error)):
        raise account.out_of_memory(int(found[1]), host=True) from None
