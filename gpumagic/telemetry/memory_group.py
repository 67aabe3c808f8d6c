"""Read this container's RAM limit, its use, and how many processes were killed for lack of RAM.

Linux's control groups, versions 2 and 1. ``GPUMAGIC_CGROUP`` names the folder of a group that is
mounted elsewhere.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

# The files with the limit, the use and the kills; the row of memory.stat with droppable cache.
_VERSIONS = (
    ("memory.max", "memory.current", "memory.events", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "total_inactive_file"),
)

_Group = tuple[int, Path, tuple[str, ...]]  # its limit, 0 if it has none; its folder and files


class MemoryGroup:
    """The control group with the smallest RAM limit among this process's group and its parents;
    ``root`` is the folder of the machine's ``proc`` and ``sys``."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def limit(self) -> int | None:
        """Return the limit in bytes; None if there is none."""
        return next((limit for limit, _, _ in self._limited()), None)

    def ram(self) -> tuple[int | None, int | None]:
        """Return used bytes and all bytes: of the group if it has a limit, else of the machine."""
        for limit, folder, names in self._limited():
            used = _number(folder / names[1])
            cache = _row(folder / "memory.stat", names[3]) or 0
            return None if used is None else max(used - cache, 0), limit
        memory = psutil.virtual_memory()
        return memory.total - memory.available, memory.total

    def kills(self) -> int | None:
        """Return how many processes the out-of-memory killer has ended; None if unknown."""
        groups = self._limited() or self._groups()
        counts = [_row(folder / names[2], "oom_kill") for _, folder, names in groups]
        # Outside of any group, the whole machine's.
        counts.append(_row(self._root / "proc/vmstat", "oom_kill"))
        return next((count for count in counts if count is not None), None)

    def _limited(self) -> list[_Group]:
        """Return the group with the smallest limit; none if there is no limit."""
        # Version 1 writes a huge number for "no limit".
        total = psutil.virtual_memory().total
        return sorted(group for group in self._groups() if 0 < group[0] < total)[:1]

    def _groups(self) -> list[_Group]:
        return [
            (_number(folder / names[0]) or 0, folder, names)
            for folder in self._folders()
            for names in _VERSIONS
        ]

    def _folders(self) -> Iterator[Path]:
        """Yield the folders of this process's groups, the innermost first."""
        if named := os.environ.get("GPUMAGIC_CGROUP"):
            yield Path(named)
            return
        for line in _text(self._root / "proc/self/cgroup").splitlines():
            _, kinds, path = [*line.split(":", 2), "", ""][:3]
            if kinds in ("", "memory"):
                mount = self._root / "sys/fs/cgroup" / kinds
                inner = mount / path.strip("/")
                # In a container the path is often the host's, and the mount is the container's.
                yield from (inner, *inner.parents[: len(inner.relative_to(mount).parts)])


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _row(path: Path, name: str) -> int | None:
    rows = (line.split() for line in _text(path).splitlines())
    return next((int(row[1]) for row in rows if row[:1] == [name] and row[1].isdigit()), None)
