"""Time the copies of a real GPU, by events of its own stream.

On a GPU a copy may be under way long after the call returned, so its time is that between two
events, which can be read only once both have passed: they wait here. Untested on a real GPU.
"""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

_FIRST, _EVERY = 64, 16
_MOST = 256


class CopyTimer:
    """Pairs of events that are not read yet; never more than a few hundred."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Sequence[Any], int, Any, Any]] = deque()
        self._lock = threading.RLock()
        # An event belongs to the device that it was recorded on first.
        self._spare: dict[int, list[Any]] = {}

    def wants(self, count: int) -> bool:
        """Whether the copy after `count` others is to be timed: the first few, then some."""
        return count < _FIRST or count % _EVERY == 0

    def begin(self, index: int) -> tuple[int, Any, Any]:
        """Put an event before a copy into the stream of GPU `index`, which will copy."""
        stream = torch.cuda.current_stream(index)
        event = self._event(index)
        event.record(stream)
        return index, event, stream

    def end(self, begun: tuple[int, Any, Any], counts: Sequence[Any]) -> None:
        """Put one after it; its time will be added to the ``seconds`` of each count."""
        index, start, stream = begun
        event = self._event(index)
        event.record(stream)
        with self._lock:
            self._waiting.append((counts, index, start, event))
            while self._waiting and self._waiting[0][3].query():
                self._read()
            if len(self._waiting) > _MOST:
                self._waiting.popleft()  # it stays untimed

    def read_all(self) -> None:
        """Read every pair, waiting for those that have not passed."""
        with self._lock:
            while self._waiting:
                self._waiting[0][3].synchronize()
                self._read()

    def _event(self, index: int) -> Any:
        spare = self._spare.setdefault(index, [])
        return spare.pop() if spare else torch.cuda.Event(enable_timing=True)

    def _read(self) -> None:
        counts, index, start, end = self._waiting.popleft()
        seconds = start.elapsed_time(end) * 1e-3
        for count in counts:
            count.seconds += seconds
            count.timed += 1
        self._spare[index] += [start, end]


TIMER = CopyTimer()
