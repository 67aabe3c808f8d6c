"""Let several threads print at the same time: whole lines, each with the thread's own label."""

import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def whole_lines(labels: Mapping[int, str]) -> Iterator[None]:
    """Within, what threads with these idents print comes in whole lines; others print as ever."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {name: _WholeLines(stream, labels) for name, stream in before.items()}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.end()
            # Another may have been put there since, which stays.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


_MOVES = re.compile("[\r\x1b]")


def _line(label: str, line: str) -> str:
    return f"[{label}] {line}\n" if line else "\n"


class _WholeLines:
    """Stands for a stream."""

    def __init__(self, stream: Any, labels: Mapping[int, str]) -> None:
        self._stream, self._labels = stream, labels
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}  # by label, what has no end yet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        label = self._labels.get(threading.get_ident())
        # A line that is written over itself, as a progress bar is, has no end to wait for.
        if label is None or _MOVES.search(text):
            self._stream.write(text)
        else:
            with self._lock:
                *lines, rest = (self._begun.get(label, "") + text).split("\n")
                self._begun[label] = rest
                if lines:
                    self._stream.write("".join(_line(label, line) for line in lines))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def end(self) -> None:
        """Write what has no end."""
        for label, rest in self._begun.items():
            if rest:
                self._stream.write(f"[{label}] {rest}\n")
        self._begun.clear()
