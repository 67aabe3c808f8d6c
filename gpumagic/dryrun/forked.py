"""Run a function in a forked copy of this process, and return its result.

The child has ended when `run_forked` returns, even after Ctrl-C or a timeout. On Linux, the child
can read files that the parent has opened, but cannot write to them or move the parent's position.
The child's other descriptors (terminal, pipe, socket, GPU) become the null device. Memory that the
child would share with the parent becomes a private copy.
"""

import ctypes
import gc
import mmap
import os
import re
import signal
import stat
import struct
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import torch

from gpumagic import faults
from gpumagic.device.cuda_state import no_collections
from gpumagic.errors import GpuError
from gpumagic.isolation.settings import deferred

# Matches a writable shared mapping in /proc/self/maps: start, end, offset and path.
_SHARED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw.s ([0-9a-f]+) \S+ \d+\s*(.*)")
_PRIVATE_FIXED = mmap.MAP_PRIVATE | 0x10 if hasattr(mmap, "MAP_PRIVATE") else 0  # MAP_FIXED


def run_forked(work: Callable[[], Any], limit: float) -> Any:
    """Return the result of `work()`, run in a forked child; None after `limit` seconds."""
    # Raises `GpuError` if this system has no fork, if `work` raises, or if the child crashes.
    if not hasattr(os, "fork"):
        raise GpuError(f"a dry run needs os.fork, which {sys.platform} does not have")
    receiver, sender = Pipe(duplex=False)
    answer, pid, status, end = None, 0, 0, time.monotonic() + limit
    try:
        # Without `deferred`, Ctrl-C here could leave the child running, or be raised in the child.
        with deferred(), warnings.catch_warnings():
            # Python warns that the child may deadlock. A deadlock would end at the time limit.
            warnings.filterwarnings("ignore", ".*multi-?threaded.*fork", DeprecationWarning)
            warnings.filterwarnings("ignore", ".*JAX is multithreaded", RuntimeWarning)
            pid = os.fork()
            if pid == 0:
                _work_in_child(work, sender)
        sender.close()
        # Wait at most a second at a time, because Python handles some signals only between waits.
        while not receiver.poll(min(limit, 1.0)):
            if time.monotonic() > end:
                return None
        with suppress(EOFError):  # the child has ended without a result
            answer = receiver.recv()
    finally:
        receiver.close()
        if pid:
            with deferred():
                os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still the child's
                status = os.waitpid(pid, 0)[1]
    if answer is None:
        how = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "exited"
        raise GpuError(f"the dry run's process {how}; your variables have not changed")
    done, value, kept = answer
    for doing, error in kept:
        faults.keep(doing, RuntimeError(error))
    if not done:
        raise GpuError(f"the dry run failed (a bug in gpumagic): {kept[-1][1]}")
    return value


def _work_in_child(work: Callable[[], Any], sender: Connection) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent kills this process
        os.setpgid(0, 0)  # a signal to the child's group must not reach the parent
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
        with no_collections():  # garbage collection could unmap memory that `_detach` replaces
            _detach(keep=sender.fileno())
            # Never garbage-collect inherited objects, because torch's process groups would wait for
            # threads that a fork does not copy.
            gc.freeze()
        faults.forget()  # only the child's faults are sent to the parent
        try:
            done, value = True, work()
        except BaseException as error:  # noqa: BLE001  the parent raises a GpuError
            done, value = False, None
            faults.keep("following the code of a dry run", error)
        sender.send((done, value, [(f.doing, _where(f)) for f in faults.all_kept()]))
    finally:
        os._exit(0)  # the parent's exit handlers must not run here


def _where(fault: faults.Fault) -> str:
    lines = [line.strip() for line in fault.traceback.splitlines()]
    return " ".join([fault.error, *[line for line in lines if line.startswith("File ")][-1:]])


def _detach(keep: int) -> None:
    """Stop sharing files and memory with the parent, except the descriptor `keep`."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    descriptors = {0, 1, 2}
    with suppress(OSError):  # not on Linux, so detach only the standard streams
        descriptors = {int(name) for name in os.listdir("/proc/self/fd")}
    for descriptor in descriptors - {keep, nowhere}:
        own = nowhere
        with suppress(OSError):  # an unreadable file, or the descriptor that `listdir` has closed
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)
                os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=False)
        if own != nowhere:
            os.close(own)
    _unshare_memory()


def _unshare_memory() -> None:
    shared: list[re.Match[str]] = []
    with suppress(OSError), open("/proc/self/maps") as file:  # this file exists only on Linux
        shared = [found for line in file if (found := _SHARED.match(line))]
    for found in shared:
        start, end, offset = (int(number, 16) for number in found.groups()[:3])
        path = found[4]
        if not path.startswith("/dev/") or path.startswith(("/dev/shm/", "/dev/zero")):
            _make_private(start, end - start, offset, path)


def _make_private(start: int, size: int, offset: int, path: str) -> None:
    remap = ctypes.CDLL(None).mmap
    remap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    access = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:  # the file has no name, or is deleted
        content = ctypes.string_at(start, size)
        remap(start, size, access, _PRIVATE_FIXED | mmap.MAP_ANONYMOUS, -1, 0)
        ctypes.memmove(start, content, size)
        return
    remap(start, size, access, _PRIVATE_FIXED, file, offset)
    os.close(file)


# After a fork, torch's autograd engine has no threads, and a flag makes it refuse backward passes.
# A dry run does not need these threads, but torch cannot reset the flag. `let_backward_run` finds
# the flag's address in the machine code of torch's function `_READER`, and resets the flag.
_READER = "_ZN5torch8autograd6Engine30initialize_device_threads_poolEv"
_ADRP, _LDRB = (0x9F000000, 0x90000000), (0xFFC00000, 0x39400000)  # AArch64: mask, opcode


def let_backward_run() -> None:
    """Let backward passes run in a forked child, on the calling thread."""
    # With one thread, OpenMP does not wait for threads that a fork does not copy. The call also
    # creates torch's thread pool, which could fail if autograd's threads created it together.
    torch.set_num_threads(1)
    torch.autograd.set_multithreading_enabled(False)
    if (flag := refusal()) is not None and flag.value == 1:  # a fork sets the flag to 1
        flag.value = 0


def refusal() -> ctypes.c_ubyte | None:
    """Return the flag that makes torch's engine refuse backward passes; None if not found."""
    try:
        reader = getattr(ctypes.CDLL(torch._C.__file__), _READER)
    except (AttributeError, OSError):
        return None
    start = ctypes.cast(reader, ctypes.c_void_p).value or 0
    address = operand_of(ctypes.string_at(start, 64), start)
    return None if address is None else ctypes.c_ubyte.from_address(address)


def operand_of(code: bytes, start: int) -> int | None:
    """Return the address of the first byte that machine code reads (x86-64 or AArch64); or None."""
    if found := re.search(rb"\x80\x3d(.{4})\0", code, re.DOTALL):  # x86-64: cmpb $0, distance(%rip)
        return start + found.end() + int.from_bytes(found[1], "little", signed=True)
    pages: dict[int, int] = {}  # page addresses, by register
    for n, (word,) in enumerate(struct.iter_unpack("<I", code)):
        base = word >> 5 & 31
        if word & _ADRP[0] == _ADRP[1]:
            distance = (word >> 3 & 0x1FFFFC) | (word >> 29 & 3)
            distance -= (distance & 0x100000) << 1
            pages[word & 31] = (start + 4 * n & ~0xFFF) + (distance << 12)
        elif word & _LDRB[0] == _LDRB[1] and base in pages:
            return int(pages[base] + (word >> 10 & 0xFFF))
    return None
