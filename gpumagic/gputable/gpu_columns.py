"""Lay out GPUs and their holders as columns, for text and HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from gpumagic.display.table import GLUE, Column, bar, short, tag
from gpumagic.display.units import NOT_KNOWN, age, share, size
from gpumagic.telemetry.snapshot import GpuSample, ProcessSample

# The driver's rounding and its own memory belong to nobody.
_NOBODYS = 32 * 2**20
UNSEEN = "unaccounted"
# The owners of memory, in the order of bars, named as in js/src/monitor/bars.ts.
OWNERS = {
    "mine": "this notebook",
    "books": "my other notebooks",
    "others": "other processes",
    "left": "left behind",
    "unseen": UNSEEN,
    "driver": "driver",
}


@dataclass(frozen=True)
class Split:
    """One GPU's memory in bytes by owner (`OWNERS`), and free."""

    mine: int = 0
    books: int = 0
    others: int = 0
    left: int = 0
    unseen: int = 0
    driver: int = 0
    free: int = 0


@dataclass(frozen=True)
class Holder:
    """A notebook, a program, or an unseen holder; bytes by GPU (None if unknown)."""

    name: str
    user: str | None
    pids: tuple[int, ...]
    memory: dict[str, int | None]
    mine: bool = False
    kind: str | None = None
    started: float | None = None
    utilization: float | None = None  # percent, of the GPU that it uses most


def split(gpu: GpuSample, processes: Iterable[ProcessSample]) -> Split | None:
    """Return one GPU's memory by owner; None if its use is unknown."""
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    parts = dict.fromkeys(OWNERS, 0)
    for process in processes:
        if process.uuid == gpu.uuid:
            parts[process.owner] += process.memory or 0
    rest = gpu.memory_used
    for name in OWNERS:
        parts[name] = min(parts[name], rest)
        rest -= parts[name]
    parts["unseen" if rest > _NOBODYS else "driver"] = rest
    reserved = gpu.memory_reserved or 0
    parts["driver"] += reserved
    return Split(**parts, free=max(gpu.memory_total - gpu.memory_used - reserved, 0))


def holders(
    gpus: Sequence[GpuSample], processes: Iterable[ProcessSample], *, each: bool
) -> list[Holder]:
    """Return the holders: this kernel first, then by memory, unseen ones last. One row for `each`
    process, or one per notebook, or per program and user without a notebook."""
    shown = {gpu.uuid for gpu in gpus}
    groups: dict[tuple[object, ...], list[ProcessSample]] = {}
    for process in processes:
        if process.uuid in shown:
            who = process.notebook or process.name or process.user or process.pid
            key = (process.pid,) if each else (process.mine, who, process.user)
            groups.setdefault(key, []).append(process)
    found = [_holder(group) for group in groups.values()]
    found.sort(key=lambda one: (not one.mine, -sum(filter(None, one.memory.values())), one.name))
    unseen = _unseen(gpus, found)
    return [*found, Holder(UNSEEN, None, (), unseen)] if unseen else found


def _holder(group: Sequence[ProcessSample]) -> Holder:
    first = group[0]
    memory: dict[str, int | None] = {}
    for process in group:
        before = memory.get(process.uuid)
        known = [count for count in (before, process.memory) if count is not None]
        memory[process.uuid] = sum(known) if known else None
    return Holder(
        name=_holder_name(first),
        user=first.user,
        pids=tuple(sorted({process.pid for process in group})),
        memory=memory,
        mine=first.mine,
        kind=first.kind,
        started=first.started,
        utilization=_busiest(group),
    )


def _busiest(group: Sequence[ProcessSample]) -> float | None:
    busy: dict[str, float] = {}
    for process in group:
        if process.utilization is not None:
            busy[process.uuid] = busy.get(process.uuid, 0.0) + process.utilization
    return min(max(busy.values()), 100.0) if busy else None


def _holder_name(process: ProcessSample) -> str:
    name = PurePath(process.notebook).name if process.notebook else None
    if process.mine:
        return f"{OWNERS['mine']} ({name})" if name else "this process"
    if name is None and process.name:
        return f"you · {process.name}"
    return name or process.user or f"gone (pid {process.pid})"


def _unseen(gpus: Sequence[GpuSample], holders: Sequence[Holder]) -> dict[str, int | None]:
    """Return the memory not held by seen processes; other containers' are not seen."""
    # A parent's memory is that of its MIG devices; count it once.
    cut = {gpu.mig for gpu in gpus}
    unseen: dict[str, int | None] = {}
    for gpu in gpus:
        if gpu.memory_used is None or gpu.unified or gpu.uuid in cut:
            continue
        held = [holder.memory.get(gpu.uuid, 0) for holder in holders]
        rest = gpu.memory_used - sum(count or 0 for count in held)
        if None not in held and rest > _NOBODYS:
            unseen[gpu.uuid] = rest
    return unseen


BARS = (14, 10, 6)
"""The widths of a bar in text: the first with which no name must be cut."""
INKS = {"mine": "█", "books": "▓", "others": "▒", "left": "×", "unseen": "░", "driver": "│"}
FREE = "·"
_VENDORS = {"amd": "AMD ", "intel": "Intel ", "apple": "Apple "}
_NUMBERED = {"nvidia": "the number in nvidia-smi", "amd": "the number in amd-smi"}
# A holder of more GPUs is shown as a sum.
_LISTED = 4


def gpu_columns(
    gpus: Sequence[GpuSample],
    splits: Sequence[Split | None],
    *,
    html: bool = False,
    length: int = BARS[0],
) -> list[Column]:
    """Return a row for each GPU, without empty columns; text has bars of this length."""
    cut = {gpu.mig for gpu in gpus}
    devices = ["MIG mode" if gpu.uuid in cut else device(gpu) for gpu in gpus]
    # NVML's index, if it differs from the device's number.
    differs = [g.index not in (None, g.ordinal) and g.mig is None for g in gpus]
    nvml = [str(gpu.index) if other else "" for gpu, other in zip(gpus, differs, strict=True)]
    names = [_name(gpu) for gpu in gpus]
    temperatures = [_reading(gpu.temperature, "°C") for gpu in gpus]
    titles = [f"{gpu.name or ''} {gpu.uuid}" for gpu in gpus]
    numbered = [_NUMBERED.get(gpu.vendor or "", "its number on this machine") for gpu in gpus]
    utilizations = [_reading(gpu.utilization, "%") for gpu in gpus]
    used = [(part, gpu.memory_total) for gpu, part in zip(gpus, splits, strict=True)]
    columns = [
        Column("device", devices, html=list(map(_device, gpus, devices))),
        Column("GPU", nvml, number=True, css="gm-dim", html=_titled(nvml, numbered)),
        Column(
            "name",
            [_virtual(n) if g.virtual else n for g, n in zip(gpus, names, strict=True)],
            fit="cut",
            least=7,
            css="gm-name gm-model",
            html=_titled(names, titles),
        ),
        Column(
            "memory",
            [text_bar(*each, length) for each in used],
            css="gm-tight",
            html=[_memory(*each) for each in used],
        ),
        _readings("", [share(gpu.memory_used, gpu.memory_total) for gpu in gpus]),
        Column(
            "utilization" if html else "util",
            utilizations,
            number=not html,
            html=[_utilization(gpu.utilization) for gpu in gpus],
        ),
        _readings("temp", temperatures, [_hot(gpu) for gpu in gpus]),
        _readings("power", [_power(gpu) for gpu in gpus]),
    ]
    if all(gpu.virtual for gpu in gpus):
        # A virtual GPU has no temperature and power: leave out two columns of N/A.
        del columns[-2:]
    return [c for c in columns if c.head != "GPU" or any(c.cells)]


def _titled(words: Sequence[str], titles: Sequence[str]) -> list[str]:
    pairs = zip(words, titles, strict=True)
    return [tag("span", text, title=title) for text, title in pairs]


def _readings(head: str, cells: Sequence[str], bad: Sequence[bool] = ()) -> Column:
    """Return readings: too high ones are highlighted, N/A is dimmed."""
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


def text_bar(parts: Split | None, total: int | None, length: int = BARS[0]) -> str:
    """Return a bar of characters; empty if the use is unknown."""
    if parts is None or not total:
        return " " * length
    drawn = ""
    seen = 0
    for name, ink in INKS.items():
        count = getattr(parts, name)
        seen = min(seen + count, total)
        # Each part has at least one character.
        width = max(round(seen / total * length) - len(drawn), 1 if count > total / 100 else 0)
        drawn += ink * width
    return drawn[:length].ljust(length, FREE)


def _virtual(name: str) -> str:
    return name if "virtual" in name.lower() else f"{name} (virtual)"


def _device(gpu: GpuSample, words: str) -> str:
    here = gpu.ordinal is not None
    shown = tag("b", words, "gm-code") if here else tag("span", words, "gm-dim")
    return shown + (tag("span", "virtual", "gm-badge") if gpu.virtual else "")


def _memory(parts: Split | None, total: int | None) -> str:
    if parts is None or not total:
        return bar([], "not known how much is used")
    held = ((words, getattr(parts, name)) for name, words in OWNERS.items())
    words = [f"{name} {size(count)}" for name, count in held if count]
    words.append(f"free {size(parts.free)}")
    drawn = [(f"gm-{name}", getattr(parts, name) / total) for name in OWNERS]
    return bar(drawn, ", ".join(words))


def _utilization(percent: float | None) -> str:
    words = _reading(percent, "%")
    drawn = "" if percent is None else bar([("gm-busy", percent / 100)], words, short=True)
    return drawn + _words(words)


def _hot(gpu: GpuSample) -> bool:
    known = gpu.temperature is not None and gpu.temperature_limit is not None
    return known and (gpu.temperature or 0.0) >= (gpu.temperature_limit or 0.0)


def device(gpu: GpuSample) -> str:
    """Return torch's name: ``"cuda:1"``, ``"xpu:0"``, or why there is none."""
    if gpu.ordinal is None:
        return "lost" if gpu.lost else "not visible"
    sure = "" if gpu.ordinal_certain else "?"
    return gpu.called(gpu.ordinal) + sure + " lost" * gpu.lost


def _name(gpu: GpuSample) -> str:
    name = (gpu.name or "GPU of unknown model").removeprefix("NVIDIA ")
    if gpu.mig is not None:
        # "H100 80GB HBM3 MIG 1g.10gb": its parent's line above has the rest.
        return f"└ MIG {name.rpartition('MIG ')[2]}"
    return name


def _held(holder: Holder, gpus: Sequence[GpuSample]) -> list[str]:
    """Return ``["cuda:0 10.2 GiB", "cuda:1 3.1 GiB"]``, or ``["21 GPUs 854 GiB"]``."""
    its = [gpu for gpu in gpus if gpu.uuid in holder.memory]
    away = all(gpu.virtual and gpu.ordinal is None for gpu in its)
    if away or len(its) > _LISTED:
        known = [count for count in holder.memory.values() if count is not None]
        kind = "virtual GPU" if away else "GPU"
        return [f"{len(its)} {kind}{'s' * (len(its) > 1)} {size(sum(known) if known else None)}"]
    parts: dict[str, int | None] = {}
    for gpu in its:
        count, before = holder.memory[gpu.uuid], parts.get(label(gpu))
        parts[label(gpu)] = count if before is None else before + (count or 0)
    return [f"{name} {size(count)}" for name, count in parts.items()]


def label(gpu: GpuSample) -> str:
    """Return a GPU's name in a sentence."""
    if gpu.ordinal is not None:
        return gpu.called(gpu.ordinal) + (" (virtual)" if gpu.virtual else "")
    if gpu.virtual:
        return "virtual GPU"
    # Each driver numbers its own GPUs.
    whose = _VENDORS.get(gpu.vendor or "", "")
    return f"{whose}GPU {gpu.index}" if gpu.mig is None else _name(gpu).removeprefix("└ ")


def holder_columns(
    holders: Sequence[Holder], gpus: Sequence[GpuSample], now: float, processes: bool, *, html: bool
) -> list[Column]:
    """Return a row for each holder: its memory, and the process's details."""
    parts = [_held(holder, gpus) for holder in holders]
    longest = max((len(part) for each in parts for part in each), default=0)
    pids = [" ".join(map(str, holder.pids)) for holder in holders]
    started = [h.started for h in holders]
    columns = [
        Column(
            "held by",
            [short(h.name, 34) for h in holders],
            fit="cut",
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
            least=max(longest, 20),
            css="gm-wrap",
            html=[" ".join(tag("span", part) for part in each) for each in parts],
        ),
    ]
    if any(h.utilization is not None for h in holders):
        busy = [_reading(h.utilization, "%") if h.pids else "" for h in holders]
        columns.insert(-1, Column("util", busy, number=True))
    if html:
        columns.insert(3, Column("kind", [h.kind or "" for h in holders]))
    return columns if processes else [columns[0], columns[-1]]


def _looks(holder: Holder) -> str:
    if holder.mine:
        return "gm-name gm-this"
    return "gm-name" if holder.pids else "gm-name gm-dim"
