"""Run jobs on threads that can be interrupted as the main thread can.

Guarantees: an interrupt ends the job that it was meant for, or none.
"""

import ctypes
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from gpumagic.isolation.output import THREADS

_Job = Callable[[], Any]
# How often Ctrl-C is looked for.
_LOOK_S = 0.5


class Worker:
    """A thread whose job can be interrupted as the main thread's can."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"{THREADS} {name}")
        self._lock = threading.Lock()
        # Of the thread, while it does a job that was not interrupted yet.
        self._ident: int | None = None
        self._interrupted = False
        self._last: Future[Any] | None = None

    def submit(self, job: _Job) -> Future[Any]:
        """Have it done after what it was given before."""
        self._last = self._pool.submit(self._do, job)
        return self._last

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the job that it does now, once, at its next step of Python."""
        with self._lock:
            if self._ident is not None and not self._interrupted:
                self._interrupted = True
                _raise_in(self._ident, KeyboardInterrupt)

    def close(self) -> None:
        """End it; only code that cannot be interrupted is not waited for."""
        self._pool.shutdown(wait=self._last is None or self._last.done())

    def _do(self, job: _Job) -> Any:
        try:
            self._ident = threading.get_ident()
            try:
                return job()
            finally:
                self._settle()
        except KeyboardInterrupt:
            self._settle()  # it may have come between two steps of ours
            raise

    def _settle(self) -> None:
        """No interrupt comes from here on, nor one that was sent too late."""
        with self._lock:
            if self._interrupted:
                _take_back()
            self._ident, self._interrupted = None, False


class _TakenBack(BaseException):
    """Comes in the place of an interrupt that was sent too late."""


def _take_back() -> None:
    """Let no interrupt of this thread come any more.

    Were it replaced by nothing, Python 3.11 would look for it at every step ever after, and
    hang in the first function that a profiler or debugger follows.
    """
    try:
        _raise_in(threading.get_ident(), _TakenBack)
        while True:
            pass
    except _TakenBack:
        pass


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def wait_for_all(futures: Collection[Future[Any]], until: str = "ALL_COMPLETED") -> None:
    """Wait for jobs, or until the first has failed; an interrupt is raised within half a second."""
    # Python sees a signal that comes just before it waits for a lock only when that is over.
    left: Collection[Future[Any]] = futures
    while left:
        done, left = wait(futures, _LOOK_S, until)
        if until == "FIRST_EXCEPTION" and any(future.exception() for future in done):
            return
