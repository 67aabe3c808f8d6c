"""What timed code prints is shown once, not ten thousand times."""

from __future__ import annotations

import sys
import threading
from typing import Any

THREADS = "gputime"
"""How the threads are named that run timed code besides the one that asked for it."""


class Quiet:
    """Within, what timed code prints is dropped; other threads print as ever.

    Attributes
    ----------
    dropped : bool
        Whether there was anything.
    """

    def __init__(self) -> None:
        self.dropped = False
        self._thread = threading.get_ident()
        self._before: list[tuple[str, Any, Any]] = []

    def __enter__(self) -> None:
        for name in ("stdout", "stderr"):
            before = getattr(sys, name)
            sink = _Sink(before, self)
            self._before.append((name, before, sink))
            setattr(sys, name, sink)

    def __exit__(self, *error: object) -> None:
        while self._before:
            name, before, sink = self._before.pop()
            # Another may have been put there since, which stays.
            if getattr(sys, name) is sink:
                setattr(sys, name, before)

    def drops(self) -> bool:
        """Whether what this thread prints now is dropped."""
        here = threading.current_thread()
        if here.ident != self._thread and not here.name.startswith(THREADS):
            return False
        self.dropped = True
        return True


class _Sink:
    """A stream in another's place, which it is to all but those who write."""

    def __init__(self, stream: Any, quiet: Quiet) -> None:
        self._stream, self._quiet = stream, quiet

    def write(self, text: str) -> int:
        if self._quiet.drops():
            return len(text)
        return int(self._stream.write(text))

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
