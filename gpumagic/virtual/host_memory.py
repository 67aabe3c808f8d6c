"""Tell how much memory the host has for virtual GPUs, or the container that this process is in."""

from pathlib import Path

import psutil

# Of a container: cgroup's second version, and its first.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NONE = 2**63
_GIB = 2**30
LARGEST = 16 * _GIB
"""What a virtual GPU has where nobody says how much, and the host can hold it."""


def total() -> int:
    """Bytes that this process may use at most."""
    return min([psutil.virtual_memory().total, *map(_limit, LIMITS)])


def part_of_the_host(number: int) -> int:
    """What each of so many can hold at the same time: in whole GiB where it is one or more."""
    part = total() // number
    return min(LARGEST, part // _GIB * _GIB or part)


def available() -> int:
    """Bytes that it can have now beside those that it has."""
    limit = min(map(_limit, LIMITS), default=_NONE)
    return min(psutil.virtual_memory().available, limit - psutil.Process().memory_info().rss)


def _limit(path: str) -> int:
    """A container's limit of memory in bytes; a large number where it has none."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return _NONE
