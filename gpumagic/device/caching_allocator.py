"""Model the blocks and the reserved memory of torch's caching allocator for CUDA.

torch reserves segments of memory from the driver, and splits a segment into blocks for tensors. The
rules are those of c10/cuda/CUDACachingAllocator.cpp, for default settings and one stream.
``tests/cuda/test_memory_model.py`` compares the model with the real allocator.
"""

from bisect import bisect_left
from dataclasses import dataclass

BLOCK = 512  # every request is rounded up to a multiple of this many bytes
_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
"""Requests of up to `_SMALL` bytes share segments of `_SMALL_SEGMENT` bytes."""
_MIDDLE, _MIDDLE_SEGMENT = 10 * 2**20, 20 * 2**20
"""Larger requests below `_MIDDLE` bytes share segments of `_MIDDLE_SEGMENT` bytes."""
_ROUND = 2 * 2**20  # larger requests get a segment each, rounded up to a multiple of `_ROUND`


def in_blocks(nbytes: int) -> int:
    """Return `nbytes` rounded up to a multiple of `BLOCK`."""
    return -(-nbytes // BLOCK) * BLOCK


def segment_for(size: int) -> int:
    """Return the bytes to request from the driver if no free block is large enough for `size`."""
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _MIDDLE_SEGMENT if size < _MIDDLE else -(-size // _ROUND) * _ROUND


@dataclass
class MemoryStat:
    """One statistic as ``torch.cuda.memory_stats`` reports it."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0


class CachingAllocator:
    """Model the blocks of one device. A block has an address, counted from 0, and a size."""

    def __init__(self) -> None:
        self.bytes, self.blocks, self.requested = MemoryStat(), MemoryStat(), MemoryStat()
        self.reserved, self.segments = MemoryStat(), MemoryStat()
        self._segments: dict[int, int] = {}  # sizes of segments, by address
        # Free blocks as (size, address): a sorted list of small blocks, and one of large blocks.
        self._free: tuple[list[tuple[int, int]], ...] = ([], [])
        self._sizes: dict[int, int] = {}  # sizes of free blocks, by address
        self._starts: dict[int, int] = {}  # addresses of free blocks, by end address

    @property
    def stats(self) -> tuple[MemoryStat, ...]:
        return self.bytes, self.blocks, self.requested, self.reserved, self.segments

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Allocate a block; return its address and its size, which may exceed `nbytes`."""
        size = -(-nbytes // BLOCK) * BLOCK or BLOCK
        least, free = (BLOCK, self._free[0]) if size <= _SMALL else (_SMALL + 1, self._free[1])
        place = bisect_left(free, (size,))
        reserved = 0
        if place < len(free):
            whole, address = free[place]
        else:
            whole = reserved = segment_for(size)
            address = self._lowest_gap(whole)
        left = whole - size
        split = left >= least
        if split:
            rest = (left, address + size)
            into = bisect_left(free, rest, 0, place)
        else:
            size = whole
        bytes_, blocks, requested = self.bytes, self.blocks, self.requested
        # No function calls from here on, so that an interrupt cannot come between two writes.
        if reserved:
            self._segments[address] = whole
            stat = self.reserved
            stat.current += whole
            stat.allocated += whole
            if stat.current > stat.peak:
                stat.peak = stat.current
            stat = self.segments
            stat.current += 1
            stat.allocated += 1
            if stat.current > stat.peak:
                stat.peak = stat.current
        else:
            del free[place], self._sizes[address], self._starts[address + whole]
        if split:
            free[into:into] = (rest,)
            self._sizes[address + size] = left
            self._starts[address + whole] = address + size
        bytes_.current += size
        bytes_.allocated += size
        if bytes_.current > bytes_.peak:
            bytes_.peak = bytes_.current
        requested.current += nbytes
        requested.allocated += nbytes
        if requested.current > requested.peak:
            requested.peak = requested.current
        blocks.current += 1
        blocks.allocated += 1
        if blocks.current > blocks.peak:
            blocks.peak = blocks.current
        return address, size

    def free(self, address: int, size: int, nbytes: int) -> None:
        """Free a block, and merge it with adjacent free blocks of its segment."""
        free = self._free[size > _SMALL]
        start, end = address, address + size
        before = after = -1
        if address in self._starts and address not in self._segments:
            start = self._starts[address]
            before = bisect_left(free, (address - start, start))
        if end in self._sizes and end not in self._segments:
            after = bisect_left(free, (self._sizes[end], end))
            end += self._sizes[end]
        place = bisect_left(free, (end - start, start))
        stat, blocks, requested = self.bytes, self.blocks, self.requested
        # No function calls from here on, so that an interrupt cannot come between two writes.
        free[place:place] = ((end - start, start),)
        # The merged block is larger and comes after the entries to delete, so their indices stay.
        if after > before:  # delete the later entry first, because this keeps `before` valid
            del free[after]
        if before >= 0:
            del free[before], self._starts[address]
        if before > after >= 0:
            del free[after]
        if after >= 0:
            del self._sizes[address + size]
        self._sizes[start] = end - start
        self._starts[end] = start
        stat.current -= size
        stat.freed += size
        requested.current -= nbytes
        requested.freed += nbytes
        blocks.current -= 1
        blocks.freed += 1

    def needs(self, nbytes: int) -> tuple[int, int]:
        """Return the bytes to reserve for an allocation of `nbytes` now, and the block's size."""
        size = in_blocks(nbytes)
        # `allocate` repeats these lines, because a call would slow each allocation down.
        least, free = (BLOCK, self._free[0]) if size <= _SMALL else (_SMALL + 1, self._free[1])
        place = bisect_left(free, (size,))
        reserved = 0 if place < len(free) else segment_for(size)
        whole = reserved or free[place][0]
        return reserved, size if whole - size >= least else whole

    def empty_cache(self) -> None:
        """Release each segment without an allocated block, as ``torch.cuda.empty_cache`` does."""
        # A segment without allocated blocks is one free block of the same address and size.
        for address, size in [*(self._segments.items() & self._sizes.items())]:
            row = self._free[size != _SMALL_SEGMENT or (size, address) not in self._free[0]]
            place, stat, count = row.index((size, address)), self.reserved, self.segments
            del row[place], self._segments[address], self._sizes[address]
            del self._starts[address + size]
            stat.current -= size
            stat.freed += size
            count.current -= 1
            count.freed += 1

    def _lowest_gap(self, size: int) -> int:
        lowest = 0
        for address in sorted(self._segments):
            if address - lowest >= size:
                break
            lowest = address + self._segments[address]
        return lowest
