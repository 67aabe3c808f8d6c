"""Account for the memory of a virtual GPU: bytes, blocks, peaks, limits.

Threads and garbage collections may allocate and free at any moment. So allocations and frees are
first appended to a log. The numbers are updated from the log when they are read, when the GPU could
be full, and after every few MiB. `refresh` also publishes the reserved bytes to other processes.
Each allocation stores the innermost line of the user's code. Errors have CUDA's text.
"""

import re
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from operator import attrgetter
from time import perf_counter_ns, time_ns
from types import CodeType, FrameType
from typing import Any

import psutil
import torch

from gpumagic.device.caching_allocator import CachingAllocator, MemoryStat, in_blocks, segment_for
from gpumagic.telemetry import state_files as published
from gpumagic.telemetry.host import MemoryGroup
from gpumagic.usercode.files import in_cell, is_users

SMALL = 2**17
"""Tensors of at most this many elements are created without a check of the free memory."""
_UNCOUNTED, _LEAST = 16 * 2**20, 64 * 2**10
"""After `_UNCOUNTED` allocated bytes, the numbers are updated from the log. To keep the log short,
each allocation counts as at least `_LEAST` of these bytes."""
_getframe = sys._getframe
_LIBRARY, _USERS, _TIMED = range(3)


@cache
def _owner_of(file: str) -> int:
    """Return a file's owner: a library, the user, or a cell compiled by `%%time`."""
    return _TIMED if file.startswith("<timed ") else _USERS if is_users(file) else _LIBRARY


_timed: tuple[CodeType, CodeType] | None = None  # `_outer_line`'s last `%%time` cell


def _outer_line(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """Search outward from `frame` for the user's code; return the code and instruction offset."""
    global _timed
    while frame is not None:
        code = frame.f_code
        if owner := _owner_of(code.co_filename):
            if owner == _TIMED:
                if _timed is None or _timed[0] is not code:  # the last look-up was for other code
                    _timed = code, in_cell(frame)[0]
                code = _timed[1]
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


class Allocation(weakref.ref[Any]):
    """An allocation, as a weak reference to the object that owns the bytes."""

    __slots__ = ("address", "at", "made", "metadata", "place", "requested")
    requested: int  # bytes
    made: CodeType | None  # the user's code that allocates; None if the stack has no user code
    at: int  # offset of the instruction in `made`
    metadata: str  # this module's `metadata` at the time of the allocation
    place: tuple[int, int]  # address and size of the block in the model of CUDA's allocator
    address: int  # read while the owner lives, because a dead tensor has no address

    def find_address(self) -> int:
        """Return the bytes' address in the host's memory; 0 if the owner has just died."""
        if not getattr(self, "address", 0):
            owner: Any = self()
            if hasattr(owner, "_fix_weakref"):
                owner._fix_weakref()  # tells torch that Python refers to the tensor again
            self.address = 0 if owner is None else owner.data_ptr()
        return self.address


class _Buffer:
    """Own an operator's temporary memory, for which there is no tensor."""

    data_ptr = object.__hash__  # any number that differs between live buffers


metadata = ""  # set by ``torch.cuda.memory._set_memory_metadata``; stored with each allocation
observers: list[Callable[[int, int, int, int], object]] = []
"""Called when memory runs out, with the ordinal, requested bytes, limit and free bytes."""


class MemoryAccount:
    """Account for the memory of one virtual GPU. Other processes read the counters in `row`."""

    def __init__(self, ordinal: int, capacity: int, row: Any) -> None:
        self.ordinal = ordinal
        self.capacity = capacity
        self.limit = capacity
        self.allocator = CachingAllocator()
        self.ooms = self.retries = 0
        self.events: deque[tuple[Any, ...]] | None = None  # None while recording is off
        self.refusal = ""  # if not empty, each allocation raises an error with this text
        self._row: Any = row
        self._lock = threading.RLock()  # reentrant, because a finalizer may read the numbers
        self._live: dict[int, Allocation] = {}  # keeps weak references alive
        # Each allocation is logged when it is made and when its owner dies, on any thread. The weak
        # reference's callback is in C, because an interrupt in a Python callback would be lost.
        self._log: deque[Allocation] = deque()
        self._note: Callable[[Any], None] = self._log.append
        self._room = -1  # bytes that may be allocated before the log must be counted
        self._busy = 0  # nanoseconds of work in the present time window
        self._window = perf_counter_ns()  # the start of that window

    def charge(self, owner: Any, nbytes: int, depth: int = 1) -> None:
        """Count `nbytes` as allocated until `owner` dies; raise an error if they do not fit.
        The search for the user's code begins `depth` frames above this function."""
        # A kernel evicts this object from the CPU's caches, so work that can wait is in `_count`.
        room = self._room - max(nbytes, _LEAST)
        if room < 0:
            self._make_room(nbytes)
        try:
            frame = _getframe(depth)
        except ValueError:  # a C++ thread may have fewer than `depth` Python frames
            made, at = None, 0
        else:
            made, at = frame.f_code, frame.f_lasti
            if _owner_of(made.co_filename) != _USERS:
                made, at = _outer_line(frame)
        # Make no other call before `self._note(block)`: an interrupt there would lose the block.
        block = Allocation(owner, self._note)
        block.requested, block.made, block.at = nbytes, made, at
        block.metadata = metadata
        self._note(block)
        self._room = room
        if room < 0:
            if self.events is not None:
                block.address = owner.data_ptr()
                self._record("alloc", block)
            self.refresh()

    def _make_room(self, nbytes: int) -> None:
        """Raise an error if `nbytes` do not fit, even after the cache was emptied."""
        if self.refusal:
            raise RuntimeError(self.refusal)
        with self._lock:
            self._count()
            allocator = self.allocator
            if allocator.reserved.current + allocator.needs(nbytes)[0] > self.limit:
                allocator.empty_cache()
                self.retries += 1
            block = allocator.needs(nbytes)[1]
        # Fragmented memory raises no error, unlike on a real GPU (docs/virtual-gpus.md).
        if allocator.bytes.current + block > self.limit:
            raise self.out_of_memory(segment_for(in_blocks(nbytes)))

    def pass_through(self, sizes: list[int]) -> None:
        """Allocate a block of each size, then free all. Raise an error if they do not fit."""
        if self._room < sum(sizes) + len(sizes) * _LEAST:
            self._make_room(sum(sizes))
        for buffer, nbytes in [(_Buffer(), nbytes) for nbytes in sizes if nbytes]:
            self.charge(buffer, nbytes)

    def require(self, size: Iterable[int], dtype: torch.dtype | None) -> None:
        """Raise ``torch.OutOfMemoryError`` if a tensor of this size and dtype would not fit."""
        count = prod(size)
        if count <= SMALL or self.refusal:
            return
        nbytes = count * (dtype or torch.get_default_dtype()).itemsize
        self._make_room(nbytes)
        self._room = -1  # check again in `charge`, because the block may exceed `nbytes`
        if nbytes >= 64 * 2**20 and nbytes > host_has():  # `host_has` takes about 10 µs
            raise self.out_of_memory(in_blocks(nbytes), host=True)

    def record_events(self, most: int | None) -> None:
        """From now on, record the last `most` allocations and frees. If `most` is None, stop."""
        with self._counted():
            self.blocks_now()  # stores the addresses, which the events of later frees contain
            self.events = None if most is None else deque(self.events or (), most)
            self._room = -1

    def _record(self, action: str, block: Allocation) -> None:
        """Append an allocation or a free to the recorded events, as a tuple of plain data."""
        if self.events is not None:
            line = (block.made, block.at) if action == "alloc" else (None, 0)
            where = block.address, block.requested
            self.events.append((action, *where, time_ns(), block.metadata, line))

    def blocks_now(self) -> list[Allocation]:
        """Return every live allocation, sorted by address."""
        with self._lock:
            self._count()
            live = [*self._live.values()]
        return sorted(filter(Allocation.find_address, live), key=attrgetter("address"))

    def refresh(self) -> None:
        """Count the logged allocations and frees, and publish the reserved bytes."""
        with self._counted():
            pass

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Hold the lock in a `with` block. Count the log first, and publish reserved bytes last."""
        with self._lock:
            self._count()
            yield
            self._row[published.RESERVED] = self.reserved().current

    def _count(self) -> None:
        """Count the logged allocations and frees in their order, and empty the log."""
        log, live, allocator = self._log, self._live, self.allocator
        while log:
            block = log[0]
            key = id(block)
            if key in live:  # the block's second entry in the log, so the block is freed
                address, size = block.place
                # An interrupt needs a call, and none is between the writes in `free` and the `del`.
                allocator.free(address, size, block.requested)
                del live[key], log[0]
                if self.events is not None:
                    self._record("free_requested", block)
                    self._record("free_completed", block)
                continue
            block.place = allocator.allocate(block.requested)
            live[key] = block
            del log[0]
        self._room = -1 if self.events is not None or self.refusal else min(self.room, _UNCOUNTED)

    def empty_cache(self) -> None:
        """Release the reserved memory that is not allocated."""
        with self._counted():
            self.allocator.empty_cache()

    def reset_peak(self) -> None:
        with self._counted():
            for stat in self.allocator.stats:
                stat.peak = stat.current

    def reset_accumulated(self) -> None:
        with self._counted():
            for stat in self.allocator.stats:
                stat.allocated = stat.freed = 0
            self.ooms = self.retries = 0

    @property
    def room(self) -> int:
        """Bytes that could still be allocated when the log was last counted."""
        return self.limit - self.allocator.bytes.current

    @property
    def free(self) -> int:
        """Bytes that are not reserved."""
        self.refresh()
        return self.capacity - self.reserved().current

    def reserved(self) -> MemoryStat:
        """Return the allocator's reserved bytes, but at most `capacity`."""
        stat, most = self.allocator.reserved, self.capacity
        return replace(stat, current=min(stat.current, most), peak=min(stat.peak, most))

    def worked(self, since: int) -> None:
        """Add the time from `since` (``perf_counter_ns``) to now to the GPU's busy time."""
        now = perf_counter_ns()
        self._busy += now - since
        if now - self._window < published.WINDOW_NS:
            return
        with self._counted():
            if (elapsed := now - self._window) >= published.WINDOW_NS:
                busy = self._busy * published.WINDOW_NS // elapsed
                self._row[published.BUSY_NS] = min(busy, published.WINDOW_NS)
                self._row[published.WINDOW_END_NS] = time_ns()
                self._busy, self._window = 0, now

    def unpublish(self, refusal: str = "") -> None:
        """Stop publishing the counts. From now on, raise `refusal`, if given, at allocations."""
        self._row = [0] * published.COUNTERS
        self._lock = threading.RLock()  # new, because a fork may have left the old one locked
        self.refusal, self._room = refusal, -1

    def out_of_memory(self, size: int, *, host: bool = False) -> torch.OutOfMemoryError:
        """Return CUDA's error for `size` bytes. `host` says that the host is full, not the GPU."""
        self.empty_cache()  # as CUDA's allocator does before it gives up
        self.retries += host  # if the GPU is full, `_make_room` has counted the retry
        self.ooms += 1
        for observer in observers:
            observer(self.ordinal, size, self.limit, self.free)
        if self.events is not None:
            line = _outer_line(_getframe(1))
            self.events.append(("oom", self.free, size, time_ns(), metadata, line))
        used, reserved = self.allocator.bytes.current, self.reserved().current
        allowed = f"{_readable(self.limit)} allowed; " if self.limit < self.capacity else ""
        sizes = (size, self.capacity, self.capacity - reserved, reserved, used, reserved - used)
        text = _OUT_OF_MEMORY.format(*map(_readable, sizes), ordinal=self.ordinal, allowed=allowed)
        if host:
            text += f" Virtual GPUs use host memory: {_readable(host_has())} left."
        return torch.OutOfMemoryError(text)


_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate {0}. GPU {ordinal} has a total capacity of {1} of which "
    "{2} is free. Including non-PyTorch memory, this process has {3} memory in use. {allowed}Of "
    "the allocated memory {4} is allocated by PyTorch, and {5} is reserved by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for "
    "Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
)


def _readable(nbytes: int) -> str:
    """Format a size as CUDA's allocator does."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes > unit:  # the allocator formats 1 GiB as "1024.00 MiB"
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


def host_has() -> int:
    """Return the available bytes of the host, or of the container if it has fewer."""
    used, total = MemoryGroup().ram()
    available = psutil.virtual_memory().available
    return available if used is None or total is None else min(available, total - used)


def refuse_as_cuda(error: RuntimeError, account: MemoryAccount) -> None:
    """Raise ``torch.OutOfMemoryError`` if `error` is from the host's allocator."""
    __tracebackhide__ = True
    if found := re.search(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes", str(error)):
        raise account.out_of_memory(int(found[1]), host=True) from None
