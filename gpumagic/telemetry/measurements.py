"""Post what this kernel measures now and has measured, for whatever view is open.

Nothing here depends on torch, IPython or a widget. Any thread may post and read; who listens is
called on the thread that posts, and can neither fail it nor hold it up with a lock.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from gpumagic import faults

KEPT = 50


@dataclass(frozen=True)
class Measured:
    """A finished measurement, as what is to be shown of it; ``time`` is Unix time of its end."""

    title: str
    text: str
    html: str | None
    time: float
    id: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class Board:
    """What is measured now, what was, and who wants to know."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, Any] | None = None
        self._entries: tuple[Measured, ...] = ()
        self._listeners: dict[int, Callable[[], object]] = {}
        self._numbers = itertools.count()

    @property
    def now(self) -> dict[str, Any] | None:
        """How far the running measurement is; None where none runs."""
        return self._now

    @property
    def entries(self) -> tuple[Measured, ...]:
        """What was measured, the newest first; at most 50."""
        return self._entries

    def post(self, progress: dict[str, Any] | None) -> None:
        """Say how far a measurement is, as JSON; None when it has ended."""
        with self._lock:
            self._now = progress
        self._tell()

    def keep(self, title: str, text: str, html: str | None, time: float) -> None:
        """Add what a measurement gave; `time` is Unix time."""
        with self._lock:
            made = Measured(title, text, html, time, str(next(self._numbers)))
            self._entries = (made, *self._entries)[:KEPT]
        self._tell()

    def subscribe(self, call: Callable[[], object]) -> Callable[[], None]:
        """Have `call` called whenever something is new; the value, called, ends that."""
        with self._lock:
            number = next(self._numbers)
            self._listeners[number] = call

        def close() -> None:
            with self._lock:
                self._listeners.pop(number, None)

        return close

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for call in listeners:
            # A view that fails must not end the measurement.
            with faults.kept("showing a measurement"):
                call()


board = Board()
