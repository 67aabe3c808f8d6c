"""Run a function in a forked copy of this process, and bring back what it returns.

Guarantees: whatever the function does, this process, its files and its terminal are as before; the
copy has ended when the call returns, also after Ctrl-C or when it takes too long. The function is
not kept from anything else here: see `confined`.
"""

import ctypes
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from typing import Any

from gpumagic import faults
from gpumagic.dryrun.shared_with_parent import detach
from gpumagic.errors import GpuError

_PATIENCE_S = 2.0  # what is over sooner needs no progress
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class Overdue(Exception):
    """The copy did not end in time and was killed."""


def run_forked(
    work: Callable[[], Any], limit: float, waiting: Callable[[float], object] | None = None
) -> Any:
    """Return what `work()` returns, plain data, called in a copy of this process.

    `waiting` is called with the seconds so far, about once a second after the first two. Ctrl-C
    kills the copy. Raises `Overdue` when it was killed after `limit` seconds, and `GpuError` when
    this system has no fork or the copy has crashed.
    """
    if not hasattr(os, "fork"):
        raise GpuError(f"a dry run needs os.fork, which {sys.platform} does not have")
    receiver, sender = Pipe(duplex=False)
    started = time.monotonic()
    pid = _fork()
    if pid == 0:
        _work_in_child(work, sender)
    try:
        sender.close()
        answer = _received(receiver, started, limit, waiting)
    finally:
        receiver.close()
        os.kill(pid, signal.SIGKILL)  # it is not reaped yet: the number is still its own
        _, status = os.waitpid(pid, 0)
    if answer is None:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an exit of its own"
        raise GpuError(f"the dry run's process ended by {how}; nothing of yours has changed")
    done, value, kept = answer
    for doing, error in kept:
        faults.keep(doing, RuntimeError(error))
    if not done:
        raise GpuError(f"the dry run failed, a fault of gpumagic: {kept[-1][1]}")
    return value


def _fork() -> int:
    with warnings.catch_warnings():
        # The copy computes nothing and waits for no lock that it could not be killed in.
        warnings.filterwarnings("ignore", ".*multi-?threaded.*fork", DeprecationWarning)
        return os.fork()


def _received(
    receiver: Connection, started: float, limit: float, waiting: Callable[[float], object] | None
) -> Any:
    """The child's answer; None if it ended without one."""
    while not receiver.poll(1.0 if limit > 1 else limit):
        seconds = time.monotonic() - started
        if seconds > limit:
            raise Overdue
        if waiting is not None and seconds >= _PATIENCE_S:
            waiting(seconds)
    try:
        return receiver.recv()
    except EOFError:
        return None


def _work_in_child(work: Callable[[], Any], sender: Connection) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
        detach(keep=sender.fileno())
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
