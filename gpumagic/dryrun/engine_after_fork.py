"""Let torch's autograd engine run in a forked child.

Once a backward pass has run with a GPU there, torch's engine refuses every backward pass in a
forked child, because the engine's threads are gone. A dry run needs none of them: it runs all of
the pass on its own thread. The refusal is one flag in libtorch_cpu's memory, set in the child by
fork itself; it is found by comparing that memory before and after, and cleared in the child alone.
Guarantees: this process is only read; the flag is known by the backward pass that works without it.
"""

import ctypes
import itertools
import re
from functools import lru_cache

import torch

from gpumagic.dryrun.forked import mappings

_LIBRARY = "libtorch_cpu.so"
_PAGE, _MOST = 4096, 16 * 2**20


def flags() -> bytes:
    """The zeroed variables of libtorch_cpu, as they are before the fork; empty where unknown."""
    start, size = _variables()
    return ctypes.string_at(start, size)


def restore(before: bytes) -> None:
    """In the child: let backward passes run here, if they do not."""
    torch.autograd.set_multithreading_enabled(False)
    if _works() or not before:
        return
    start, size = _variables()
    after = ctypes.string_at(start, size)
    newly_set = (m.start() for m in re.finditer(b"\1", after) if before[m.start()] == 0)
    for at in newly_set:
        flag = ctypes.c_ubyte.from_address(start + at)
        flag.value = 0
        if _works():
            return
        flag.value = 1


def _works() -> bool:
    try:
        with torch.enable_grad():
            torch.ones((), device="cpu", requires_grad=True).clone().backward()
    except RuntimeError:
        return False
    return True


@lru_cache(maxsize=1)
def _variables() -> tuple[int, int]:
    """Where that library's variables without a first value lie, and how many bytes they are.

    The anonymous memory right behind the last part of the library that is mapped from its file.
    """
    parts = mappings()
    for before, after in itertools.pairwise(parts):
        follows = before.start + before.size == after.start and not after.path
        if before.path.endswith(_LIBRARY) and follows and after.access.startswith("rw"):
            # They begin in the last page of what is mapped.
            return after.start - _PAGE, min(after.size, _MOST) + _PAGE
    return 0, 0
