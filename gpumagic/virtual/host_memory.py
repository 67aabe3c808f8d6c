"""Tell how much memory the host has for virtual GPUs, or the container that this process is in."""

from pathlib import Path

import psutil

# Of a container: cgroup's second version, and its first.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NONE = 2**63


def total() -> int:
    """Bytes that this process may use at most."""
    return min([psutil.virtual_memory().total, *map(_limit, LIMITS)])


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
