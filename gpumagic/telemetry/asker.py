"""Make one call at a time on a thread, so that who waits for the answer can stop waiting.

Not an executor of the standard library: its thread is no daemon, and a driver that never answers
would keep the process from ending.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Start = Callable[[str, Callable[[], None]], bool]
"""Starts a thread, given its name and what it runs; returns whether something will run it."""
Call = Callable[[], Callable[[], None]]
"""Must not raise; what it returns is called with the lock held, when the thread is free again."""


def start_thread(name: str, run: Callable[[], None]) -> bool:
    threading.Thread(target=run, name=name, daemon=True).start()
    return True


def no_thread(name: str, run: Callable[[], None]) -> bool:
    """For a sampler that only does what its ``drive`` is called for."""
    return False


class Asker:
    """Makes one call at a time; ``began`` is when the last one was handed over.

    ``changed`` is held by whoever calls a method of this, but for ``make``, and notified when a
    call has ended. ``wanted`` says whether the thread is to stay when it has nothing to do.
    """

    def __init__(
        self, changed: threading.Condition, wanted: Callable[[], bool], start: Start
    ) -> None:
        self._changed = changed
        self._wanted = wanted
        self._start = start
        self._call: Call | None = None
        self.alive = False
        self.began = 0.0

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._call is not None

    def hand(self, call: Call, now: float) -> None:
        """Have a call made."""
        self._call, self.began = call, now
        if not self.alive:
            self.alive = self._start("gpumagic-asker", self._run)
        self._changed.notify_all()

    def make(self) -> bool:
        """Make the call, on this thread; False if there is none."""
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
