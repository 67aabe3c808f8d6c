"""A thread that makes one call at a time, so that who waits for the answer can stop waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

Start = Callable[[str, Callable[[], None]], object]
"""Given a thread's name and what it runs; returns what is false where nothing will run it."""
Call = Callable[[], Callable[[], None]]
"""Must not raise; what it returns is called with the lock held, when the thread is free again."""


def start_thread(name: str, run: Callable[[], None]) -> bool:
    threading.Thread(target=run, name=name, daemon=True).start()
    return True


def no_thread(name: str, run: Callable[[], None]) -> bool:
    """For a sampler that only does what its ``drive`` is called for."""
    return False


class Asker:
    """Makes one call at a time.

    Parameters
    ----------
    changed : Condition
        Held by whoever calls a method of this, but for ``make``; notified when a call has ended.
    wanted : callable
        Whether the thread is to stay when it has nothing to do.
    start : callable
        Starts a thread, given its name and what it runs.
    """

    def __init__(
        self, changed: threading.Condition, wanted: Callable[[], bool], start: Start
    ) -> None:
        self._changed = changed
        self._wanted = wanted
        self._start = start
        self._call: Call | None = None
        self.alive = False

    @property
    def busy(self) -> bool:
        """Whether it has a call in hand."""
        return self._call is not None

    def hand(self, call: Call) -> None:
        """Have a call made."""
        self._call = call
        if not self.alive:
            self.alive = bool(self._start("gpumagic-asker", self._run))
        self._changed.notify_all()

    def make(self) -> bool:
        """Make the call in hand, on this thread; False if there is none."""
        with self._changed:
            call = self._call
        if call is None:
            return False
        end = call()
        with self._changed:
            self._call = None
            end()
            self._changed.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._call is None:
                    if not self._wanted():
                        self.alive = False
                        self._changed.notify_all()
                        return
                    self._changed.wait()
            self.make()
