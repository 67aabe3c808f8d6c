"""Show what ranks print: in whole lines, labelled by rank, limited in size.

Figures and tables are shown as they arrive, below the rank's number.
"""

import re
import sys
import threading
import time
from collections import deque
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


def _line(label: str, line: str) -> str:
    return f"[{label}] {line}\n" if line else "\n"


class _WholeLines:
    """A stream of whole lines."""

    def __init__(self, stream: Any, labels: Mapping[int, str]) -> None:
        self._stream, self._labels = stream, labels
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}  # unfinished lines by label

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        label = self._labels.get(threading.get_ident())
        # A line that is overwritten, as a progress bar, has no end to wait for.
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
        """Write unfinished lines."""
        for label, rest in self._begun.items():
            if rest:
                self._stream.write(f"[{label}] {rest}\n")
        self._begun.clear()


# Seconds that a line waits for the same line of other ranks.
_PATIENCE_S = 0.3
_BAR = 40  # characters


class MergedLines:
    """The lines of one stream from several ranks, merged in their order."""

    def __init__(self, ranks: list[int], write: Callable[[str], object]) -> None:
        self._write = write
        self._waiting: dict[int, deque[tuple[str, float]]] = {rank: deque() for rank in ranks}
        self._part = dict.fromkeys(ranks, "")
        self._over: set[int] = set()

    def add(self, rank: int, text: str) -> None:
        """Add output of a rank."""
        *lines, self._part[rank] = (self._part[rank] + text).split("\n")
        now = time.monotonic()
        # Text replaced by a carriage return (a progress bar) is not kept.
        self._waiting[rank].extend((line.rpartition(OVER)[2], now) for line in lines)

    def end(self, rank: int) -> None:
        """End the output of a rank."""
        if self._part[rank]:
            self.add(rank, "\n")
        self._over.add(rank)

    def unfinished(self, rank: int) -> str:
        """Return the unfinished line of a rank."""
        return short(self._part[rank].rstrip().rpartition(OVER)[2].strip(), _BAR)

    def flush(self) -> None:
        """Write lines that need not wait any longer."""
        while any(self._waiting.values()):
            heads = {rank: queue[0] for rank, queue in self._waiting.items() if queue}
            awaited = [r for r in self._waiting if r not in heads and r not in self._over]
            texts = {text for text, _ in heads.values()}
            oldest = min(when for _, when in heads.values())
            if awaited and time.monotonic() - oldest < _PATIENCE_S:
                return
            together = len(texts) == 1 and len(heads) == len(self._waiting) > 1
            for rank, (text, _) in heads.items():
                self._waiting[rank].popleft()
                if not together:
                    self._write(f"[{rank}] {text}\n" if len(self._waiting) > 1 else f"{text}\n")
            if together:
                self._write(f"{texts.pop()}\n")


class Streamed:
    """The output of a cell's ranks, shown as it arrives."""

    def __init__(self, ranks: list[int]) -> None:
        self._merged = {
            "stdout": MergedLines(ranks, lambda text: sys.stdout.write(text)),
            "stderr": MergedLines(ranks, lambda text: sys.stderr.write(text)),
        }
        self._shown: dict[tuple[int, int, str], int] = {}  # length already read, by rank's part
        self._many = len(ranks) > 1

    def take(self, rank: int, part: int, metadata: Mapping[str, Any]) -> None:
        """Read new output of a rank's part."""
        for name, merged in self._merged.items():
            merged.add(rank, self._new(rank, part, name, metadata[name]))
        for drawn in self._new(rank, part, "outputs", metadata["outputs"]):
            self._draw(rank, drawn)

    def _new(self, rank: int, part: int, name: str, every: Any) -> Any:
        known = self._shown.get((rank, part, name), 0)
        self._shown[rank, part, name] = len(every)
        return every[known:]

    def unfinished(self, rank: int) -> str:
        """Return a rank's unfinished line: a progress bar."""
        return self._merged["stderr"].unfinished(rank)

    def end(self, rank: int) -> None:
        """End the output of a rank."""
        for merged in self._merged.values():
            merged.end(rank)

    def _draw(self, rank: int, drawn: Mapping[str, Any]) -> None:
        from IPython.display import display

        self.flush()
        if self._many:
            print(f"[{rank}]", flush=True)
        display(drawn["data"], metadata=drawn["metadata"] or {}, raw=True)

    def flush(self) -> None:
        """Show output that need not wait any longer."""
        for merged in self._merged.values():
            merged.flush()
        sys.stdout.flush()
        sys.stderr.flush()
