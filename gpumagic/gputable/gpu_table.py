"""Show what GPUs there are, how busy they are, and who holds them: the table of ``%gpus``."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from html import escape
from textwrap import wrap

from gpumagic.display import table
from gpumagic.display.shown import block, tag
from gpumagic.gputable.gpu_columns import gpu_columns, holder_columns
from gpumagic.gputable.gpu_rows import GpuRow, caption, cause, notes, rows, sentence
from gpumagic.gputable.holders import by_notebook, by_process
from gpumagic.telemetry.snapshot import Snapshot

_LEGEND = "█ this kernel  ▓ others  ░ reserved by the driver  · free"
_COLORS = {"mine": "this kernel", "others": "others", "reserved": "the driver"}


class GpuTable:
    """The GPUs of a snapshot as text of at most 100 columns, and as HTML.

    Of all GPUs, or of those whose UUID is in `only`; with each process, or sums by notebook.
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

    def __repr__(self) -> str:
        return self.text()

    def text(self) -> str:
        """For terminals."""
        blocks = []
        if self.rows:
            head = table.short(caption(self.snapshot, self.rows), table.WIDTH)
            blocks.append([head, *table.lines(gpu_columns(self.rows)), _LEGEND])
        if self.holders:
            blocks.append(table.lines(self._holder_columns(html=False)))
        remarks = [line for note in notes(self.rows) for line in wrap(note, table.WIDTH)]
        remarks += self._problem_lines()
        if remarks:
            blocks.append(remarks)
        return "\n\n".join("\n".join(lines) for lines in blocks)

    def _repr_html_(self) -> str:
        parts = []
        if self.rows:
            parts.append(tag("div", caption(self.snapshot, self.rows), "gm-caption"))
            parts.append(table.html(gpu_columns(self.rows, html=True), css="gm-titled"))
            parts.append(_legend(self.rows))
        if self.holders:
            parts.append(table.html(self._holder_columns(html=True), css="gm-titled gm-section"))
        parts += [tag("div", note, "gm-note") for note in notes(self.rows)]
        parts += [
            f'<div class="gm-problem">{escape(cause(problem, no_gpu=not self.rows))}'
            f"{'<br>' if self.rows else ' '}{_typed(sentence(problem.cure))}</div>"
            for problem in self.snapshot.problems
        ]
        return block("".join(parts))

    def _holder_columns(self, *, html: bool) -> list[table.Column]:
        gpus = [row.gpu for row in self.rows]
        return holder_columns(self.holders, gpus, self.snapshot.time, self.processes, html=html)

    def _problem_lines(self) -> list[str]:
        lines = []
        for problem in self.snapshot.problems:
            if not self.rows:
                line = f"{cause(problem, no_gpu=True)[:-1]}; {problem.cure}"
                lines += table.wrapped(line)
                continue
            lines += wrap(cause(problem, no_gpu=False), table.WIDTH)
            lines += table.wrapped(sentence(problem.cure), "  ", "  ")
        return lines


def _legend(shown: Sequence[GpuRow]) -> str:
    """Of the colors that occur."""
    marks = (
        f'<i class="gm-{part}"></i><span>{name}</span>'
        for part, name in _COLORS.items()
        if any(getattr(row.split, part) for row in shown)
    )
    return f'<div class="gm-legend">{"".join(marks)}</div>'


def _typed(text: str) -> str:
    """Escaped, with what one can type as code."""
    return re.sub(
        r"%gpus(?: --\w+)*(?: \d+)?|pip (?:un)?install [\w -]+|CUDA_[A-Z_]+|--gpus all",
        lambda match: tag("code", match[0]),
        escape(text),
    )
