"""Time the copies of a real GPU, by events of its own streams."""

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from gpumagic.device import cuda_state
from gpumagic.ledger.counts import before_reading

# Of copies at one line, the first so many are timed, then each of so many.
_FIRST, _EVERY = 64, 16
_MOST_PAIRS = 256


class CopyTimer:
    """Times the copies of a real GPU, by events of its own stream. Untested on a real GPU.

    A copy may be under way long after the call returned, so its time is that between two events,
    which can be read only once both have passed: they wait here, never more than a few hundred.
    """

    def __init__(self) -> None:
        # What was copied, and two events with the ordinal of their GPU.
        self._waiting: deque[tuple[Sequence[Any], Any, Any, int]] = deque()
        self._lock = threading.RLock()

    def wants(self, count: int) -> bool:
        """Whether the copy after `count` others is to be timed: the first few, then some."""
        return count < _FIRST or count % _EVERY == 0

    def begin(self, index: int) -> tuple[Any, Any]:
        """Put an event before a copy into the stream of GPU `index`, which will copy."""
        stream = torch.cuda.current_stream(index)
        event = cuda_state.take_event(index)
        event.record(stream)
        return event, stream

    def end(self, begun: tuple[Any, Any], counts: Sequence[Any]) -> None:
        """Put one after it; its time will be added to the ``seconds`` of each count."""
        start, stream = begun
        event = cuda_state.take_event(stream.device_index)
        event.record(stream)
        with self._lock:
            self._waiting.append((counts, start, event, stream.device_index))
            while self._waiting and self._waiting[0][2].query():
                self._read()
            if len(self._waiting) > _MOST_PAIRS:
                self._waiting.popleft()  # it stays untimed

    def read_all(self) -> None:
        """Read every pair, waiting for those that have not passed."""
        with self._lock:
            while self._waiting and cuda_state.working():
                self._waiting[0][2].synchronize()
                self._read()

    def _read(self) -> None:
        counts, start, end, index = self._waiting.popleft()
        seconds = start.elapsed_time(end) * 1e-3
        cuda_state.give_events(index, start, end)
        for count in counts:
            count.seconds += seconds
            count.timed += 1


TIMER = CopyTimer()
before_reading.append(TIMER.read_all)
