"""Post what this kernel measures now and has measured, for whatever view is open.

Nothing here depends on torch, IPython or a widget. Any thread may post and read; who listens is
called on the thread that posts, and can neither fail it nor hold it up with a lock.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumagic import faults

KEPT = 50


@dataclass(frozen=True)
class Measured:
    """A finished measurement, as what is to be shown of it."""

    title: str
    text: str
    bars: list[dict[str, Any]]  # of each device: where, share of the slowest, text
    time: float  # Unix time of its end
    id: str


class Board:
    """What is measured now, what was, and who wants to know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[object, Callable[[], object]] = {}
        self._numbers = itertools.count()
        # How far the running measurement is, as JSON; and those that have ended, the newest first.
        self.now: dict[str, Any] | None = None
        self.entries: tuple[Measured, ...] = ()

    def post(self, progress: dict[str, Any] | None) -> None:
        """Say how far a measurement is, as JSON; None when it has ended."""
        self.now = progress
        self._tell()

    def keep(self, text: str, time: float, title: str, bars: list[dict[str, Any]]) -> None:
        """Add a result; `time` is Unix time."""
        with self._lock:
            made = Measured(title, text, bars, time, str(next(self._numbers)))
            self.entries = (made, *self.entries)[:KEPT]
        self._tell()

    def subscribe(self, call: Callable[[], object]) -> Callable[[], object]:
        """Have `call` called whenever something is new; the value, called, ends that."""
        key = object()
        self._listeners[key] = call
        return lambda: self._listeners.pop(key, None)

    def _tell(self) -> None:
        for call in list(self._listeners.values()):
            # A view that fails must not end the measurement.
            with faults.kept("showing a measurement"):
                call()


board = Board()
