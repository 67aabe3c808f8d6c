"""``%gpus``: what GPUs there are, how busy they are, and who holds them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from textwrap import wrap

from gpumagic.display.units import age
from gpumagic.gputable.gpu_rows import Row, caption, cause, held, notes, rows, sentence
from gpumagic.gputable.gpus_html import html
from gpumagic.gputable.holders import Holder, Split, by_notebook, by_process
from gpumagic.telemetry.snapshot import Snapshot

WIDTH = 100
_BAR = 14
_INKS = (("█", "mine"), ("▓", "others"), ("░", "reserved"))
_FREE = "·"
# Keeps "cuda:1 3.1 GiB" on one line, and is a space at the end.
_GLUE = "\N{NO-BREAK SPACE}"
_LEGEND = "█ this kernel  ▓ others  ░ reserved by the driver  · free"


class GpuTable:
    """The GPUs of a snapshot as text of at most 100 columns, and as HTML.

    Parameters
    ----------
    snapshot : Snapshot
    only : collection of str, optional
        UUIDs of the GPUs to show; all if None.
    processes : bool
        Show each process that holds memory, and not their sums by notebook.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        only: Collection[str] | None = None,
        processes: bool = False,
    ) -> None:
        self.snapshot = snapshot
        self.processes = processes
        self.rows = rows(snapshot, only)
        shown = [row.gpu for row in self.rows]
        sums = by_process if processes else by_notebook
        self.holders = sums(shown, snapshot.processes)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """For terminals."""
        blocks = []
        if self.rows:
            blocks.append([caption(self.snapshot, self.rows)[:WIDTH], *_gpu_lines(self.rows)])
        if self.holders:
            blocks.append(self._holder_lines())
        remarks = [line for note in notes(self.rows) for line in wrap(note, WIDTH)]
        remarks += self._problem_lines()
        if remarks:
            blocks.append(remarks)
        return "\n\n".join("\n".join(lines) for lines in blocks)

    def _repr_html_(self) -> str:
        return html(self.snapshot, self.rows, self.holders, self.processes)

    def _holder_lines(self) -> list[str]:
        gpus = [row.gpu for row in self.rows]
        header = ["held by", "user", "pid", "running", "memory"]
        table = [
            [
                _cut(holder.name, 34),
                _cut(holder.user or "", 12),
                _pids(holder),
                _since(holder, self.snapshot),
                " · ".join(part.replace(" ", _GLUE) for part in held(holder, gpus)),
            ]
            for holder in self.holders
        ]
        if not self.processes:
            header = [header[0], header[1], header[-1]]
            table = [[line[0], line[1], line[-1]] for line in table]
        lines = _align([header, *table], right=())
        return [line for text in lines for line in _hang(text, lines[0].index("memory"))]

    def _problem_lines(self) -> list[str]:
        lines = []
        for problem in self.snapshot.problems:
            if not self.rows:
                line = f"{cause(problem, no_gpu=True)[:-1]}; {problem.cure}"
                lines += wrap(line, WIDTH, subsequent_indent="  ")
                continue
            lines += wrap(cause(problem, no_gpu=False), WIDTH)
            lines += wrap(
                sentence(problem.cure), WIDTH, initial_indent="  ", subsequent_indent="  "
            )
        return lines


def _gpu_lines(shown: Sequence[Row]) -> list[str]:
    physical = any(not row.gpu.virtual for row in shown)
    columns = ["device", "NVML", "name", "memory", "", "util", "temp", "power"]
    table = [
        [
            row.place,
            row.nvml,
            row.name if not row.gpu.virtual else _virtual(row.name),
            text_bar(row.split, row.gpu.memory_total),
            row.memory,
            row.utilization,
            row.temperature,
            row.power,
        ]
        for row in shown
    ]
    drop = set() if any(row.nvml for row in shown) else {1}
    # A virtual GPU has neither warmth nor current: two columns of N/A say nothing.
    drop |= set() if physical else {6, 7}
    keep = [column for column in range(len(columns)) if column not in drop]
    others = [column for column in keep if column != 2]
    spare = WIDTH - sum(_width(table, columns, column) + 2 for column in others)
    for line in table:
        line[2] = _cut(line[2], spare)
    picked = [[line[column] for column in keep] for line in [columns, *table]]
    right = [place for place, column in enumerate(keep) if column in (1, 4, 5, 6, 7)]
    return [*_align(picked, right), _LEGEND]


def text_bar(parts: Split, total: int | None) -> str:
    """A bar of characters; empty where it is not known how much is used."""
    if not parts.known or not total:
        return " " * _BAR
    drawn = ""
    seen = 0
    for ink, name in _INKS:
        count = getattr(parts, name)
        seen = min(seen + count, total)
        # Whatever there is shows, if only as one character.
        width = max(round(seen / total * _BAR) - len(drawn), 1 if count > total / 100 else 0)
        drawn += ink * width
    return drawn[:_BAR].ljust(_BAR, _FREE)


def _virtual(name: str) -> str:
    return name if "virtual" in name.lower() else f"{name} (virtual)"


def _pids(holder: Holder) -> str:
    return " ".join(map(str, holder.pids))


def _since(holder: Holder, snapshot: Snapshot) -> str:
    return "" if holder.started is None else age(snapshot.time - holder.started)


def _width(table: Sequence[Sequence[str]], columns: Sequence[str], column: int) -> int:
    return max(len(columns[column]), *(len(line[column]) for line in table))


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _align(table: Sequence[Sequence[str]], right: Collection[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    ]


def _hang(line: str, indent: int) -> list[str]:
    """A long last column goes on below itself."""
    return [
        (line[:indent] if first else " " * indent) + part.replace(_GLUE, " ")
        for first, part in (
            (place == 0, part)
            for place, part in enumerate(wrap(line[indent:], WIDTH - indent) or [""])
        )
    ]
