"""Defer Ctrl-C while something is put back: it waits until that is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """An interrupt within is raised at the end; a second one at once, in case it never ends."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals come to the main thread only
        return
    before: Any = signal.getsignal(signal.SIGINT)
    if not callable(before):  # ignored, or not set by Python
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            before(number, frame)
        came.append((number, frame))

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        before(*came[0])
