"""Show the tables of ``%gpus`` and ``%gpus --doctor`` as text and HTML."""

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any, NamedTuple

from gpumagic.display import table
from gpumagic.display.table import GLUE, Column, bar, block, short, tag
from gpumagic.display.units import NOT_KNOWN, age, many, share, size
from gpumagic.errors import as_typed
from gpumagic.gputable import OWNERS, Holder, holders, split
from gpumagic.telemetry.doctor import Check
from gpumagic.telemetry.snapshot import GpuSample, Snapshot

_BAR, _SHORTEST_BAR = 14, 6  # lengths of a bar in characters: usual, minimum
_NUMBERED = {"nvidia": "the number in nvidia-smi", "amd": "the number in amd-smi"}
_VENDORS = {"amd": "AMD ", "intel": "Intel ", "apple": "Apple "}


class _Cell(NamedTuple):
    text: str
    html: str
    css: str = ""


# Column "GPU" shows the driver's number of a GPU if torch's number differs.
_HEADS = ("device", "GPU", "name", "memory", "", "util", "temp", "power")


def _gpu_row(
    gpu: GpuSample, parts: dict[str, int] | None, shown: str, length: int
) -> tuple[_Cell, ...]:
    name, total = _name(gpu), gpu.memory_total
    number = "" if gpu.mig or gpu.index in (None, gpu.ordinal) else str(gpu.index)
    usable = tag("span", shown, "gm-dim") if gpu.ordinal is None else tag("b", shown, "gm-code")
    badge = tag("span", "virtual", "gm-badge") if gpu.virtual else ""
    text = f"{name} (virtual)" if badge and "virtual" not in name.lower() else name
    number_of = _NUMBERED.get(gpu.vendor or "", "its number on this machine")
    busy, load = gpu.utilization, _value(_reading(gpu.utilization, "%"))
    drawn = "" if busy is None else bar([("gm-busy", busy / 100)], load.text, short=True)
    watts = "W" if gpu.power_limit is None else f"/ {gpu.power_limit:.0f} W"
    hot = (gpu.temperature or 0.0) >= (gpu.temperature_limit or float("inf"))
    return (
        _Cell(shown, usable + badge),
        _Cell(number, tag("span", number, title=number_of), "gm-dim"),
        _Cell(text, tag("span", name, title=f"{gpu.name or ''} {gpu.uuid}"), "gm-name gm-model"),
        _Cell(text_bar(parts, total, length), _memory_bar(parts, total), "gm-tight"),
        _value(share(gpu.memory_used, total)),
        load._replace(html=drawn + load.html),
        _value(_reading(gpu.temperature, "°C"), "gm-bad" * hot),
        _value(_reading(gpu.power, watts)),
    )


def _value(text: str, css: str = "") -> _Cell:
    return _Cell(text, tag("span", text, "gm-dim" if text == NOT_KNOWN else css))


def _reading(value: float | None, unit: str) -> str:
    return NOT_KNOWN if value is None else f"{value:.0f} {unit}"


def text_bar(parts: dict[str, int] | None, total: int | None, length: int = _BAR) -> str:
    """Return a bar of characters; blank if the memory use is unknown."""
    if parts is None or not total:
        return " " * length
    drawn, seen = "", 0
    for name, (ink, _) in OWNERS.items():
        seen = min(seen + parts[name], total)
        # An owner of more than 1 % of the memory gets at least one character.
        least = 1 if parts[name] > total / 100 else 0
        drawn += ink * max(round(seen / total * length) - len(drawn), least)
    return drawn[:length].ljust(length, "·")


def _memory_bar(parts: dict[str, int] | None, total: int | None) -> str:
    if parts is None or not total:
        return bar([], "unknown")
    words = [f"{OWNERS[name][1]} {size(count)}" for name, count in parts.items() if count]
    words.append(f"free {size(max(total - sum(parts.values()), 0))}")
    return bar([(f"gm-{name}", count / total) for name, count in parts.items()], ", ".join(words))


def device(gpu: GpuSample) -> str:
    """Return torch's name, such as ``"cuda:1"``, or why torch has no name for this GPU."""
    if gpu.ordinal is None:
        return "lost" if gpu.lost else "not visible"
    return gpu.called(gpu.ordinal) + "?" * (not gpu.ordinal_certain) + " lost" * gpu.lost


def _name(gpu: GpuSample) -> str:
    name = (gpu.name or "GPU of unknown model").removeprefix("NVIDIA ")
    # Omit the model from a MIG device's name, because the row above shows the model.
    return name if gpu.mig is None else f"└ MIG {name.rpartition('MIG ')[2]}"


def label(gpu: GpuSample) -> str:
    """Return a GPU's name for use in a sentence."""
    if gpu.ordinal is not None:
        return gpu.called(gpu.ordinal) + (" (virtual)" if gpu.virtual else "")
    if gpu.virtual:
        return "virtual GPU"
    # Each vendor's driver numbers its GPUs from 0, so add the vendor.
    vendor, unnumbered = _VENDORS.get(gpu.vendor or "", ""), gpu.mig or gpu.index is None
    return _name(gpu).removeprefix("└ ") if unnumbered else f"{vendor}GPU {gpu.index}"


def _held(holder: Holder, gpus: Sequence[GpuSample]) -> list[str]:
    """Return a holder's memory: ``["cuda:0 10 GiB", "cuda:1 3 GiB"]`` or ``["21 GPUs 9 TiB"]``."""
    used = [gpu for gpu in gpus if gpu.uuid in holder.memory]
    elsewhere = all(gpu.virtual and gpu.ordinal is None for gpu in used)
    if elsewhere or len(used) > 4:  # show only the sum
        whose = "their" if holder.name.endswith(" processes") else "its"
        which = f"{whose} {many(len(used), 'virtual GPU')}" if elsewhere else f"{len(used)} GPUs"
        return [f"{which} {size(holder.total)}"]
    return [f"{label(gpu)} {size(holder.memory[gpu.uuid])}" for gpu in used]


def _process_columns(holders: Sequence[Holder], now: float) -> list[Column]:
    columns = [
        Column("user", [short(h.user or "", 12) for h in holders]),
        Column("PID", [" ".join(map(str, h.pids)) for h in holders]),
        Column("running", ["" if h.started is None else age(now - h.started) for h in holders]),
    ]
    if any(h.utilization is not None for h in holders):
        busy = [_reading(h.utilization, "%") if h.pids else "" for h in holders]
        columns.append(Column("util", busy, number=True))
    return columns


class GpuTable:
    """Show a snapshot's GPUs and holders of memory; with `processes`, each process has a row."""

    def __init__(self, snapshot: Snapshot, processes: bool = False, width: int = 80) -> None:
        self.snapshot, self.processes, self.width = snapshot, processes, width
        # Leave out the virtual GPUs of other kernels. The table of holders only counts them.
        self.gpus = [gpu for gpu in snapshot.gpus if not gpu.virtual or gpu.ordinal is not None]
        self.splits = [split(gpu, snapshot.processes, self.gpus) for gpu in self.gpus]
        self.holders = holders(snapshot.gpus, snapshot.processes, each=processes)

    def __repr__(self) -> str:
        blocks = []
        if self.gpus:
            caption = table.wrapped(_caption(self.snapshot, self.gpus), "", "", self.width)
            legend = "  ".join(f"{ink} {words}" for _, ink, words in self._legend())
            columns = self._gpu_columns()
            over = sum(column.width + 2 for column in columns) - 2 - self.width
            if over > 0:  # shorten the bars first; `table.lines` then cuts names
                columns = self._gpu_columns(max(_BAR - over, _SHORTEST_BAR))
            rows = table.lines(columns, room=self.width)
            blocks.append([*caption, *rows, short(legend, self.width)])
        if self.holders:
            blocks.append(table.lines(self._holder_columns(), room=self.width))
        remarks = [*self._notes(), *self._problems()]
        blocks.append([x for line in remarks for x in table.wrapped(line, room=self.width)])
        return "\n\n".join("\n".join(filter(None, lines)) for lines in blocks if lines)

    def _gpu_columns(self, length: int = _BAR) -> list[Column]:
        """Return the columns of the GPU table; bars in text have `length` characters."""
        parents = {gpu.mig for gpu in self.gpus}
        rows = [
            _gpu_row(gpu, parts, "MIG mode" if gpu.uuid in parents else device(gpu), length)
            for gpu, parts in zip(self.gpus, self.splits, strict=True)
        ]
        columns = []
        for head, cells in zip(_HEADS, zip(*rows, strict=True), strict=True):
            text, html, css = map(list, zip(*cells, strict=True))
            how, fit = head not in ("device", "name", "memory"), "cut" if head == "name" else ""
            columns.append(Column(head, text, how, fit, least=7, html=html, css=css))
        if all(gpu.virtual for gpu in self.gpus):
            del columns[-2:]  # virtual GPUs have neither temperature nor power
        return [column for column in columns if column.head != "GPU" or any(column.cells)]

    def _repr_html_(self) -> str:
        parts = []
        if self.gpus:
            parts.append(tag("div", _caption(self.snapshot, self.gpus), "gm-caption"))
            parts.append(table.html(self._gpu_columns(), css="gm-titled"))
            legend = self._legend()
            marks = [f'<i class="gm-{c}"></i>{tag("span", words)}' for c, _, words in legend]
            parts.append(f'<div class="gm-legend">{"".join(marks)}</div>')
        if self.holders:
            parts.append(table.html(self._holder_columns(), css="gm-titled gm-section"))
        parts += [tag("div", note, "gm-note") for note in self._notes()]
        parts += [tag("div", line, "gm-problem") for line in self._problems()]
        return block("".join(parts))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return {table.JSON: table.as_json(self.snapshot)}

    def _holder_columns(self) -> list[Column]:
        parts = [_held(holder, self.snapshot.gpus) for holder in self.holders]
        looks = {True: "gm-name gm-this", False: "gm-name"}
        return [
            Column(
                "held by",
                [short(h.name, 34) for h in self.holders],
                fit="cut",
                css=[looks[h.mine] if h.pids else "gm-name gm-dim" for h in self.holders],
                html=[tag("span", h.name, title=h.name) for h in self.holders],
            ),
            *(_process_columns(self.holders, self.snapshot.time) if self.processes else []),
            Column(
                "memory",
                [" · ".join(part.replace(" ", GLUE) for part in each) for each in parts],
                fit="wrap",
                least=max(20, *(len(part) for each in parts for part in each)),
                css="gm-wrap",
                html=[" ".join(tag("span", part) for part in each) for each in parts],
            ),
        ]

    def _legend(self) -> list[tuple[str, str, str]]:
        """Return (name, character, label) of each owner in the bars; empty for a single owner."""
        there = {name for parts in self.splits for name, count in (parts or {}).items() if count}
        return [(name, *OWNERS[name]) for name in OWNERS if name in there and len(there) > 1]

    def _notes(self) -> list[str]:
        found = []
        if self.snapshot.gpus and not self.gpus and not self.snapshot.problems:
            found = [f"No GPU here; {as_typed('%gpus --virtual 2')} makes virtual ones."]
        found += filter(None, map(_throttled, self.gpus))
        if any(gpu.unified and gpu.vendor != "apple" for gpu in self.gpus):
            found.append("A GPU without memory of its own shows the host's memory.")
        for kind in sorted({gpu.kind for gpu in self.gpus if not gpu.ordinal_certain}):
            cure = "; set CUDA_DEVICE_ORDER=PCI_BUS_ID before the kernel starts" * (kind == "cuda")
            found.append(f"{kind}:N? is uncertain: the order of different GPUs is unknown{cure}.")
        return found

    def _problems(self) -> list[str]:
        start = "" if self.gpus else "no GPU: "
        lines = (f"{start}{each.cause}; {each.cure}." for each in self.snapshot.problems)
        return [line[:1].upper() + line[1:] for line in lines]


def _throttled(gpu: GpuSample) -> str:
    """Return why a GPU is throttled. Skip the power cap, which every GPU at full load reaches."""
    slow = [reason for reason in gpu.throttle or () if reason != "power cap"]
    return f"{label(gpu)} is throttled: {', '.join(slow)}." if slow else ""


def _caption(snapshot: Snapshot, gpus: Sequence[GpuSample]) -> str:
    host = snapshot.host
    whole = [gpu for gpu in gpus if gpu.mig is None]
    virtual = sum(gpu.virtual for gpu in whole)
    busy = "" if host.cpu_utilization is None else f" {host.cpu_utilization:.0f} %"
    parts = [
        host.name,
        f"CUDA {snapshot.cuda}" if snapshot.cuda else "",
        f"driver {snapshot.driver}" if snapshot.driver else "",
        *snapshot.software,
        many(real, "GPU") if (real := len(whole) - virtual) else "",
        many(virtual, "virtual GPU") if virtual else "",
        f"{many(host.cpu_count, 'CPU')}{busy}" if host.cpu_count else "",
        f"RAM {share(*host.ram)}" if host.memory_total else "",
    ]
    return " · ".join(filter(None, parts))


class DoctorTable:
    """Show the doctor's checks in the given order, as text and HTML."""

    def __init__(self, checks: Sequence[Check]) -> None:
        self.checks = tuple(checks)

    def __repr__(self) -> str:
        return "\n".join(table.lines(self._columns()))

    def _repr_html_(self) -> str:
        return block(table.html(self._columns()))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        return {table.JSON: {"record": "Checks", "checks": list(map(asdict, self.checks))}}

    def _columns(self) -> list[Column]:
        signs = {True: ("✓", "gm-ok"), False: ("✗", "gm-bad"), None: ("·", "gm-dim")}
        marks = [(*signs[check.ok], check) for check in self.checks]
        names = [
            tag("span", mark, f"gm-mark {css}") + escape(check.name) for mark, css, check in marks
        ]
        return [
            Column("", [f"{mark} {check.name}" for mark, _, check in marks], html=names),
            Column(
                "",
                [check.found for check in self.checks],
                fit="wrap",
                css=[f"gm-wrap{' gm-dim' * (check.ok is None)}" for check in self.checks],
                notes=[f"→ {check.cure}" if check.cure else "" for check in self.checks],
            ),
        ]
