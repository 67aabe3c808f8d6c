"""Run a function in a forked copy of this process, and bring back what it returns.

Guarantees: whatever the function does, this process, its files and its terminal are as before; the
copy has ended when the call returns, also after Ctrl-C or when it takes too long. On Linux it can
read files that were open from where they were, without moving the parent's position, and not write
them; every other descriptor (terminal, pipe, socket, GPU) leads nowhere, and shared memory is a
private copy. The function is not kept from anything else here: see `confined`.
"""

import ctypes
import gc
import itertools
import mmap
import os
import re
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import Any, NamedTuple

import torch

from gpumagic import faults
from gpumagic.errors import GpuError
from gpumagic.isolation.settings import deferred

_PATIENCE_S = 2.0  # what is over sooner needs no progress
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+\s*(.*)")
_PRIVATE_FIXED = mmap.MAP_PRIVATE | 0x10 if hasattr(mmap, "MAP_PRIVATE") else 0  # MAP_FIXED


class OverLimit(TimeoutError):
    """Signal that a call of `run_forked` exceeded its own limit, not somebody else's."""


def run_forked(
    work: Callable[[], Any], limit: float, waiting: Callable[[float], object] | None = None
) -> Any:
    """Return what `work()` returns, plain data, called in a copy of this process.

    `waiting` is called with the seconds so far, about once a second after the first two. Ctrl-C
    kills the copy. Raises `OverLimit` when it was killed after `limit` seconds, and `GpuError`
    when this system has no fork or the copy has crashed.
    """
    if not hasattr(os, "fork"):
        raise GpuError(f"a dry run needs os.fork, which {sys.platform} does not have")
    receiver, sender = Pipe(duplex=False)
    started, pid, status = time.monotonic(), 0, 0
    try:
        # Raised here, an interrupt would leave a copy that nobody ends, or go on in the copy.
        with deferred(), warnings.catch_warnings():
            # The copy computes nothing and waits for no lock that it could not be killed in.
            warnings.filterwarnings("ignore", ".*multi-?threaded.*fork", DeprecationWarning)
            warnings.filterwarnings("ignore", ".*JAX is multithreaded", RuntimeWarning)
            pid = os.fork()
            if pid == 0:
                _work_in_child(work, sender)
        sender.close()
        answer = _received(receiver, started, limit, waiting)
    finally:
        receiver.close()
        if pid:
            status = _end(pid)
    if answer is None:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an exit of its own"
        raise GpuError(f"the dry run's process ended by {how}; nothing of yours has changed")
    done, value, kept = answer
    for doing, error in kept:
        faults.keep(doing, RuntimeError(error))
    if not done:
        raise GpuError(f"the dry run failed, a fault of gpumagic: {kept[-1][1]}")
    return value


def _received(
    receiver: Connection, started: float, limit: float, waiting: Callable[[float], object] | None
) -> Any:
    """The child's answer; None if it ended without one."""
    while not receiver.poll(1.0 if limit > 1 else limit):
        seconds = time.monotonic() - started
        if seconds > limit:
            raise OverLimit
        if waiting is not None and seconds >= _PATIENCE_S:
            waiting(seconds)
    try:
        return receiver.recv()
    except EOFError:
        return None


def _end(pid: int) -> int:
    """Kill the copy and return its status; an interrupt is raised once it has ended."""
    try:
        os.kill(pid, signal.SIGKILL)  # it is not reaped yet: the number is still its own
        return os.waitpid(pid, 0)[1]
    except KeyboardInterrupt:
        _end(pid)
        raise


def _work_in_child(work: Callable[[], Any], sender: Connection) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills
        os.setpgid(0, 0)  # what signals its own group reaches it alone
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        collects = gc.isenabled()
        gc.disable()  # it could end a mapping that is about to be replaced
        _detach(keep=sender.fileno())
        # What came along stays: the end of a process group would wait for threads left behind.
        gc.freeze()
        if collects:
            gc.enable()
        faults.forget()  # those from now on are sent
        try:
            done, value = True, work()
        except BaseException as error:  # noqa: BLE001  the parent raises it
            done, value = False, None
            faults.keep("following the code of a dry run", error)
        sender.send((done, value, [(f.doing, _where(f)) for f in faults.all_kept()]))
    finally:
        os._exit(0)  # nothing that the parent has registered for its own end may run here


def _where(fault: faults.Fault) -> str:
    """The error and the line of ours that it came from."""
    lines = [line.strip() for line in fault.traceback.splitlines()]
    return " ".join([fault.error, *[line for line in lines if line.startswith("File ")][-1:]])


class _Mapping(NamedTuple):
    """A stretch of this process's memory."""

    start: int
    size: int
    access: str  # such as "rw-p": read, write, execute; private or shared
    offset: int
    path: str


def _detach(keep: int) -> None:
    """Share nothing with the parent from now on but the descriptor `keep`."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:  # not on Linux: at least the standard streams
        descriptors = {0, 1, 2}
    for descriptor in descriptors - {keep, nowhere}:
        _detach_descriptor(descriptor, nowhere)
    for mapping in _mappings():
        if mapping.access.startswith("rw") and mapping.access.endswith("s"):
            _make_private(mapping)


def _detach_descriptor(descriptor: int, nowhere: int) -> None:
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor, inheritable=False)
            return
        # A file that is opened again has a position of its own.
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=False)
        os.close(own)
    except OSError:  # one that listing them had opened, or a file that may not be read
        os.dup2(nowhere, descriptor, inheritable=False)


def _mappings() -> list[_Mapping]:
    """The memory of this process, in the order of its addresses; empty where it cannot be known."""
    try:
        with open("/proc/self/maps") as file:
            found = [_MAPPING.match(line) for line in file]
    except OSError:
        return []
    return [
        _Mapping(int(m[1], 16), int(m[2], 16) - int(m[1], 16), m[3], int(m[4], 16), m[5])
        for m in found
        if m is not None
    ]


def _make_private(mapping: _Mapping) -> None:
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


# Once a backward pass has run with a GPU, torch's engine refuses every backward pass in a forked
# child, because the engine's threads are gone. A dry run needs none of them: it runs all of it on
# its own thread. The refusal is one flag in libtorch_cpu's memory, set in the child by fork itself;
# it is found by comparing that memory before and after, and cleared in the child alone.
_LIBRARY = "libtorch_cpu.so"
_PAGE, _MOST = 4096, 16 * 2**20


def engine_flags() -> bytes:
    """The zeroed variables of libtorch_cpu, as they are before the fork; empty where unknown."""
    return _read(*_variables())


def _read(start: int, size: int) -> bytes:
    """Memory of this process as far as it is still there: what lies behind the library's own may
    have been another's, and given back since. To read that by its address would end the process."""
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            memory.seek(start)
            return memory.read(size) or b""
    except OSError:
        return b""


def set_by_fork(before: bytes) -> list[int]:
    """Return the flags that fork set to 1; call it in the child before torch sets others."""
    start, _ = _variables()
    after = _read(start, len(before))
    return [start + m.start() for m in re.finditer(b"\1", after) if before[m.start()] == 0]


def let_backward_run(flags: list[int]) -> None:
    """Let backward passes run in the child, if one of the flags prevents them."""
    # Else the engine's threads would all make torch's pool of threads at once, and one would fail.
    torch.set_num_threads(torch.get_num_threads())
    torch.autograd.set_multithreading_enabled(False)
    if _works():
        return
    for flag in map(ctypes.c_ubyte.from_address, flags):
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
    """Return the anonymous memory right after the library's mapping: address and bytes."""
    for before, after in itertools.pairwise(_mappings()):
        follows = before.start + before.size == after.start and not after.path
        if before.path.endswith(_LIBRARY) and follows and after.access.startswith("rw"):
            # They begin in the last page of the library's mapping.
            return after.start - _PAGE, min(after.size, _MOST) + _PAGE
    return 0, 0
