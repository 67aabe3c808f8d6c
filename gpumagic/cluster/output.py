"""Print the output of ranks and threads as whole lines with labels; report time and memory."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from html import escape
from typing import Any

from gpumagic.display import table
from gpumagic.display.table import Shown, block, coded
from gpumagic.display.units import duration, many, share, size, some

MOST = 2**18  # maximum number of characters that a rank sends per cell and stream


class WholeLines:
    """A stream that writes only whole lines, with a label before each line."""

    # If `label` returns None, text is written unchanged. `bars`: write progress bars unchanged too.
    # After `most` characters, further lines are only counted.
    def __init__(
        self, stream: Any, label: Callable[[], str | None], most: float, *, bars: bool = False
    ) -> None:
        self._stream, self._label, self._left, self._bars = stream, label, most, bars
        self._lock = threading.Lock()
        self._begun: dict[str, str] = {}  # unfinished lines by label
        self._dropped = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        label = self._label()
        if label is None or (self._bars and ("\r" in text or "\x1b" in text)):
            self._stream.write(text)
        else:
            with self._lock:
                self._add(label, text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def unfinished(self) -> str:
        """Return the unfinished line, such as a progress bar, shortened to 40 characters."""
        return table.short("".join(self._begun.values()).strip(), 40)

    def end(self) -> None:
        """Write unfinished lines, and the number of lines that were not written."""
        for label in [label for label, rest in self._begun.items() if rest]:
            self._add(label, "\n")
        if self._dropped:
            self._stream.write(f"… and {many(self._dropped, 'more line')}\n")
        self._stream.flush()
        self._left = float("inf")  # no limit for a logger that still writes here

    def _add(self, label: str, text: str) -> None:
        every = (self._begun.get(label, "") + text).split("\n")
        # Drop text before a carriage return, because progress bars overwrite this text.
        *lines, rest = (line[line.rfind("\r", 0, -1) + 1 :] for line in every)
        self._begun[label] = rest[:MOST]
        mark = f"[{label}] " if label else ""
        whole = [f"{mark}{line}".rstrip("\r") + "\n" if line else "\n" for line in lines]
        while whole and self._left > 0:
            self._left -= len(whole[0])
            self._stream.write(whole.pop(0))
        self._dropped += len(whole)


@contextmanager
def whole_lines(
    label: Callable[[], str | None], most: float = float("inf"), *, bars: bool = False
) -> Iterator[WholeLines]:
    """Replace stdout and stderr by `WholeLines`; yield the new stderr, which gets progress bars."""
    mine: Any = [WholeLines(each, label, most, bars=bars) for each in (sys.stdout, sys.stderr)]
    with redirect_stdout(mine[0]), redirect_stderr(mine[1]):
        try:
            yield mine[1]
        finally:
            for stream in mine:
                stream.end()


def show_new(metadata: Mapping[str, Any], shown: Counter[str], label: str) -> None:
    """Show a rank's new output. Update `shown`, which counts the shown characters and figures."""
    from IPython.display import display

    for name in ("stdout", "stderr", "outputs"):
        new = metadata[name][shown[name] :]
        shown[name] += len(new)
        if name != "outputs":
            print(new, end="", file=getattr(sys, name), flush=True)
            continue
        for drawn in new:  # figures and tables
            if label:
                print(f"[{label}]", flush=True)
            display(drawn["data"], metadata=drawn["metadata"] or {}, raw=True)


@dataclass(frozen=True)
class RankTime:
    """Time and peak memory of one rank, or of one device of this process."""

    name: str  # "rank 1", "cuda:1"
    seconds: float
    peak: int | None = None  # bytes
    parts: int = 1  # how many times this rank or device ran the cell
    virtual: bool = False


@dataclass(frozen=True, repr=False)
class RanksReport(Shown):
    """The report of one cell on the ranks of a cluster, or on several devices of this process."""

    ranks: tuple[RankTime, ...]  # ranks that completed the cell, or the devices of this process
    seconds: float  # wall time of the cell; on ranks, with the time to send code and variables
    said: tuple[str, ...] = ()  # texts: how variables were split, sent, moved or gathered
    notes: tuple[str, ...] = ()  # warnings, such as a replaced rank or a graph that was not copied
    wrong: tuple[str, ...] = ()  # why a variable could not be gathered or reduced


def sent_in_words(names: Collection[str], nbytes: int, seconds: float) -> str:
    """Return ``sent x: 4.0 MiB in 2.0 ms`` for the report; empty if nothing was sent."""
    return f"sent {some(names)}: {size(nbytes)} in {duration(seconds)}" if names and nbytes else ""


@dataclass(frozen=True, repr=False)
class RanksTable(Shown):
    """The ranks of a cluster, one row each. The row of a dead rank shows how the rank died."""

    title: str
    rows: tuple[dict[str, Any], ...]


def text(record: RanksReport | RanksTable) -> str:
    """Return the text of a table, or of a report: ``2 ranks · 3.20 s (slowest: rank 1, …)``."""
    if isinstance(record, RanksTable):
        return "\n".join([record.title, *table.lines(_columns(record), "  ")])
    return "\n".join([" · ".join(_parts(record)), *(f"  → {note}" for note in record.notes)])


def html(record: RanksReport | RanksTable) -> str:
    """Return a report or a table as HTML. A click on a report opens a table of its ranks."""
    if isinstance(record, RanksTable):
        return block(f"<div>{escape(record.title)}</div>{table.html(_columns(record))}")
    head, *rest = _parts(record)
    first = f'<b class="gm-where">{escape(head)}</b>'
    line = ' <span class="gm-dim">·</span> '.join([first, *map(coded, rest)])
    columns = [
        table.Column("", [each.name for each in record.ranks]),
        table.Column("parts", [f"{each.parts:,}" for each in record.ranks], number=True),
        table.Column("time", [duration(each.seconds) for each in record.ranks], number=True),
        table.Column("peak", [size(each.peak) for each in record.ranks], number=True),
    ]
    body = f"<details><summary>{line}</summary>{table.html(columns)}</details>"
    body += "".join(f"<div>→ {coded(note)}</div>" for note in record.notes)
    return block(body, "report", css="gpumagic gm-report")


def _parts(report: RanksReport) -> list[str]:
    names = [each.name for each in report.ranks]
    head = f"{len(names)} ranks" if len(names) > 1 and names[0].startswith("rank") else some(names)
    virtual = " (virtual)" if any(each.virtual for each in report.ranks) else ""
    peaks = {size(each.peak): each for each in report.ranks if each.peak is not None}
    parts = [head + virtual, _times(report), *filter(None, report.said)]
    if len(peaks) == 1:
        known = sum(each.peak is not None for each in report.ranks)
        parts.append(f"peak {next(iter(peaks))}" + " each" * (1 < len(names) == known))
    elif peaks:
        most = max(peaks.values(), key=lambda each: each.peak or 0)
        parts.append(f"peak {size(most.peak)} on {most.name}")
    return parts


def _times(report: RanksReport) -> str:
    ran: Sequence[RankTime] = sorted((e for e in report.ranks if e.parts), key=lambda e: -e.seconds)
    ends = {"slowest": ran[0], "fastest": ran[-1]} if len(ran) > 1 else {}
    parts = [f"{how}: {each.name}, {duration(each.seconds)}" for how, each in ends.items()]
    if idle := [each.name for each in report.ranks if not each.parts]:
        parts.append(f"{some(idle)} had no items")
    return duration(report.seconds) + (f" ({'; '.join(parts)})" if parts else "")


def _columns(record: RanksTable) -> list[table.Column]:
    rows = record.rows
    memory = [share(row.get("used"), row.get("total")) for row in rows]
    gpus = ["virtual" if row.get("virtual") else row.get("name", "") for row in rows]
    return [
        table.Column("rank", [str(row["rank"]) for row in rows], number=True),
        table.Column("host", [row.get("host", "") for row in rows]),
        table.Column("device", [row.get("device", "") for row in rows]),
        table.Column("GPU", gpus, fit="cut"),
        table.Column("memory", memory, number=True),
        table.Column("pid", [str(row.get("pid", "")) for row in rows], number=True),
        table.Column("state", [row["state"] for row in rows], fit="wrap"),
    ]
