"""Count bytes as torch's allocator for GPUs does: in whole blocks."""

BLOCK = 512
"""Bytes: every request is rounded up to a multiple of this (c10/cuda/CUDACachingAllocator.cpp)."""


def in_blocks(nbytes: int) -> int:
    """What so many bytes take."""
    return -(-nbytes // BLOCK) * BLOCK
