"""Bound what a rank prints: a million lines are to drown neither network, notebook nor disk."""

import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

MOST = 2**18
"""Characters of a cell that a rank sends of each stream; what it writes over itself counts not."""
MOST_LOGGED = 2**24
"""Bytes of what code that is no Python prints, which no cell shows."""
OVER = "\x1e"
"""Stands for a carriage return on its way: ipyparallel would carry it out, and badly."""
_OFTEN_S = 0.25


class _Bounded:
    """A stream that passes on so much, then counts lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left = MOST
        self._last = 0.0
        self.dropped = 0

    def write(self, text: str) -> int:
        if "\r" in text and "\n" not in text:
            self._write_over(text)
            return len(text)
        if passed := text[: self._left]:
            self._left -= len(passed)
            self._stream.write(passed.replace("\r\n", "\n").replace("\r", OVER))
        self.dropped += text.count("\n", len(passed))
        return len(text)

    def _write_over(self, text: str) -> None:
        """A progress bar: so often as one can see it."""
        now = time.monotonic()
        if now - self._last >= _OFTEN_S:
            self._last = now
            self._stream.write(OVER + text.rpartition("\r")[2])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def bound_logs() -> None:
    """Empty the files that C code and programs of this process print to, once they are large."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            file = os.fstat(number)
            if stat.S_ISREG(file.st_mode) and file.st_blocks * 512 > MOST_LOGGED:
                os.ftruncate(number, 0)


@contextlib.contextmanager
def bounded_output() -> Iterator[None]:
    """Within, stdout and stderr are bounded; the end says how much was left out."""
    streams = sys.stdout, sys.stderr
    mine = [_Bounded(stream) for stream in streams]
    sys.stdout, sys.stderr = mine
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for each, stream in zip(mine, streams, strict=True):
            if each.dropped:
                stream.write(f"\n… and {each.dropped:,} more lines\n")
            stream.flush()
