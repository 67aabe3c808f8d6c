"""Record the holders of each GPU's memory, and show the holders, the largest first.

A holder, such as a variable or an output, keeps memory allocated. Records contain no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from html import escape

from gpumagic.display import table
from gpumagic.display.table import Column, Shown, bar, block, coded, folded, tag
from gpumagic.display.units import NOT_KNOWN, size
from gpumagic.errors import as_typed
from gpumagic.frameworks.framework import Pool

STATE, SAVED = "optimizer state", "saved for backward"
OUTPUT, EXCEPTION, GARBAGE = "output", "exception", "garbage"
UNREACHED, TEMPORARY = "unreached", "temporary"
KEPT = (OUTPUT, EXCEPTION, GARBAGE)
"""Kinds of memory that `%gpufree` releases; no variable holds this memory."""


@dataclass(frozen=True)
class Made:
    """Name the code that allocated memory: its cell or file, and its line.
    If another cell called this code, `ran_in` names the calling cell. If torch recorded the whole
    stack, `ran_in` includes the line of the call: ``"In [5], line 1"``."""

    cell: str
    line: int | None = None
    ran_in: str = ""

    @property
    def place(self) -> str:
        """The cell or file and the line, without `ran_in`."""
        return self.cell if self.line is None else f"{self.cell}, line {self.line}"

    def __str__(self) -> str:
        return f"{self.ran_in} ({self.place})" if self.ran_in else self.place


@dataclass(frozen=True)
class MemoryHolder:
    """Record a holder of memory on one GPU.
    A storage counts only for its first holder. Sizes are those of the allocator's blocks."""

    path: str  # Python expression, or a description: "net", "the exception of In [4]"
    kind: str  # the kind with the most bytes: "parameter", "JAX array", …, or a constant above
    device: str  # "cuda:0"
    nbytes: int
    made: Made | None = None  # where most bytes were allocated; None if not recorded
    aliases: tuple[str, ...] = ()  # other holders of the same storages
    count: int = 1  # number of storages
    kinds: tuple[tuple[str, int], ...] = ()  # bytes of each kind, the largest first


@dataclass(frozen=True)
class DeviceMemory:
    """Record the memory of one GPU, in bytes; None if unknown."""

    device: str  # "cuda:0"
    name: str | None  # the name of the card
    virtual: bool  # whether the GPU is simulated by gpumagic
    total: int | None  # all memory of the card
    free: int | None  # as the driver reports it
    allocated: int | None  # by torch and other frameworks; equals the bytes of all holders
    reserved: int | None  # by the allocators of torch and other frameworks
    fragmented: int | None = None  # free bytes between allocated blocks, part of `reserved`
    other_in_process: int | None = None  # memory of this process that is not in `reserved`
    others: int | None = None  # memory of other processes
    holders: tuple[MemoryHolder, ...] = ()  # the largest first
    others_by_name: tuple[tuple[str, int | None], ...] = ()  # `others` by program, user or "system"
    uuid: str | None = None  # as nvidia-smi prints it, with the prefix "GPU-"
    pools: tuple[Pool, ...] = ()  # the figures of JAX's and CuPy's allocators


@dataclass(frozen=True, repr=False)
class MemoryReport(Shown):
    """Record the holders of each GPU's memory at one moment."""

    devices: tuple[DeviceMemory, ...]  # the GPUs that this process can use, by ordinal
    seconds: float = 0.0  # duration of the search for holders

    @property
    def holders(self) -> tuple[MemoryHolder, ...]:
        """The holders on all GPUs, the largest first."""
        every = [holder for device in self.devices for holder in device.holders]
        return tuple(sorted(every, key=lambda holder: -holder.nbytes))

    @property
    def allocated(self) -> int:
        """Bytes allocated for tensors and arrays, summed over all GPUs."""
        return sum(device.allocated or 0 for device in self.devices)

    def of(self, gpus: Collection[str]) -> MemoryReport:
        """Return a report with only these GPUs (``{"cuda:1"}``); an empty `gpus` means all."""
        here = tuple(each for each in self.devices if each.device in gpus or not gpus)
        return replace(self, devices=here)

    def to_json(self) -> str:
        """Return the report as one line of JSON; an unknown number is null."""
        return json.dumps(asdict(self), ensure_ascii=False)


_ROWS = 12
# The first `_ALWAYS` holders are shown at any size, others only if their share reaches `_LEAST`.
_ALWAYS, _LEAST = 3, 0.005
_ALIASES = 15  # maximum length of the text in "also held by", in characters
_FOLDED = 200  # maximum number of folded rows; limits the size of the notebook's file
_WORTH = 2**20  # %gpufree is suggested if it frees at least this much
_CSS = {UNREACHED: "gm-dim"}  # CSS class of a holder's name, by kind
_COUNTED = ("parameter", "buffer", "gradient", "tensor", "output", "exception")


def text(report: MemoryReport) -> str:
    lines = [] if report.devices else [_nothing()]
    for device in report.devices:
        figures = " · ".join(words for words, _, _ in _figures(device))
        lines += table.wrapped(f"{label(device)}: {figures}")
        lines += table.lines(holder_columns(device, folded_rows(device)), margin="  ")
    return "\n".join([*lines, *hints(report)])


def html(report: MemoryReport) -> str:
    parts = [*map(_device_html, report.devices)] or [tag("div", _nothing(), "gm-note")]
    parts += [f'<div class="gm-note">{coded(hint)}</div>' for hint in hints(report)]
    return block("".join(parts))


def _nothing() -> str:
    return f"No GPU in this process; {as_typed('%gpus --virtual 2')} makes virtual ones."


def hints(report: MemoryReport) -> list[str]:
    """Return the advice to type `%gpufree`; empty if `%gpufree` would free little."""
    back = sum(row.nbytes for row in report.holders if row.kind in KEPT)
    if back < _WORTH:
        return []
    return [f"→ `{as_typed('%gpufree')}` gives back {size(back)}: what outputs and errors hold"]


def label(device: DeviceMemory) -> str:
    return f"{device.device} (virtual)" if device.virtual else device.device


def _figures(device: DeviceMemory) -> list[tuple[str, str, int]]:
    """Return each figure as text, a CSS class, and the number of bytes for the bar."""
    allocated, reserved, rest = device.allocated or 0, device.reserved or 0, device.other_in_process
    of = "" if device.total is None else f" of {size(device.total)}"
    found = [
        (f"{size(device.allocated)}{of} allocated", "gm-mine", allocated),
        (f"reserved {size(device.reserved)}", "gm-cache", reserved - allocated),
    ]
    if device.fragmented != 0:
        found.append((f"fragmented {size(device.fragmented)}", "", 0))
    if rest or (rest is None and reserved):
        found.append((f"driver and other libraries {size(rest)}", "gm-driver", rest or 0))
    found += [(_pool(pool), "", 0) for pool in device.pools]
    others = f"others {size(device.others)}{others_named(device)}"
    return [*found, (others, "gm-others", device.others or 0), (f"free {size(device.free)}", "", 0)]


def others_named(device: DeviceMemory) -> str:
    """Return the owners of other processes' memory: ``" (system 1.2 GiB)"``."""
    named = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in device.others_by_name)
    return f" ({named})" if named else ""


def _pool(pool: Pool) -> str:
    """Return a pool's figures: ``"JAX uses 3.2 GiB, peak 5.0 GiB, at most 60.1 GiB"``."""
    parts = [f"{pool.framework} uses {size(pool.used)}"]
    parts += [f"peak {size(pool.peak)}"] * (pool.peak is not None)
    parts += [f"at most {size(pool.limit)}"] * (pool.limit is not None)
    return ", ".join(parts)


def folded_rows(device: DeviceMemory) -> int:
    """Return the number of holders to show; small holders and holders beyond `_ROWS` are folded."""
    least = _LEAST * (device.allocated or 0)
    shown = sum(row.nbytes >= least or n < _ALWAYS for n, row in enumerate(device.holders[:_ROWS]))
    # Do not fold a single holder, because a row "1 more" would take the same space.
    return shown + 1 if len(device.holders) == shown + 1 else shown


def holder_columns(device: DeviceMemory, shown: int, *, html: bool = False) -> list[Column]:
    """Return columns for the first `shown` holders. As text, a last row sums up other holders."""
    rows, rest = device.holders[:shown], device.holders[shown:]
    rows += () if html else _more(rest, device)
    css = [_CSS.get(row.kind, "gm-code gm-name") for row in rows]
    names = [tag("span", row.path, title=row.path) for row in rows]
    shares = [share(row.nbytes, device.allocated) for row in rows]
    bars = [_share_bar(row, device.allocated) for row in rows]
    titled = [tag("span", _others(row), title=", ".join(row.aliases)) for row in rows]
    columns = [
        Column("holder", [row.path for row in rows], fit="cut", css=css, html=names),
        Column("kind", [*map(kind, rows)], fit="cut"),
        Column("memory", [size(row.nbytes) for row in rows], number=True),
        Column("share", shares, number=not html, html=bars),
        Column("made in", [str(row.made or "") for row in rows], fit="cut"),
        # If the table is too wide, its last column is narrowed first.
        Column("also held by", [*map(_others, rows)], css="gm-code gm-name gm-dim", html=titled),
    ]
    return [column for column in columns if any(column.cells)]


def _more(rest: tuple[MemoryHolder, ...], device: DeviceMemory) -> tuple[MemoryHolder, ...]:
    left = sum(row.nbytes for row in rest)
    return (MemoryHolder(f"{len(rest):,} more", UNREACHED, device.device, left),) * bool(rest)


def _share_bar(row: MemoryHolder, allocated: int | None) -> str:
    words, whole = share(row.nbytes, allocated), allocated or row.nbytes or 1
    return bar([("gm-mine", row.nbytes / whole)], words, short=True) + tag("span", words)


def _others(row: MemoryHolder) -> str:
    """Return the other holders of a row's storages: ``"optimizer +2"``."""
    more = f" +{len(row.aliases) - 1}" if len(row.aliases) > 1 else ""
    return "".join(table.short(name, _ALIASES - len(more)) + more for name in row.aliases[:1])


def kind(row: MemoryHolder) -> str:
    """Return a row's kinds as text: ``"1,200 tensors"``, ``"parameters, gradients"``."""
    if row.kind == UNREACHED:
        return ""
    names = [name for name, _ in row.kinds] or [row.kind]
    several = [f"{name}s" if name in _COUNTED else name for name in names]
    if len(names) > 1:
        return ", ".join(several)
    is_one = row.count == 1 or names[0] in KEPT or names[0] not in _COUNTED
    return names[0] if is_one else f"{row.count:,} {several[0]}"


def share(nbytes: int, allocated: int | None) -> str:
    """Return the share of allocated bytes: ``"38 %"``, ``"< 1 %"``."""
    if not allocated:
        return NOT_KNOWN
    percent = 100 * nbytes / allocated
    return f"{percent:.0f} %" if percent >= 0.5 else "< 1 %"


def _device_html(device: DeviceMemory) -> str:
    figures, total = _figures(device), device.total or 0
    words = " ".join(
        f"<span>{tag('i', '', css) if nbytes > 0 else ''}{escape(said)}</span>"
        for said, css, nbytes in figures
    )
    parts = [(css, nbytes / total) for _, css, nbytes in figures if total and nbytes > 0]
    drawn = bar(parts, ", ".join(said for said, _, _ in figures)) if parts else ""
    legend = f'<span class="gm-legend">{words}</span>'
    found = [f"<div>{tag('b', label(device))} {drawn}{legend}</div>"]
    shown = folded_rows(device)
    if columns := holder_columns(device, shown, html=True):
        found.append(table.html(columns, css="gm-titled"))
    if rest := device.holders[shown:]:
        summary = f"{len(rest):,} more, {size(sum(row.nbytes for row in rest))}"
        below = replace(device, holders=rest[:_FOLDED])
        found.append(folded(summary, table.html(holder_columns(below, _FOLDED, html=True))))
    return f'<div class="gm-section">{"".join(found)}</div>'
