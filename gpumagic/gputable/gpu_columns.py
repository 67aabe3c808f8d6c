"""Set out GPUs and their holders as columns, for text and for HTML."""

from __future__ import annotations

from collections.abc import Sequence

from gpumagic.display.shown import bar, tag
from gpumagic.display.table import GLUE, Column, short
from gpumagic.display.units import NOT_KNOWN, age, share, size
from gpumagic.gputable.gpu_rows import GpuRow, held
from gpumagic.gputable.holders import Holder, Split
from gpumagic.telemetry.snapshot import GpuSample

_BAR = 14
_INKS = (("█", "mine"), ("▓", "others"), ("░", "reserved"))
_FREE = "·"


def gpu_columns(shown: Sequence[GpuRow], *, html: bool = False) -> list[Column]:
    """A row for each GPU; a column that says nothing of any of them is left out."""
    gpus = [r.gpu for r in shown]
    temperatures = [_reading(gpu.temperature, "°C") for gpu in gpus]
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
            html=[tag("span", r.name, title=f"{r.gpu.name or ''} {r.gpu.uuid}") for r in shown],
        ),
        Column(
            "memory",
            [text_bar(r.split, r.gpu.memory_total) for r in shown],
            css="gm-tight",
            html=[_memory(r) for r in shown],
        ),
        _readings("", [share(gpu.memory_used, gpu.memory_total) for gpu in gpus]),
        Column(
            "utilization" if html else "util",
            [_reading(gpu.utilization, "%") for gpu in gpus],
            number=not html,
            html=[_utilization(gpu.utilization) for gpu in gpus],
        ),
        _readings("temperature" if html else "temp", temperatures, [_hot(gpu) for gpu in gpus]),
        _readings("power", [_power(gpu) for gpu in gpus]),
    ]
    if all(gpu.virtual for gpu in gpus):
        # A virtual GPU has neither warmth nor current: two columns of N/A say nothing.
        del columns[-2:]
    return [c for c in columns if c.head != "NVML" or any(c.cells)]


def _readings(head: str, cells: Sequence[str], bad: Sequence[bool] = ()) -> Column:
    """Numbers, of which those that are too high stand out, and N/A stands back."""
    marks = bad or [False] * len(cells)
    html = [_words(cell, "gm-bad" * high) for cell, high in zip(cells, marks, strict=True)]
    return Column(head, cells, number=True, html=html)


def _words(text: str, css: str = "") -> str:
    return tag("span", text, "gm-dim" if text == NOT_KNOWN else css)


def _reading(value: float | None, unit: str) -> str:
    return NOT_KNOWN if value is None else f"{value:.0f} {unit}"


def _power(gpu: GpuSample) -> str:
    limit = "" if gpu.power_limit is None else f" / {gpu.power_limit:.0f}"
    return NOT_KNOWN if gpu.power is None else f"{gpu.power:.0f}{limit} W"


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


def _utilization(percent: float | None) -> str:
    words = _reading(percent, "%")
    drawn = "" if percent is None else bar([("gm-busy", percent / 100)], words, short=True)
    return drawn + _words(words)


def _hot(gpu: GpuSample) -> bool:
    known = gpu.temperature is not None and gpu.temperature_limit is not None
    return known and (gpu.temperature or 0.0) >= (gpu.temperature_limit or 0.0)


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
