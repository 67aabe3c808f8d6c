"""Run jobs on threads that can be interrupted, and discard the output of timed code."""

import ctypes
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from gpumagic.usercode.files import shell, swap_attribute

_THREADS = "gputime"  # name prefix of every `Worker` thread; `Quiet` looks for this prefix


class Quiet:
    """Discard the output of timed code within the block, but not the output of other threads."""

    def __init__(self) -> None:
        self.dropped = False  # whether any output was discarded
        self._lifted = False
        self._thread = threading.get_ident()
        self._patches = ExitStack()

    def __enter__(self) -> None:
        places: list[tuple[Any, str]] = [(sys, "stdout"), (sys, "stderr")]
        if (ipython := shell()) is not None:
            places.append((ipython, "display_pub"))  # as IPython's capture_output does
        for owner, name in places:
            swap_attribute(self._patches, owner, name, _Dropping(getattr(owner, name), self))

    def __exit__(self, *error: object) -> None:
        self._patches.close()  # a stream that the timed code itself has set stays

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Allow output within the block, such as gpumagic's own progress."""
        self._lifted = True
        try:
            yield
        finally:
            self._lifted = False

    def drops(self) -> bool:
        here = threading.current_thread()
        timed = here.ident == self._thread or here.name.startswith(_THREADS)
        self.dropped |= timed and not self._lifted
        return timed and not self._lifted


class _Dropping:
    """Wrap a stream or IPython's display publisher, and pass on output that is not discarded."""

    def __init__(self, target: Any, quiet: Quiet) -> None:
        self._target, self._quiet = target, quiet

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._target, name)
        if name not in ("write", "writelines", "publish", "clear_output"):
            return real

        def unless_dropped(*args: Any, **options: Any) -> Any:
            if self._quiet.drops():
                return len(args[0]) if name == "write" else None
            return real(*args, **options)

        return unless_dropped


class Worker:
    """Run jobs on a thread; a job can be interrupted like code on the main thread."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"{_THREADS} {name}")
        self._lock = threading.Lock()
        self._ident: int | None = None  # the thread's ident while a job runs
        self._interrupted = False
        self._last: Future[Any] | None = None

    def submit(self, job: Callable[[], Any]) -> Future[Any]:
        self._last = self._pool.submit(self._do, job)
        return self._last

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt once in the running job, never in a later job."""
        with self._lock:
            if self._ident is not None and not self._interrupted:
                self._interrupted = True
                _raise_in(self._ident, KeyboardInterrupt)

    def close(self) -> None:
        """End the thread. Do not wait for a running job, which may be impossible to interrupt."""
        self._pool.shutdown(wait=self._last is None or self._last.done())

    def _do(self, job: Callable[[], Any]) -> Any:
        try:
            self._ident = threading.get_ident()
            try:
                return job()
            finally:
                self._end_job()
        except KeyboardInterrupt:
            self._end_job()  # the interrupt may have stopped the first `_end_job`
            raise

    def _end_job(self) -> None:
        """Cancel a pending interrupt, and ignore interrupts until the next job."""
        with self._lock:
            if self._interrupted:
                _take_back()
            self._ident, self._interrupted = None, False


class _TakenBack(BaseException):
    """Raised and caught in place of an interrupt that is still pending when its job ends."""


def _take_back() -> None:
    """Replace this thread's pending interrupt with `_TakenBack`, and catch `_TakenBack`."""
    # Clearing the interrupt alone is not enough. Python 3.11 would then check for an exception at
    # every instruction. Under a profiler or debugger, this check makes the next function hang.
    with suppress(_TakenBack):
        _raise_in(threading.get_ident(), _TakenBack)
        while True:
            pass


def _raise_in(ident: int, kind: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(kind))


def wait_for_all(futures: Collection[Future[Any]], until: str = "ALL_COMPLETED") -> None:
    """Wait for all jobs. If `until` is "FIRST_EXCEPTION", stop waiting when a job fails."""
    # Wait in short steps, because a Ctrl-C just before a wait is handled only after that wait.
    while futures:
        done, futures = wait(futures, timeout=0.5, return_when=until)
        if until == "FIRST_EXCEPTION" and any(future.exception() for future in done):
            return
