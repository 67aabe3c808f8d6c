"""Show the tables of ``%gpus`` and ``%gpus --doctor``."""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict
from html import escape
from textwrap import wrap
from typing import Any

from gpumagic.display import table
from gpumagic.display.table import block, tag
from gpumagic.display.units import share
from gpumagic.errors import as_typed
from gpumagic.gputable.gpu_columns import (
    BARS,
    FREE,
    INKS,
    OWNERS,
    gpu_columns,
    holder_columns,
    holders,
    label,
    split,
)
from gpumagic.telemetry.doctor import Check
from gpumagic.telemetry.snapshot import GpuSample, Problem, Snapshot

_CERTAIN_CURE = "set CUDA_DEVICE_ORDER=PCI_BUS_ID before the kernel starts to be sure"


class GpuTable:
    """The GPUs of a snapshot as text of 80 columns, or `width`, and as HTML.

    Shows all GPUs, or those with a UUID in `only`; each process, or sums by notebook.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        only: Collection[str] | None = None,
        processes: bool = False,
        width: int = 80,
    ) -> None:
        self.snapshot = snapshot
        self.width = width
        self.processes = processes
        named = [g for g in snapshot.gpus if only is None or g.uuid in only or g.mig in only]
        # Another kernel's virtual GPUs cannot be used here: its line has their number.
        self.gpus = [gpu for gpu in named if not gpu.virtual or gpu.ordinal is not None]
        self.splits = [split(gpu, snapshot.processes) for gpu in self.gpus]
        self._held = named
        self.holders = holders(named, snapshot.processes, each=processes)

    def __repr__(self) -> str:
        blocks = []
        if self.gpus:
            host, dot, facts = _caption(self.snapshot, self.gpus).partition(" · ")
            host = table.short(host, max(self.width - table.width(dot + facts), 12))
            blocks.append([table.short(host + dot + facts, self.width)])
            blocks[-1] += self._gpu_lines() + _legend(self._owners(), self.width)
        if self.holders:
            held = self._holder_columns(html=False)
            blocks.append(table.lines(held, room=self.width))
        remarks = [
            line for note in self._remarks() for line in table.wrapped(note, "", "", self.width)
        ]
        remarks += self._problem_lines()
        if remarks:
            blocks.append(remarks)
        return "\n\n".join("\n".join(lines) for lines in blocks)

    def _gpu_lines(self) -> list[str]:
        """Return the rows of GPUs: bars are shortened first, and then names."""
        for length in BARS:
            columns = gpu_columns(self.gpus, self.splits, length=length)
            if table.fits(columns, self.width):
                break
        return table.lines(columns, room=self.width)

    def _repr_html_(self) -> str:
        parts = []
        if self.gpus:
            parts.append(tag("div", _caption(self.snapshot, self.gpus), "gm-caption"))
            parts.append(
                table.html(gpu_columns(self.gpus, self.splits, html=True), css="gm-titled")
            )
            marks = (
                f'<i class="gm-{part}"></i><span>{OWNERS[part]}</span>' for part in self._owners()
            )
            parts.append(f'<div class="gm-legend">{"".join(marks)}</div>')
        if self.holders:
            parts.append(table.html(self._holder_columns(html=True), css="gm-titled gm-section"))
        parts += [tag("div", note, "gm-note") for note in self._remarks()]
        parts += [
            f'<div class="gm-problem">{escape(self._cause(problem))}'
            f"{'<br>' if self.gpus else ' '}{_typed(_sentence(problem.cure))}</div>"
            for problem in self.snapshot.problems
        ]
        return block("".join(parts))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return table.json_bundle(self.snapshot)

    def _remarks(self) -> list[str]:
        if self._held and not self.gpus and not self.snapshot.problems:
            return [f"This kernel has no GPU; {as_typed('%gpus --virtual 2')} makes virtual ones."]
        return _notes(self.gpus)

    def _owners(self) -> list[str]:
        return [name for name in OWNERS if any(getattr(part, name, 0) for part in self.splits)]

    def _holder_columns(self, *, html: bool) -> list[table.Column]:
        now = self.snapshot.time
        return holder_columns(self.holders, self._held, now, self.processes, html=html)

    def _cause(self, problem: Problem) -> str:
        return _sentence(problem.cause) if self.gpus else f"No GPU: {problem.cause}."

    def _problem_lines(self) -> list[str]:
        lines = []
        for problem in self.snapshot.problems:
            if not self.gpus:
                text = f"{self._cause(problem)[:-1]}; {problem.cure}"
                lines += table.wrapped(text, room=self.width)
                continue
            lines += table.wrapped(self._cause(problem), "", "", self.width)
            lines += table.wrapped(_sentence(problem.cure), "  ", "  ", self.width)
        return lines


def _legend(owners: Sequence[str], width: int) -> list[str]:
    """Return the legend in one line, or two if it is too long."""
    marks = [*(f"{INKS[name]} {OWNERS[name]}" for name in owners), f"{FREE} free"]
    glued = "  ".join(mark.replace(" ", table.GLUE) for mark in marks)
    return [line.replace(table.GLUE, " ") for line in wrap(glued, width)]


def _caption(snapshot: Snapshot, gpus: Sequence[GpuSample]) -> str:
    """Return the machine in one line."""
    host = snapshot.host
    whole = [gpu for gpu in gpus if gpu.mig is None]
    virtual = sum(gpu.virtual for gpu in whole)
    busy = "" if host.cpu_utilization is None else f" {host.cpu_utilization:.0f} %"
    parts = [
        host.name,
        f"CUDA {snapshot.cuda}" if snapshot.cuda else "",
        f"driver {snapshot.driver}" if snapshot.driver else "",
        *snapshot.software,
        _count(len(whole) - virtual, "GPU"),
        _count(virtual, "virtual GPU"),
        f"{_count(host.cpu_count, 'CPU')}{busy}" if host.cpu_count else "",
        f"RAM {share(*host.ram)}" if host.memory_total else "",
    ]
    return " · ".join(filter(None, parts))


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'s' * (count > 1)}" if count else ""


def _notes(gpus: Sequence[GpuSample]) -> list[str]:
    """Return notes on these GPUs' rows, a sentence each."""
    found = []
    for gpu in gpus:
        # A GPU at full load is at its power cap; that needs no note.
        slow = [reason for reason in gpu.throttle or () if reason != "power cap"]
        if slow:
            found.append(f"{label(gpu)} runs slower than it could: {', '.join(slow)}.")
    if any(gpu.unified and gpu.vendor != "apple" for gpu in gpus):
        found.append("A GPU that shares the host's memory shows the host's.")
    unsure = {gpu.kind for gpu in gpus if not gpu.ordinal_certain}
    if "xpu" in unsure:
        found.append("xpu:N? is a guess, for Level Zero may order unlike GPUs otherwise.")
    if "cuda" in unsure:
        found.append(f"cuda:N? is a guess, for CUDA may order unlike GPUs so; {_CERTAIN_CURE}.")
    return found


def _sentence(text: str) -> str:
    """Return a sentence with a capital, unless it begins with code, and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def _typed(text: str) -> str:
    """Escaped, with what one can type as code."""
    return re.sub(
        r"%load_ext gpumagic|%gpus(?: --\w+)*(?: \d+)?|pip (?:un)?install [\w -]+|[A-Z]{2,}_[A-Z_]+"
        r"|--gpus all",
        lambda match: tag("code", match[0]),
        escape(text),
    )


_MARKS = {True: "✓", False: "✗", None: "·"}
_CSS = {True: "gm-ok", False: "gm-bad", None: "gm-dim"}


class DoctorTable:
    """Checks as text of at most 100 columns, and as HTML, in the order given."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)

    def __repr__(self) -> str:
        return "\n".join(table.lines(self._columns()))

    def _repr_html_(self) -> str:
        return block(table.html(self._columns()))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return {table.JSON: {"record": "Checks", "checks": list(map(asdict, self.checks))}}

    def _columns(self) -> list[table.Column]:
        cures = [f"→ {check.cure}" if check.cure else "" for check in self.checks]
        found = [escape(check.found) for check in self.checks]
        return [
            table.Column(
                "",
                [f"{_MARKS[check.ok]} {check.name}" for check in self.checks],
                html=[_marked(check) for check in self.checks],
            ),
            table.Column(
                "",
                [check.found for check in self.checks],
                fit="wrap",
                css=[f"gm-wrap{' gm-dim' * (check.ok is None)}" for check in self.checks],
                notes=cures,
                html=[
                    f"{words}<br><b>{escape(cure)}</b>" if cure else words
                    for words, cure in zip(found, cures, strict=True)
                ],
            ),
        ]


def _marked(check: Check) -> str:
    return f'<span class="gm-mark {_CSS[check.ok]}">{_MARKS[check.ok]}</span>{escape(check.name)}'
