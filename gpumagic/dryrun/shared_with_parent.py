"""Take from a forked child what it still shares with its parent: open files and shared memory.

Guarantees, on Linux: files that were open can be read on from where they were, without moving the
parent's position, and not be written; every other descriptor (terminal, pipe, socket, GPU) leads
nowhere; memory that is shared between processes is a private copy.
"""

import ctypes
import mmap
import os
import re
import stat
from typing import NamedTuple

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+\s*(.*)")
_PRIVATE_FIXED = mmap.MAP_PRIVATE | 0x10 if hasattr(mmap, "MAP_PRIVATE") else 0  # MAP_FIXED


class Mapping(NamedTuple):
    """A stretch of this process's memory."""

    start: int
    size: int
    access: str  # such as "rw-p": read, write, execute; private or shared
    offset: int
    path: str


def detach(keep: int) -> None:
    """Share nothing with the parent from now on but the descriptor `keep`."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in _open_descriptors():
        if descriptor not in (keep, nowhere):
            _detach_descriptor(descriptor, nowhere)
    for mapping in mappings():
        if mapping.access.startswith("rw") and mapping.access.endswith("s"):
            _make_private(mapping)


def _open_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:  # not on Linux: at least those that are for output
        return [0, 1, 2]


def _detach_descriptor(descriptor: int, nowhere: int) -> None:
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor, inheritable=False)
            return
        # Opened anew, it has a position of its own.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=False)
        os.close(own)
    except OSError:  # one that listing them had opened, or a file that may not be read
        os.dup2(nowhere, descriptor, inheritable=False)


def mappings() -> list[Mapping]:
    """The memory of this process, in the order of its addresses; empty where it cannot be known."""
    try:
        with open("/proc/self/maps") as file:
            found = [_MAPPING.match(line) for line in file]
    except OSError:
        return []
    return [
        Mapping(int(m[1], 16), int(m[2], 16) - int(m[1], 16), m[3], int(m[4], 16), m[5])
        for m in found
        if m is not None
    ]


def _make_private(mapping: Mapping) -> None:
    start, size, _, offset, path = mapping
    if path.startswith("/dev/") and not path.startswith(("/dev/shm/", "/dev/zero")):
        return  # a device's own
    remap = ctypes.CDLL(None, use_errno=True).mmap
    remap.restype, pointer = ctypes.c_void_p, ctypes.c_void_p
    remap.argtypes = [pointer, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # it has no name, or no more
        content = ctypes.string_at(start, size)
        remap(start, size, access, _PRIVATE_FIXED | mmap.MAP_ANONYMOUS, -1, 0)
        ctypes.memmove(start, content, size)
        return
    remap(start, size, access, _PRIVATE_FIXED, file, offset)
    os.close(file)
