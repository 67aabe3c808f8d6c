"""Let this process write no file any more, by a Linux kernel's Landlock (5.13 and newer).

Guarantees: where `write_nothing` returns True, no code of this process, C++ included, can create,
change or remove a file, and on newer kernels neither connect to a network nor signal another
process. It needs no privilege, cannot be undone, and what may be read stays readable.
"""

import ctypes
import os
import sys

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVILEGES = 38
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# Write, remove a folder or a file, make any kind of them.
_WRITING = sum(1 << bit for bit in (1, *range(4, 13)))


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scope", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def write_nothing() -> bool:
    """Refuse every write to a file but to the null device; False where the kernel cannot."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION)
    if version < 1:
        return False
    truncating = _TRUNCATE if version >= 3 else 0
    # Bind and connect by TCP; signals, and sockets without a name, to others.
    rules = _Ruleset(
        _WRITING | truncating, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0
    )
    known = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(known), 0)
    if ruleset < 0:
        return False
    null = os.open(os.devnull, os.O_PATH)
    allowed = _Beneath(_WRITE_FILE | truncating, null)
    libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(allowed), 0)
    libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return bool(libc.syscall(_RESTRICT_SELF, ruleset, 0) == 0)
