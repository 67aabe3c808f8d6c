"""Record how much memory a stretch of code used on a device."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Memory:
    """Bytes of arrays on one device: the peak over the cell, its end and its start."""

    device: str
    peak: int
    allocated: int
    before: int
    allocations: int = 1  # how many there were
