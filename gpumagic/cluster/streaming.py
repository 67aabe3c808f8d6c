"""Show what ranks print while they run: a line that all print once, others with their rank.

What is drawn (figures, tables) is shown as it comes, below the number of its rank.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from gpumagic.cluster.bounded import OVER
from gpumagic.display.table import short

# So long a line waits for the same line of the other ranks.
_PATIENCE_S = 0.3
_BAR = 40  # characters


class MergedLines:
    """The lines of one stream from several ranks, merged in their order."""

    def __init__(
        self,
        ranks: list[int],
        write: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write, self._clock = write, clock
        self._waiting: dict[int, deque[tuple[str, float]]] = {rank: deque() for rank in ranks}
        self._part = dict.fromkeys(ranks, "")
        self._over: set[int] = set()

    def add(self, rank: int, text: str) -> None:
        """More of what a rank has printed."""
        *lines, self._part[rank] = (self._part[rank] + text).split("\n")
        now = self._clock()
        # Of a line that is written over itself (a progress bar) the last state counts.
        self._waiting[rank].extend((line.rpartition(OVER)[2], now) for line in lines)

    def end(self, rank: int) -> None:
        """A rank prints no more."""
        if self._part[rank]:
            self.add(rank, "\n")
        self._over.add(rank)

    def unfinished(self, rank: int) -> str:
        """The line that a rank has not ended yet, as it is now."""
        return short(self._part[rank].rstrip().rpartition(OVER)[2].strip(), _BAR)

    def flush(self) -> None:
        """Write what needs to wait no longer."""
        while any(self._waiting.values()):
            heads = {rank: queue[0] for rank, queue in self._waiting.items() if queue}
            awaited = [r for r in self._waiting if r not in heads and r not in self._over]
            texts = {text for text, _ in heads.values()}
            oldest = min(when for _, when in heads.values())
            if awaited and self._clock() - oldest < _PATIENCE_S:
                return
            together = len(texts) == 1 and len(heads) == len(self._waiting) > 1
            for rank, (text, _) in heads.items():
                self._waiting[rank].popleft()
                if not together:
                    self._write(f"[{rank}] {text}\n" if len(self._waiting) > 1 else f"{text}\n")
            if together:
                self._write(f"{texts.pop()}\n")


class Streamed:
    """What the ranks of one cell print and draw, shown as it comes."""

    def __init__(self, ranks: list[int]) -> None:
        self._merged = {
            "stdout": MergedLines(ranks, lambda text: sys.stdout.write(text)),
            "stderr": MergedLines(ranks, lambda text: sys.stderr.write(text)),
        }
        self._shown: dict[tuple[int, int, str], int] = {}  # of a rank's part, how much
        self._many = len(ranks) > 1

    def take(self, rank: int, part: int, metadata: Mapping[str, Any]) -> None:
        """Take what is new of a rank's part."""
        for name, merged in self._merged.items():
            merged.add(rank, self._new(rank, part, name, metadata[name]))
        for drawn in self._new(rank, part, "outputs", metadata["outputs"]):
            self._draw(rank, drawn)

    def _new(self, rank: int, part: int, name: str, every: Any) -> Any:
        known = self._shown.get((rank, part, name), 0)
        self._shown[rank, part, name] = len(every)
        return every[known:]

    def unfinished(self, rank: int) -> str:
        """What a rank writes over itself just now: a progress bar."""
        return self._merged["stderr"].unfinished(rank)

    def end(self, rank: int) -> None:
        """A rank has no more to do."""
        for merged in self._merged.values():
            merged.end(rank)

    def _draw(self, rank: int, drawn: Mapping[str, Any]) -> None:
        from IPython.display import display

        self.flush()
        if self._many:
            print(f"[{rank}]", flush=True)
        display(drawn["data"], metadata=drawn["metadata"] or {}, raw=True)

    def flush(self) -> None:
        """Show what needs to wait no longer."""
        for merged in self._merged.values():
            merged.flush()
        sys.stdout.flush()
        sys.stderr.flush()
