"""Set out GPUs and their holders as columns, for text and for HTML."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.display.style import bar, tag
from gpumagic.display.table import GLUE, Column, short
from gpumagic.display.units import NOT_KNOWN, age, size
from gpumagic.gputable.gpu_rows import GpuRow, held
from gpumagic.gputable.holders import Holder, Split
from gpumagic.telemetry.snapshot import GpuSample

_BAR = 14
_INKS = (("█", "mine"), ("▓", "others"), ("░", "reserved"))
_FREE = "·"


def gpu_columns(shown: Sequence[GpuRow], *, html: bool = False) -> list[Column]:
    """A row for each GPU; a column that says nothing of any of them is left out."""
    columns = [
        Column("device", [r.device for r in shown], html=[_device(r) for r in shown]),
        Column(
            "NVML",
            [r.nvml for r in shown],
            number=True,
            css="gm-dim",
            html=[tag("span", r.nvml, title="the number in nvidia-smi") for r in shown],
        ),
        Column(
            "name",
            [_virtual(r.name) if r.gpu.virtual else r.name for r in shown],
            fit="cut",
            css="gm-name",
            html=[tag("span", r.name, title=_full_name(r.gpu)) for r in shown],
        ),
        Column(
            "memory",
            [text_bar(r.split, r.gpu.memory_total) for r in shown],
            css="gm-tight",
            html=[_memory(r) for r in shown],
        ),
        Column("", [r.memory for r in shown], number=True, html=[_words(r.memory) for r in shown]),
        Column(
            "utilization" if html else "util",
            [r.utilization for r in shown],
            number=not html,
            html=[_utilization(r) for r in shown],
        ),
        Column(
            "temperature" if html else "temp",
            [r.temperature for r in shown],
            number=True,
            html=[_words(r.temperature, "gm-bad" * _hot(r.gpu)) for r in shown],
        ),
        Column(
            "power", [r.power for r in shown], number=True, html=[_words(r.power) for r in shown]
        ),
    ]
    if all(r.gpu.virtual for r in shown):
        # A virtual GPU has neither warmth nor current: two columns of N/A say nothing.
        del columns[-2:]
    return [c for c in columns if c.head != "NVML" or any(c.cells)]


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


def _full_name(gpu: GpuSample) -> str:
    return f"{gpu.name or ''} {gpu.uuid}".strip()


def _device(row: GpuRow) -> str:
    here = row.gpu.ordinal is not None
    device = tag("b", row.device, "gm-code") if here else tag("span", row.device, "gm-dim")
    return device + (tag("span", "virtual", "gm-badge") if row.gpu.virtual else "")


def _memory(row: GpuRow) -> str:
    parts, total = row.split, row.gpu.memory_total
    if not parts.known or not total:
        return bar([], "not known how much is used")
    counts = {"this kernel": parts.mine, "others": parts.others, "reserved": parts.reserved}
    words = (f"{name} {size(count)}" for name, count in (counts | {"free": parts.free}).items())
    drawn = [(f"gm-{name}", getattr(parts, name) / total) for _, name in _INKS]
    return bar(drawn, ", ".join(words))


def _utilization(row: GpuRow) -> str:
    if row.gpu.utilization is None:
        return _words(NOT_KNOWN)
    drawn = bar([("gm-busy", row.gpu.utilization / 100)], row.utilization, short=True)
    return drawn + _words(row.utilization)


def _hot(gpu: GpuSample) -> bool:
    known = gpu.temperature is not None and gpu.temperature_limit is not None
    return known and (gpu.temperature or 0.0) >= (gpu.temperature_limit or 0.0)


def _words(text: str, css: str = "") -> str:
    """N/A stands back, so that what is known stands out."""
    return tag("span", text, "gm-dim" if text == NOT_KNOWN else css)


def holder_columns(
    holders: Sequence[Holder], gpus: Sequence[GpuSample], now: float, processes: bool, *, html: bool
) -> list[Column]:
    """A row for each holder: its memory, and of a process what it is."""
    parts = [held(holder, gpus) for holder in holders]
    pids = [" ".join(map(str, holder.pids)) for holder in holders]
    started = [h.started for h in holders]
    columns = [
        Column(
            "held by",
            [short(h.name, 34) for h in holders],
            css=[_looks(h) for h in holders],
            html=[tag("span", h.name, title=h.name) for h in holders],
        ),
        Column("user", [short(h.user or "", 12) for h in holders]),
        Column("PID" if html else "pid", pids),
        Column("running", ["" if s is None else age(now - s) for s in started]),
        Column(
            "memory",
            [" · ".join(part.replace(" ", GLUE) for part in each) for each in parts],
            fit="wrap",
            css="gm-wrap",
            html=[" ".join(tag("span", part) for part in each) for each in parts],
        ),
    ]
    if html:
        columns.insert(3, Column("kind", [h.kind or "" for h in holders]))
    return columns if processes else [*columns[:2], columns[-1]]


def _looks(holder: Holder) -> str:
    if holder.mine:
        return "gm-name gm-this"
    return "gm-name" if holder.pids else "gm-name gm-dim"
