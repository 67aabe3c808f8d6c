"""Show what ranks print: whole lines, labelled by rank, limited in size.

Figures and tables are shown as they arrive, below the rank's number.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from gpumagic.display.table import short

MOST = 2**18
"""Characters of each stream that a rank sends in a cell, without text that "\\r" replaces."""
OVER = "\x1e"
"""Replaces a carriage return in transit: ipyparallel would interpret it, and badly."""
_OFTEN_S = 0.25


class _Bounded:
    """A stream that passes on a limited output, then counts lines."""

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
        """Pass on a progress bar, as often as it is visible."""
        now = time.monotonic()
        if now - self._last >= _OFTEN_S:
            self._last = now
            self._stream.write(OVER + text.rpartition("\r")[2])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def bounded_output() -> Iterator[None]:
    """Within, limit stdout and stderr; the last line says how much was left out."""
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


@contextmanager
def whole_lines(labels: Mapping[int, str]) -> Iterator[None]:
    """Within, threads with these idents print whole lines; others print as usual."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    streams = {name: _WholeLines(stream, labels) for name, stream in before.items()}
    for name, stream in streams.items():
        setattr(sys, name, stream)
    try:
        yield
    finally:
        for name, stream in streams.items():
            stream.end()
            # Another stream may have replaced it since; keep that.
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])


_MOVES = re.compile("[\r\x1b]")


class _Labelled:
    """Writes whole lines, after the label of who printed them."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self.begun: dict[str, str] = {}  # unfinished lines by label

    def add(self, label: str, text: str) -> None:
        *lines, self.begun[label] = (self.begun.get(label, "") + text).split("\n")
        # Text replaced by a carriage return (a progress bar) is not kept.
        lines = [line.rpartition(OVER)[2] for line in lines]
        mark = f"[{label}] " if label else ""
        if lines:
            self._write("".join(f"{mark}{line}\n" if line else "\n" for line in lines))

    def end(self) -> None:
        """Write unfinished lines."""
        for label, rest in self.begun.items():
            if rest:
                self.add(label, "\n")


class _WholeLines:
    """A stream of whole lines."""

    def __init__(self, stream: Any, labels: Mapping[int, str]) -> None:
        self._stream, self._labels = stream, labels
        self._lock = threading.Lock()
        self._lines = _Labelled(stream.write)
        self.end = self._lines.end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        label = self._labels.get(threading.get_ident())
        # A line that is overwritten, as a progress bar, has no end to wait for.
        if label is None or _MOVES.search(text):
            self._stream.write(text)
        else:
            with self._lock:
                self._lines.add(label, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)


_BAR = 40  # characters


class Streamed:
    """The output of a cell's ranks, shown as it arrives."""

    def __init__(self, ranks: list[int]) -> None:
        self._labels = {rank: str(rank) * (len(ranks) > 1) for rank in ranks}
        self._lines = {
            "stdout": _Labelled(lambda text: sys.stdout.write(text)),
            "stderr": _Labelled(lambda text: sys.stderr.write(text)),
        }
        self._shown: dict[tuple[int, int, str], int] = {}  # length already read, by rank's part

    def take(self, rank: int, part: int, metadata: Mapping[str, Any]) -> None:
        """Show new output of a rank's part."""
        for name, lines in self._lines.items():
            lines.add(self._labels[rank], self._new(rank, part, name, metadata[name]))
        for drawn in self._new(rank, part, "outputs", metadata["outputs"]):
            self._draw(rank, drawn)
        sys.stdout.flush()
        sys.stderr.flush()

    def _new(self, rank: int, part: int, name: str, every: Any) -> Any:
        known = self._shown.get((rank, part, name), 0)
        self._shown[rank, part, name] = len(every)
        return every[known:]

    def unfinished(self, rank: int) -> str:
        """Return a rank's unfinished line: a progress bar."""
        begun = self._lines["stderr"].begun.get(self._labels[rank], "")
        return short(begun.rstrip().rpartition(OVER)[2].strip(), _BAR)

    def end(self) -> None:
        """Show unfinished lines."""
        for lines in self._lines.values():
            lines.end()

    def _draw(self, rank: int, drawn: Mapping[str, Any]) -> None:
        from IPython.display import display

        if label := self._labels[rank]:
            print(f"[{label}]", flush=True)
        display(drawn["data"], metadata=drawn["metadata"] or {}, raw=True)
