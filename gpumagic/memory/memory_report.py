"""Record who holds the memory of each GPU, and show it, largest first.

Plain data, no tensor and no frame. Small holders are folded into one row, which HTML can open.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from gpumagic.display import table
from gpumagic.display.table import Column, Shown, bar, block, coded, folded, tag
from gpumagic.display.units import NOT_KNOWN, size, some
from gpumagic.errors import as_typed, library_needed
from gpumagic.frameworks.framework import Pool

if TYPE_CHECKING:
    from pandas import DataFrame


STATE, SAVED = "optimizer state", "saved for backward"
OUTPUT, EXCEPTION, GARBAGE = "output", "exception", "garbage"
UNREACHED, TEMPORARY = "unreached", "temporary"
KEPT = (OUTPUT, EXCEPTION, GARBAGE)
"""Kinds of memory that no variable holds, and that `%gpufree` releases."""


_ARRAY = " array"


def kind_of_array(library: str) -> str:
    """Return the kind of an array of another library than torch: ``"JAX array"``."""
    return library + _ARRAY


def is_of_other_library(kind: str) -> bool:
    """Whether a kind is another library's arrays, which torch has not allocated."""
    return kind.endswith(_ARRAY)


@dataclass(frozen=True)
class Made:
    """Name the code that made something: a cell or a file, its line, and the cell that ran it.

    Of a function or class that another cell defines, `ran_in` is the cell that called it, with the
    line if torch recorded the whole stack: ``"In [5], line 1"``.
    """

    cell: str
    line: int | None = None
    ran_in: str = ""

    @property
    def place(self) -> str:
        """The cell or file and its line, without the cell that ran it."""
        return self.cell if self.line is None else f"{self.cell}, line {self.line}"

    def __str__(self) -> str:
        return f"{self.ran_in} ({self.place})" if self.ran_in else self.place


@dataclass(frozen=True)
class MemoryHolder:
    """Record a holder of memory on one GPU: a variable, an output, an exception's frame, …

    Attributes
    ----------
    path : str
        What to type to reach it, or where it is: ``"net"``, ``"Out[5]"``,
        ``"the exception of In [4]: train, batch"``.
    kind : str
        What most of its bytes are: ``"parameter"``, ``"buffer"``, ``"gradient"``,
        ``"optimizer state"``, ``"saved for backward"``, ``"tensor"``, ``"output"``,
        ``"exception"``, ``"garbage"``, ``"unreached"``; of other libraries ``"JAX array"`` and the
        like; after an error for want of memory also ``"temporary"``: what the failing line had
        computed by then.
    device : str
        ``"cuda:0"``.
    nbytes : int
        Of all storages that are reached through it and through none before it, as the allocator
        counts them: each once, in blocks of 512 bytes.
    made : Made or None
        Where most of it was made; None where that is not recorded.
    aliases : tuple of str
        Other paths to the same storages.
    count : int
        How many storages.
    kinds : tuple of (str, int)
        Its bytes by kind, the most first.
    """

    path: str
    kind: str
    device: str
    nbytes: int
    made: Made | None = None
    aliases: tuple[str, ...] = ()
    count: int = 1
    kinds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """Record the memory of one GPU, in bytes; None if unknown.

    Attributes
    ----------
    device, name : str
        ``"cuda:0"`` and the name of the card.
    virtual : bool
        A virtual GPU of this process.
    total, free : int or None
        What the card has, and what its driver could still give.
    allocated : int or None
        What tensors hold, by ``torch.cuda.memory_allocated``, and arrays of other libraries; the
        holders add up to it.
    reserved : int or None
        What the allocators of torch and of other libraries have taken from the driver.
    torn : int or None
        The fragmented part of it: free, but in pieces between allocated blocks.
    other_in_process : int or None
        What else this process holds: CUDA's context and other libraries.
    others : int or None
        What other processes hold.
    others_by_name : tuple of (str, int or None)
        The same by owner: a notebook, a program of yours, another user, or ``"system"``.
    uuid : str or None
        With its prefix, as nvidia-smi has it.
    pools : tuple of Pool
        The figures of JAX's and CuPy's allocators.
    holders : tuple of MemoryHolder
        The largest first.
    """

    device: str
    name: str | None
    virtual: bool
    total: int | None
    free: int | None
    allocated: int | None
    reserved: int | None
    torn: int | None = None
    other_in_process: int | None = None
    others: int | None = None
    holders: tuple[MemoryHolder, ...] = ()
    others_by_name: tuple[tuple[str, int | None], ...] = ()
    uuid: str | None = None
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, repr=False)
class MemoryReport(Shown):
    """Record who holds the memory of each GPU at one moment.

    Attributes
    ----------
    devices : tuple of DeviceMemory
        The GPUs that this process can use, by ordinal.
    seconds : float
        How long it took to find out.
    """

    devices: tuple[DeviceMemory, ...]
    seconds: float = 0.0

    @property
    def holders(self) -> tuple[MemoryHolder, ...]:
        """The holders on all GPUs, the largest first."""
        every = [holder for device in self.devices for holder in device.holders]
        return tuple(sorted(every, key=lambda holder: -holder.nbytes))

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold, on all GPUs together."""
        return sum(device.allocated or 0 for device in self.devices)

    def to_json(self) -> str:
        """Return everything as one line of JSON; null is an unknown number."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def to_pandas(self) -> DataFrame:
        """Return a row for each holder, the largest first: device, bytes, and where it was made.

        Raises
        ------
        GpuError
            pandas is not installed.
        """
        with library_needed("pandas", "to_pandas()", "pandas"):
            import pandas
        rows = [
            {
                "device": holder.device,
                "path": holder.path,
                "kind": holder.kind,
                "bytes": holder.nbytes,
                "storages": holder.count,
                "made_in": holder.made and holder.made.cell,
                "line": holder.made and holder.made.line,
                "aliases": ", ".join(holder.aliases),
            }
            for holder in self.holders
        ]
        return pandas.DataFrame(rows)


_ROWS = 12
# So many are shown however small they are, and the others from this share on.
_ALWAYS = 3
_ALIASES = 15  # characters
_LEAST = 0.005
# More than a reader goes through; a notebook's file keeps them all.
_UNFOLDED = 200
# %gpufree is worth a line if it frees at least this much.
_WORTH = 2**20
_COUNTED = ("parameter", "buffer", "gradient", "tensor", "output", "exception")
MANY = {each: f"{each}s" for each in _COUNTED}


def text(report: MemoryReport) -> str:
    """A line for each GPU, and below it its holders."""
    lines = [] if report.devices else [_nothing()]
    for device in report.devices:
        lines += table.wrapped(f"{label(device)}: {' · '.join(numbers(device))}")
        lines += table.lines(holder_columns(device, folded_rows(device)), margin="  ")
    return "\n".join([*lines, *_hints(report)])


def html(report: MemoryReport) -> str:
    """The same as tables, with a bar for each GPU."""
    parts = [*map(_device_html, report.devices)] or [tag("div", _nothing(), "gm-note")]
    parts += [f'<div class="gm-note">{coded(hint)}</div>' for hint in _hints(report)]
    return block("".join(parts))


def _nothing() -> str:
    return f"No GPU in this process; {as_typed('%gpus --virtual 2')} makes virtual ones."


def _hints(report: MemoryReport) -> list[str]:
    """Return the commands that free the most at once."""
    back = sum(row.nbytes for row in report.holders if row.kind in KEPT)
    words = f"→ `{as_typed('%gpufree')}` gives back {size(back)}: what outputs and errors hold"
    return [words] if back >= _WORTH else []


def label(device: DeviceMemory) -> str:
    """``"cuda:0 (virtual)"``."""
    return f"{device.device} (virtual)" if device.virtual else device.device


def numbers(device: DeviceMemory) -> list[str]:
    """``["3.2 GiB of 16.0 GiB allocated", "reserved 3.4 GiB", "fragmented 102 MiB", …]``."""
    of = "" if device.total is None else f" of {size(device.total)}"
    found = [f"{size(device.allocated)}{of} allocated", f"reserved {size(device.reserved)}"]
    if device.torn is None or device.torn:
        found.append(f"fragmented {size(device.torn)}")
    # Where torch has taken nothing, nobody is asked what else there is of this process.
    if device.other_in_process or (device.other_in_process is None and device.reserved):
        found.append(f"driver and other libraries {size(device.other_in_process)}")
    found += [_pool(pool) for pool in device.pools]
    named = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in device.others_by_name)
    found.append(f"others {size(device.others)}" + (f" ({named})" if named else ""))
    return [*found, f"free {size(device.free)}"]


def _pool(pool: Pool) -> str:
    """``"JAX uses 3.2 GiB, peak 5.0 GiB, at most 60.1 GiB"``."""
    parts = [f"{pool.framework} uses {size(pool.used)}"]
    parts += [f"peak {size(pool.peak)}"] * (pool.peak is not None)
    parts += [f"at most {size(pool.limit)}"] * (pool.limit is not None)
    return ", ".join(parts)


def folded_rows(device: DeviceMemory) -> int:
    """Return how many of its holders are shown: the others are small, or too many."""
    least = _LEAST * (device.allocated or 0)
    shown = sum(row.nbytes >= least or n < _ALWAYS for n, row in enumerate(device.holders[:_ROWS]))
    # One that is left takes the row that would say so.
    return shown + 1 if len(device.holders) == shown + 1 else shown


def holder_columns(device: DeviceMemory, shown: int, *, html: bool = False) -> list[Column]:
    """Return a row for each of the first holders, and in text one row for all others."""
    rows, rest = device.holders[:shown], device.holders[shown:]
    left = sum(row.nbytes for row in rest)
    more = [(f"{len(rest):,} more", left)] if rest and not html else []
    memory = [row.nbytes for row in rows] + [nbytes for _, nbytes in more]
    blank = [""] * len(more)
    columns = [
        Column(
            "holder",
            [row.path for row in rows] + [words for words, _ in more],
            fit="cut",
            css=["gm-dim" if row.kind == UNREACHED else "gm-code gm-name" for row in rows],
            html=[tag("span", row.path, title=row.path) for row in rows],
        ),
        Column("kind", [kind(row) for row in rows] + blank, fit="cut"),
        Column("memory", [size(nbytes) for nbytes in memory], number=True),
        Column(
            "share",
            [share(nbytes, device.allocated) for nbytes in memory],
            number=not html,
            html=[_bar(nbytes, device) for nbytes in memory],
        ),
        Column("made in", [str(row.made or "") for row in rows] + blank, fit="cut"),
        Column(
            "also held by",
            # The last column gives way first, so that all stand side by side.
            [_others(row) for row in rows] + blank,
            css="gm-code gm-name gm-dim",
            html=[tag("span", some(row.aliases), title=", ".join(row.aliases)) for row in rows],
        ),
    ]
    return [column for column in columns if any(column.cells)]


def _others(row: MemoryHolder) -> str:
    """``"optimizer +2"``."""
    more = f" +{len(row.aliases) - 1}" if len(row.aliases) > 1 else ""
    return "".join(table.short(name, _ALIASES - len(more)) + more for name in row.aliases[:1])


def kind(row: MemoryHolder) -> str:
    """``"tensor"``, ``"1,200 tensors"``, ``"parameters, gradients"``, ``"exception"``."""
    if row.kind == UNREACHED:
        return ""
    names = [name for name, _ in row.kinds] or [row.kind]
    if len(names) > 1:
        return ", ".join(MANY.get(name, name) for name in names)
    if row.count == 1 or names[0] in KEPT or names[0] not in MANY:
        return names[0]
    return f"{row.count:,} {MANY[names[0]]}"


def share(nbytes: int, allocated: int | None) -> str:
    """Return the share of allocated bytes: ``"38 %"``, ``"< 1 %"``."""
    if not allocated:
        return NOT_KNOWN
    percent = 100 * nbytes / allocated
    return f"{percent:.0f} %" if percent >= 0.5 else "< 1 %"


def _bar(nbytes: int, device: DeviceMemory) -> str:
    words = share(nbytes, device.allocated)
    drawn = bar([("gm-mine", nbytes / (device.allocated or nbytes or 1))], words, short=True)
    return drawn + tag("span", words)


def _device_html(device: DeviceMemory) -> str:
    parts = [f"<div>{tag('b', label(device))} {_memory_bar(device)}{_figures(device)}</div>"]
    shown = folded_rows(device)
    if columns := holder_columns(device, shown, html=True):
        parts.append(table.html(columns, css="gm-titled"))
    if rest := device.holders[shown:]:
        summary = f"{len(rest):,} more, {size(sum(row.nbytes for row in rest))}"
        below = replace(device, holders=rest[:_UNFOLDED])
        parts.append(folded(summary, table.html(holder_columns(below, _UNFOLDED, html=True))))
    return f'<div class="gm-section">{"".join(parts)}</div>'


def _parts(device: DeviceMemory) -> dict[str, int]:
    """Return the bytes of each segment of a bar, by CSS class."""
    return {
        "gm-mine": device.allocated or 0,
        "gm-cache": (device.reserved or 0) - (device.allocated or 0),
        "gm-driver": device.other_in_process or 0,
        "gm-others": device.others or 0,
    }


def _memory_bar(device: DeviceMemory) -> str:
    parts = _parts(device)
    if not device.total or not any(parts.values()):
        return ""
    drawn = [(css, count / device.total) for css, count in parts.items()]
    return bar(drawn, ", ".join(numbers(device)))


def _figures(device: DeviceMemory) -> str:
    """Return the figures, each with its color in the bar."""
    words = numbers(device)
    looks = {"reserved": "gm-cache", "driver": "gm-driver", "others": "gm-others"}
    parts = _parts(device)
    marked = []
    for n, figure in enumerate(words):
        css = "gm-mine" if n == 0 else looks.get(figure.partition(" ")[0], "")
        mark = f'<i class="{css}"></i>' if parts.get(css) else ""
        marked.append(f"<span>{mark}{escape(figure)}</span>")
    return f'<span class="gm-legend">{" ".join(marked)}</span>'
