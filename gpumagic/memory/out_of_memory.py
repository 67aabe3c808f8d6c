"""Record an out-of-memory error and its explanation, and show the two as text or HTML."""

from dataclasses import dataclass
from html import escape

from gpumagic.display import table
from gpumagic.display.table import Column, Shown, block, coded, tag
from gpumagic.display.units import NOT_KNOWN, size
from gpumagic.memory.memory_report import (
    DeviceMemory,
    folded_rows,
    holder_columns,
    label,
    others_named,
)


@dataclass(frozen=True)
class Lever:
    """Describe a change that would save or free GPU memory."""

    do: str  # the command to type or the change to make, with code in back-ticks
    gives: int | None = None  # bytes that the change frees or saves; None if unknown
    fits: bool | None = None  # whether the cell fits after %gpufree and the change; None if unknown


@dataclass(frozen=True, repr=False)
class OutOfMemory(Shown):
    """Record an out-of-memory error and its explanation."""

    expression: str  # the failed expression as the user wrote it
    line: int
    label: str  # the expression's cell or file
    wanted: int | None  # the bytes of the failed request
    device: DeviceMemory  # the GPU's memory at the error, with the largest holders first
    reason: str  # why there was too little memory, in one sentence
    levers: tuple[Lever, ...]  # cheapest changes that let the cell fit; if none, all that help
    traceback_holds: int  # bytes that only this error's frames hold; %gpufree frees them
    adds: int | None = None  # bytes that each pass of a loop keeps; None if no loop adds memory
    adds_to: str = ""  # the holder that keeps these bytes, such as "losses"; empty if unknown
    stale: tuple[str, ...] = ()  # variables to free with %gpufree, because a rerun assigns them
    clear: str = ""  # code that clears incomplete optimizer state, with which a rerun would fail
    ended_early: bool = False  # whether there was no time to try all changes


_HOLDERS = 5
_LEAST = 0.01  # a traceback is mentioned only if it holds more than this share of the memory
_FITS = {None: "", True: "then the cell fits", False: "not enough alone"}


def text(found: OutOfMemory) -> str:
    lines = [f"{_head(found)}: {table.short(found.expression, table.WIDTH)}"]
    lines += table.wrapped(_figures(found), "  ", "    ")
    lines += table.lines(_holders(found), "  ")
    lines += table.wrapped(f"why: {_plain(found.reason)}", "  ", "       ")
    lines += table.wrapped(_plain(_title(found)), "  ", "    ")
    return "\n".join([*lines, *table.lines(_columns(found.levers), "    ")])


def html(found: OutOfMemory) -> str:
    code = tag("code", table.short(found.expression, table.WIDTH))
    body = f"<div>{escape(_head(found))}: {code}</div>" + tag("div", _figures(found), "gm-dim")
    if columns := _holders(found, html=True):
        body += table.html(columns, css="gm-titled gm-section")
    body += f"<div>{tag('span', 'why:', 'gm-dim')} {coded(found.reason)}</div>"
    body += f'<div class="gm-dim">{coded(_title(found))}</div>'
    body += table.html(_columns(found.levers)) if found.levers else ""
    return block(body, "table", "explanation", css="gpumagic gm-why")


def _head(found: OutOfMemory) -> str:
    where = f"{found.label}, " if found.label else ""
    return f"out of memory · {where}line {found.line}"


def _figures(found: OutOfMemory) -> str:
    device = found.device
    known = device.reserved is not None and device.allocated is not None
    unused = (device.reserved or 0) - (device.allocated or 0)
    parts = [
        f"{label(device)}: {size(found.wanted)} wanted",
        f"{size(device.free)} free of {size(device.total)}",
        f"{size(device.allocated)} allocated",
        f"{size(unused) if known else NOT_KNOWN} reserved but unallocated",
    ]
    others = f"{size(device.others)} held by others{others_named(device)}"
    return " · ".join([*parts, others] if device.others != 0 else parts)


def _holders(found: OutOfMemory, *, html: bool = False) -> list[Column]:
    shown = min(_HOLDERS, folded_rows(found.device))
    columns = holder_columns(found.device, shown, html=html)
    if columns and found.adds and found.adds_to:
        rows = [row.path for row in found.device.holders[:shown]]
        cells = [f"+{size(found.adds)}" if path == found.adds_to else "" for path in rows]
        cells += [""] * (len(columns[0].cells) - len(cells))
        columns[3:] = [Column("last pass", cells, number=True), *columns[3:]]
        columns = [column for column in columns if column.head != "also held by"]  # too wide
    return columns


def _columns(levers: tuple[Lever, ...]) -> list[Column]:
    return [
        Column("", [_plain(r.do) for r in levers], fit="wrap", html=[coded(r.do) for r in levers]),
        Column("", ["" if r.gives is None else size(r.gives) for r in levers], number=True),
        Column("", [_FITS[r.fits] for r in levers]),
    ]


def _plain(text: str) -> str:
    return text.replace("`", "")


def _title(found: OutOfMemory) -> str:
    """Return the line above the levers, or a line that says that no change was found."""
    held = found.traceback_holds > _LEAST * (found.device.allocated or 0)
    holds = f" (the traceback holds {size(found.traceback_holds)})" if held else ""
    free = f"`{' '.join(('%gpufree', *found.stale))}`{holds}"
    # A lever that is `%gpufree` itself needs no `%gpufree` before it.
    alone = not found.stale and any(each.do.startswith("`%gpufree` ") for each in found.levers)
    free *= bool(held or found.stale or found.clear) and not alone
    after = " and ".join(filter(None, [f"`{found.clear}`" * bool(found.clear), free]))
    if not found.levers:
        nothing = "no change was found that lets the cell fit"
        nothing += ", but there was no time to try all" * found.ended_early
        return f"{nothing}; to free what the failed run left, {after}" if after else nothing
    return f"what would help, after {after}:" if after else "what would help:"
