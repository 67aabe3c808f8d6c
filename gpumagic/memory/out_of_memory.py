"""Record an explained out-of-memory error, and show it: figures, holders, causes, help."""

from dataclasses import dataclass
from html import escape

from gpumagic.display import table
from gpumagic.display.table import Column, Shown, block, coded, tag
from gpumagic.display.units import NOT_KNOWN, size
from gpumagic.memory.memory_report import DeviceMemory, folded_rows, holder_columns, label


@dataclass(frozen=True)
class Remedy:
    """Something that would help.

    Attributes
    ----------
    do : str
        What to type or to change; code stands between back-ticks.
    gives : int or None
        The bytes that it gives, or saves; None where nothing has shown how many.
    fits : bool or None
        Whether the cell then runs to its end, as a dry run has shown; None where none did.
    """

    do: str
    gives: int | None = None
    fits: bool | None = None


@dataclass(frozen=True, repr=False)
class OutOfMemory(Shown):
    """An error for want of GPU memory, explained.

    Attributes
    ----------
    expression, line, label : str, int, str
        What failed, as the user wrote it, in which line of which cell or file.
    wanted : int or None
        The bytes that were asked for at once.
    device : DeviceMemory
        The GPU's figures at that moment, and who holds its memory, the largest first.
    cause : str
        ``"twice"``, ``"too large"``, ``"limit"``, ``"pool"``, ``"others"``, ``"torn"``, ``"kept"``,
        ``"graphs"``, ``"optimizer"``, ``"foreach"``, ``"no backward"``, ``"grown"``, ``"copy"``,
        ``"load"``, ``"move"``, ``"handled"``, ``"batch"``, ``"number"``, ``"loop"``, ``"not read"``
        or ``"full"``.
    reason : str
        The cause in one sentence.
    remedies : tuple of Remedy
        What would help, what gives the most first.
    traceback_holds : int
        The bytes that only the frames of this error hold.
    """

    expression: str
    line: int
    label: str
    wanted: int | None
    device: DeviceMemory
    cause: str
    reason: str
    remedies: tuple[Remedy, ...]
    traceback_holds: int


_HOLDERS = 5
# Of what is allocated: less in a traceback is not worth a line.
_LEAST = 0.01


def text(found: OutOfMemory) -> str:
    """The expression, the GPU's figures, its largest holders, the reason and the remedies."""
    lines = [f"{_head(found)}: {table.short(found.expression, table.WIDTH)}"]
    lines += table.wrapped(_figures(found), "  ", "    ")
    lines += table.lines(holder_columns(found.device, _rows(found)), "  ")
    lines += table.wrapped(f"why: {_plain(found.reason)}", "  ", "       ")
    if found.remedies:
        lines += ["  what would help:", *table.lines(_columns(found.remedies), "    ")]
    return "\n".join([*lines, *(f"  {_plain(line)}" for line in _notes(found))])


def html(found: OutOfMemory) -> str:
    """The same as HTML."""
    code = tag("code", table.short(found.expression, table.WIDTH))
    body = f"<div>{escape(_head(found))}: {code}</div>" + tag("div", _figures(found), "gm-dim")
    if columns := holder_columns(found.device, _rows(found), html=True):
        body += table.html(columns, css="gm-titled gm-section")
    body += f"<div>{tag('span', 'why:', 'gm-dim')} {coded(found.reason)}</div>"
    if found.remedies:
        body += tag("div", "what would help:", "gm-dim") + table.html(_columns(found.remedies))
    body += "".join(f"<div>{coded(line)}</div>" for line in _notes(found))
    return block(body, "table", "explanation", css="gpumagic gm-why")


def _head(found: OutOfMemory) -> str:
    where = f"{found.label}, " if found.label else ""
    return f"out of memory · {where}line {found.line}"


def _figures(found: OutOfMemory) -> str:
    device = found.device
    parts = [
        f"{label(device)}: {size(found.wanted)} wanted",
        f"{size(device.free)} free of {size(device.total)}",
        f"{size(device.allocated)} allocated",
        f"{_unused(found)} reserved and unused",
    ]
    if device.torn:
        parts.append(f"{size(device.torn)} of it torn up")
    named = ", ".join(f"{name} {size(count)}" for name, count in device.others_by_name)
    others = f"{size(device.others)} held by others" + (f" ({named})" if named else "")
    return " · ".join([*parts, others] if device.others != 0 else parts)


def _unused(found: OutOfMemory) -> str:
    reserved, allocated = found.device.reserved, found.device.allocated
    return NOT_KNOWN if reserved is None or allocated is None else size(reserved - allocated)


def _rows(found: OutOfMemory) -> int:
    return min(_HOLDERS, folded_rows(found.device))


def _columns(remedies: tuple[Remedy, ...]) -> list[Column]:
    return [
        Column(
            "", [_plain(r.do) for r in remedies], fit="wrap", html=[coded(r.do) for r in remedies]
        ),
        Column("", ["" if r.gives is None else size(r.gives) for r in remedies], number=True),
        Column("", [_FITS[r.fits] for r in remedies]),
    ]


def _plain(text: str) -> str:
    return text.replace("`", "")


_FITS = {None: "", True: "then the cell fits", False: "not enough alone"}


def _notes(found: OutOfMemory) -> list[str]:
    if found.traceback_holds <= _LEAST * (found.device.allocated or 0):
        return []
    return [f"its traceback holds {size(found.traceback_holds)}: `%gpufree` gives them back"]
