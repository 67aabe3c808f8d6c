"""Hold the virtual GPUs of this process and account for their memory: bytes, blocks, peaks, limits.

Guarantees: the numbers are right whichever threads allocate and free, also when a garbage
collection frees during an allocation. Changes are noted in order and counted when somebody reads,
when the GPU could be full, or after some MiB; then the counters are published. An error has the
text of CUDA's allocator.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import prod
from operator import attrgetter
from time import perf_counter_ns, time_ns
from typing import Any

import torch

from gpumagic.device.caching_allocator import CachingAllocator, MemoryStat, in_blocks, segment_for
from gpumagic.telemetry.state_files import (
    ALLOCATED,
    BUSY_NS,
    COUNTERS,
    RESERVED,
    WINDOW_END_NS,
    WINDOW_NS,
)
from gpumagic.virtual import torchless
from gpumagic.virtual.memory_history import (
    USERS,
    Allocation,
    Recording,
    Ring,
    history,
    outer_line,
    owner_of,
)

C: Any = torch._C
GPUS: list[VirtualGpu] = []
"""In the order of their ordinals."""


def refusal(
    size: int, ordinal: int, capacity: int, limit: int, used: int, reserved: int, *, host: bool
) -> str:
    """Return the allocator's error text; `host`: the host has no more memory. Sizes are bytes."""
    allowed = f"{readable(limit)} allowed; " if limit < capacity else ""
    free = max(capacity - reserved, 0)
    text = (
        f"CUDA out of memory. Tried to allocate {readable(size)}. GPU {ordinal} has a "
        f"total capacity of {readable(capacity)} of which {readable(free)} is "
        f"free. Including non-PyTorch memory, this process has {readable(reserved)} memory in use. "
        f"{allowed}Of the allocated memory {readable(used)} is allocated by PyTorch, and "
        f"{readable(reserved - used)} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )
    if host:
        there = readable(torchless.available())
        text += f" A virtual GPU's memory is the host's, which has {there} left."
    return text


def readable(nbytes: int) -> str:
    """A size as CUDA's allocator writes it."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes} bytes"


SMALL = 2**17
"""Elements up to which nobody asks before they are made whether they fit."""
_TOUCHED = 64 * 2**20
"""Bytes from which on the host is asked too, which takes some ten microseconds."""
_UNCOUNTED, _LEAST = 16 * 2**20, 64 * 2**10
"""Bytes that may be noted before they are counted; and what a smaller allocation is taken for."""
_getframe = sys._getframe
_HOST_REFUSES = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")


class Scratch:
    """Own temporary memory: of a CUDA operator beyond its results, or a library's workspace."""

    __slots__ = ("place", "requested")
    place: tuple[int, int]

    def __init__(self, nbytes: int) -> None:
        self.requested = nbytes


class MemoryAccount:
    """Account for the memory of one virtual GPU, of which ``limit`` bytes may be allocated.

    The numbers are published in ``row`` (see :mod:`gpumagic.telemetry.state_files`).
    """

    def __init__(self, ordinal: int, capacity: int, row: Any) -> None:
        self.ordinal = ordinal
        self.capacity = capacity
        self.limit = capacity
        self.allocator = CachingAllocator()
        self.ooms = self.retries = 0
        self.ring: Ring | None = None
        self._row: Any = row
        self.refusal = ""  # why nothing can be allocated
        self._lock = threading.RLock()  # a garbage collection may read the numbers within
        # A weak reference calls back only while it lives itself.
        self._live: dict[int, Allocation | Scratch] = {}
        # Each allocation when it is made and again when its owner dies, which may be on any thread
        # and at any moment. What is called then is one function of C: in one of Python an interrupt
        # may arrive, which Python would drop there.
        self._log: deque[Allocation | Scratch] = deque()
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
            if owner_of[made.co_filename] != USERS:
                made, at = outer_line(frame)
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
            allocator = self.allocator
            if allocator.reserved.current + allocator.needs(nbytes) > self.limit:
                allocator.empty_cache()
                self.retries += 1
        # Memory in pieces too small is not refused here, as it is on a GPU: see docs/limits.md.
        if allocator.bytes.current + in_blocks(nbytes) > self.limit:
            raise self.out_of_memory(segment_for(in_blocks(nbytes)))

    def pass_through(self, sizes: list[int]) -> None:
        """Allocate all of these bytes at once, and free them."""
        if sizes:
            for nbytes in sizes:
                self._room -= max(nbytes, _LEAST)
            if self._room < 0:
                self._make_room(sum(sizes))
                self._room = -1
            taken = [Scratch(nbytes) for nbytes in sizes if nbytes]
            self._log.extend(taken + taken)

    def require(self, size: Iterable[int], dtype: torch.dtype | None) -> None:
        """Raise ``torch.OutOfMemoryError`` if a tensor that is still to be made would not fit."""
        if self.refusal:
            return
        nbytes = prod(size) * (dtype or torch.get_default_dtype()).itemsize
        self._make_room(nbytes)
        if nbytes >= _TOUCHED and nbytes > torchless.available():
            raise self.out_of_memory(in_blocks(nbytes), host=True)

    def record(self, recording: Recording) -> None:
        """Start a ring of events, or stop it."""
        with self._lock:
            self._count()
            for block in self._owned():
                block.find_address()
            self.ring = Ring(recording, self.ring) if recording.enabled else None
            self._room = -1

    def blocks_now(self) -> list[Allocation]:
        """Return every live allocation, by address."""
        with self._lock:
            self._count()
            live = self._owned()
        return sorted(filter(Allocation.find_address, live), key=attrgetter("address"))

    def _owned(self) -> list[Allocation]:
        return [block for block in self._live.values() if isinstance(block, Allocation)]

    def refresh(self) -> None:
        """Count what was allocated and freed until now, and publish it."""
        with self._lock:
            self._count()
            self._publish()

    def _count(self) -> None:
        """Count what was allocated and freed since it was last done, in the order of both."""
        log, live, ring, allocator = self._log, self._live, self.ring, self.allocator
        while log:
            block = log[0]
            key = id(block)
            if key in live:  # it is noted for the second time: freed
                # When the allocator returns no call follows, after which an interrupt could.
                address, size = block.place
                allocator.give(address, size, block.requested)
                del live[key], log[0]
                if ring is not None and isinstance(block, Allocation):
                    ring.note("free", block.address, block.requested, size)
                continue
            block.place = allocator.take(block.requested)
            live[key] = block
            del log[0]
        left = self.limit - allocator.bytes.current
        self._room = -1 if ring is not None or self.refusal else min(left, _UNCOUNTED)

    def empty_cache(self) -> None:
        """Give back to the "driver" what is reserved but not allocated."""
        with self._lock:
            self._count()
            self.allocator.empty_cache()
            self._publish()

    def reset_peak(self) -> None:
        with self._lock:
            self._count()
            for stat in self.allocator.stats:
                stat.peak = stat.current

    def reset_accumulated(self) -> None:
        with self._lock:
            self._count()
            for stat in self.allocator.stats:
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
    def room(self) -> int:
        """Bytes that may be allocated beyond those that were counted last."""
        return self.limit - self.allocator.bytes.current

    @property
    def free(self) -> int:
        """Bytes that the "driver" has left."""
        return max(self.capacity - self.reserved, 0)

    @property
    def reserved(self) -> int:
        """Bytes that the "driver" has given."""
        self.refresh()
        return self.given().current

    def worked(self, since: int) -> None:
        """Note that an operator ran from `since` (``perf_counter_ns``) until now."""
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
        self._row[ALLOCATED] = self.allocator.bytes.current
        self._row[RESERVED] = self.given().current

    def given(self) -> MemoryStat:
        """Return what is reserved, at most all: the model may need more for pieces too small."""
        stat, most = self.allocator.reserved, self.capacity
        return replace(stat, current=min(stat.current, most), peak=min(stat.peak, most))

    def out_of_memory(self, size: int, *, host: bool = False) -> torch.OutOfMemoryError:
        """Return the error of CUDA's allocator; `host`: the host has no more memory."""
        self.empty_cache()  # as CUDA's allocator does before it gives up
        self.retries += 1
        self.ooms += 1
        for observer in history.observers:
            observer(self.ordinal, size, self.limit, self.free)
        if self.ring is not None:
            self.ring.note("oom", self.free, size, size, outer_line(_getframe(1)))
        held = self.allocator.bytes.current, self.given().current
        text = refusal(size, self.ordinal, self.capacity, self.limit, *held, host=host)
        return torch.OutOfMemoryError(text)


def refuse_as_cuda(error: RuntimeError, account: MemoryAccount) -> None:
    """Raise ``torch.OutOfMemoryError`` where the host's allocator has just refused."""
    __tracebackhide__ = True
    if found := _HOST_REFUSES.search(str(error)):
        raise account.out_of_memory(int(found[1]), host=True) from None


@dataclass(frozen=True)
class Properties:
    """What ``torch.cuda.get_device_properties`` answers: an H100's limits."""

    name: str
    total_memory: int
    uuid: uuid.UUID
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 166912
    shared_memory_per_multiprocessor: int = 167936
    L2_cache_size: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, uuid={self.uuid}, virtual=True)"
        )


@dataclass
class VirtualGpu:
    """Hold one device: its account, its random generator, and its current stream."""

    index: int
    account: MemoryAccount
    properties: Properties
    generator: Any = None
    stream: Any = None
    device: torch.device = field(init=False)
    code: int = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device("cuda", self.index)
        self.code = 2 | self.index << 32  # DLDevice {kDLCUDA, index}, read as one int64


_Device = torch.device  # itself, also while a placement replaces the name: it is asked often


def gpu_of(device: torch.device | str | int | None = None) -> VirtualGpu:
    """The GPU of a device, of its number, or of None (the current one)."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, _Device):
        device = device.index
    if device is None or device < 0:
        device = int(C._accelerator_getDeviceIndex())
    if device >= len(GPUS):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return GPUS[device]


def refresh() -> None:
    """Count, and publish, what was allocated and freed until now."""
    for gpu in GPUS:
        gpu.account.refresh()


_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
    "must use the 'spawn' start method"
)


def in_bad_fork() -> bool:
    """Whether this is the child of a fork, in which CUDA cannot be used either."""
    return any(gpu.account.refusal == _FORKED for gpu in GPUS)


def keep_after_fork() -> None:
    """Let the child of a fork use its copies of the parent's virtual GPUs."""
    for gpu in GPUS:
        gpu.account.refusal = ""


def _leave_to_parent() -> None:
    # The child of a fork has copies of these tensors; what it does with them is not its parent's.
    for gpu in GPUS:
        gpu.account.unpublish()
        gpu.account.refuse(_FORKED)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
