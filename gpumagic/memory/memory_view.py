"""Show a report on memory: for each GPU its figures in a line, and who holds what, most first.

What is small is folded into one row, behind which HTML has the others.
"""

from collections.abc import Sequence

from gpumagic.display import table
from gpumagic.display.shown import bar, block, folded, tag
from gpumagic.display.table import Column
from gpumagic.display.units import NOT_KNOWN, size
from gpumagic.errors import as_typed
from gpumagic.memory.memory_report import DeviceMemory, MemoryHolder, MemoryReport

_ROWS = 12
# So many are shown however small they are, and the others from this share on.
_ALWAYS = 3
_LEAST = 0.005
# More than a reader goes through; a notebook's file keeps them all.
_UNFOLDED = 200
# The bar's parts, as %gpus has them, and what they are called.
_PARTS = (
    ("gm-mine", "allocated"),
    ("gm-cache", "reserved, not allocated"),
    ("gm-driver", "driver and other libraries"),
    ("gm-others", "other processes"),
)
_MANY = {
    "parameter": "parameters",
    "buffer": "buffers",
    "gradient": "gradients",
    "tensor": "tensors",
    "output": "outputs",
}


def text(report: MemoryReport) -> str:
    """A line for each GPU, and below it its holders."""
    lines = [] if report.devices else [_nothing()]
    for device in report.devices:
        lines += table.wrapped(f"{label(device)}: {' · '.join(numbers(device))}")
        lines += table.lines(holder_columns(device, folded_rows(device)), margin="  ")
    return "\n".join(lines)


def html(report: MemoryReport) -> str:
    """The same as tables, with a bar for each GPU."""
    return block("".join(map(_device_html, report.devices)) or tag("div", _nothing(), "gm-note"))


def _nothing() -> str:
    return f"No GPU in this process; {as_typed('%gpus --virtual 2')} makes virtual ones."


def label(device: DeviceMemory) -> str:
    """``"cuda:0 (virtual)"``."""
    return f"{device.device} (virtual)" if device.virtual else device.device


def numbers(device: DeviceMemory) -> list[str]:
    """``["3.2 GiB of 16.0 GiB allocated", "reserved 3.4 GiB", "torn up 102 MiB", …]``."""
    of = "" if device.total is None else f" of {size(device.total)}"
    found = [f"{size(device.allocated)}{of} allocated", f"reserved {size(device.reserved)}"]
    if device.torn is None or device.torn:
        found.append(f"torn up {size(device.torn)}")
    # Where torch has taken nothing, nobody is asked what else there is of this process.
    if device.other_in_process or (device.other_in_process is None and device.reserved):
        found.append(f"driver and other libraries {size(device.other_in_process)}")
    named = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in device.others_by_name)
    found.append(f"others {size(device.others)}" + (f" ({named})" if named else ""))
    return [*found, f"free {size(device.free)}"]


def folded_rows(device: DeviceMemory) -> int:
    """How many of its holders are shown: the others are small, or many."""
    least = _LEAST * (device.allocated or 0)
    shown = sum(row.nbytes >= least or n < _ALWAYS for n, row in enumerate(device.holders[:_ROWS]))
    # One that is left takes the row that would say so.
    return shown + 1 if len(device.holders) == shown + 1 else shown


def holder_columns(device: DeviceMemory, shown: int, *, html: bool = False) -> list[Column]:
    """A row for each of the first holders, and one for all others."""
    rows, rest = device.holders[:shown], device.holders[shown:]
    if not rows:
        return []
    left = sum(row.nbytes for row in rest)
    more = [f"{len(rest):,} more"] if rest else []
    blank = [""] * len(more)
    shares = [share(row.nbytes, device.allocated) for row in rows]
    columns = [
        Column("holder", [row.path for row in rows] + more, fit="cut", css=_looks(rows, more)),
        Column("kind", [kind(row) for row in rows] + blank),
        Column(
            "memory", [size(row.nbytes) for row in rows] + [size(left) for _ in more], number=True
        ),
        Column(
            "share",
            shares + [share(left, device.allocated) for _ in more],
            number=not html,
            html=[
                *(_bar(row.nbytes, device) for row in rows),
                *(_bar(left, device) for _ in more),
            ],
        ),
        Column("made in", [str(row.made or "") for row in rows] + blank),
        Column(
            "also known as",
            [", ".join(row.aliases) for row in rows] + blank,
            fit="cut",
            css="gm-code gm-name gm-dim",
        ),
    ]
    return [column for column in columns if any(column.cells)]


def _looks(rows: Sequence[MemoryHolder], more: Sequence[str]) -> list[str]:
    css = ["gm-dim" if row.kind == "unreached" else "gm-code gm-name" for row in rows]
    return css + ["gm-dim" for _ in more]


def kind(row: MemoryHolder) -> str:
    """``"tensor"``, ``"1,200 tensors"``, ``"parameters, gradients"``."""
    names = [name for name, _ in row.kinds] or [row.kind]
    if len(names) > 1:
        return ", ".join(_MANY.get(name, name) for name in names)
    if row.count == 1 or names[0] not in _MANY:
        return names[0]
    return f"{row.count:,} {_MANY[names[0]]}"


def share(nbytes: int, allocated: int | None) -> str:
    """Of what is allocated: ``"38 %"``, ``"< 1 %"``."""
    if not allocated:
        return NOT_KNOWN
    percent = 100 * nbytes / allocated
    return f"{percent:.0f} %" if percent >= 0.5 else "< 1 %"


def _bar(nbytes: int, device: DeviceMemory) -> str:
    words = share(nbytes, device.allocated)
    drawn = bar([("gm-mine", nbytes / (device.allocated or nbytes or 1))], words, short=True)
    return drawn + tag("span", words)


def _device_html(device: DeviceMemory) -> str:
    words = " · ".join(numbers(device))
    parts = [f"<div>{tag('b', label(device))} {tag('span', words)}</div>"]
    parts.append(_memory_bar(device))
    shown = folded_rows(device)
    if columns := holder_columns(device, shown, html=True):
        parts.append(table.html(columns, css="gm-titled gm-section"))
    if rest := device.holders[shown:]:
        all_shown = holder_columns(device, shown + _UNFOLDED, html=True)
        parts.append(folded(f"all {shown + len(rest):,}", table.html(all_shown, css="gm-titled")))
    return tag_section("".join(parts))


def tag_section(content: str) -> str:
    return f'<div class="gm-section">{content}</div>'


def _memory_bar(device: DeviceMemory) -> str:
    if not device.total or device.allocated is None or device.reserved is None:
        return ""
    counts = (
        device.allocated,
        device.reserved - device.allocated,
        device.other_in_process or 0,
        device.others or 0,
    )
    drawn = [(css, count / device.total) for (css, _), count in zip(_PARTS, counts, strict=True)]
    marks = "".join(
        f'<i class="{css}"></i>{tag("span", f"{name} {size(count)}")}'
        for (css, name), count in zip(_PARTS, counts, strict=True)
        if count
    )
    whole = bar(drawn, ", ".join(numbers(device)))
    return f'<div class="gm-legend">{whole}{marks}</div>'
