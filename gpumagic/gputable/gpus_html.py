"""The table of GPUs in HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from gpumagic.display.style import bar, block, tag
from gpumagic.display.units import NOT_KNOWN, age, size
from gpumagic.gputable.gpu_rows import Row, caption, cause, held, notes, sentence
from gpumagic.gputable.holders import Holder
from gpumagic.telemetry.snapshot import Snapshot

_LEGEND = (
    ("mine", "this kernel"),
    ("others", "others"),
    ("reserved", "the driver"),
)


def html(
    snapshot: Snapshot, shown: Sequence[Row], holders: Sequence[Holder], processes: bool
) -> str:
    """The whole output of ``%gpus``."""
    parts = []
    if shown:
        parts += [tag("div", caption(snapshot, shown), "gm-caption"), _gpus(shown), _legend(shown)]
    if holders:
        parts.append(_holders(snapshot, shown, holders, processes))
    parts += [tag("div", note, "gm-note") for note in notes(shown)]
    parts += [
        f'<div class="gm-problem">{escape(cause(problem, no_gpu=not shown))}'
        f"{'<br>' if shown else ' '}{_typed(sentence(problem.cure))}</div>"
        for problem in snapshot.problems
    ]
    return block("".join(parts))


def _gpus(shown: Sequence[Row]) -> str:
    # A virtual GPU has neither warmth nor current: two columns of N/A say nothing.
    physical = any(not row.gpu.virtual for row in shown)
    numbered = any(row.nvml for row in shown)
    heads = ["Device", *(["NVML"] if numbered else []), "Name", "Memory", "Utilisation"]
    heads += ["Temperature", "Power"] if physical else []
    body = "".join(_gpu(row, numbered, physical) for row in shown)
    # The memory has its bar and its words.
    head = _head(heads).replace("<th>Memory", '<th colspan="2">Memory')
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _head(names: Sequence[str], numbers: Sequence[str] = ("Temperature", "Power", "NVML")) -> str:
    cells = (tag("th", name, "gm-number" if name in numbers else "") for name in names)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _gpu(row: Row, numbered: bool, physical: bool) -> str:
    gpu = row.gpu
    here = gpu.ordinal is not None
    device = tag("b", row.place, "gm-place") if here else tag("span", row.place, "gm-dim")
    if gpu.virtual:
        device += tag("span", "virtual", "gm-badge")
    cells = [f"<td>{device}</td>"]
    if numbered:
        cells.append(tag("td", row.nvml, "gm-number gm-dim", "the number in nvidia-smi"))
    cells += [
        tag("td", row.name, "gm-name", f"{gpu.name or ''} {gpu.uuid}".strip()),
        _memory(row),
        _number(row.memory, ""),
        _utilization(row),
    ]
    if physical:
        cells += [_temperature(row), _number(row.power, "")]
    return f"<tr>{''.join(cells)}</tr>"


def _memory(row: Row) -> str:
    parts, total = row.split, row.gpu.memory_total
    if parts.known and total:
        words = ", ".join(
            f"{name} {size(count)}"
            for name, count in (
                ("this kernel", parts.mine),
                ("others", parts.others),
                ("reserved", parts.reserved),
                ("free", parts.free),
            )
        )
        drawn = bar(
            [
                ("gm-mine", parts.mine / total),
                ("gm-others", parts.others / total),
                ("gm-reserved", parts.reserved / total),
            ],
            words,
        )
    else:
        drawn = bar([], "not known how much is used")
    return f'<td class="gm-tight">{drawn}</td>'


def _utilization(row: Row) -> str:
    if row.gpu.utilization is None:
        return f"<td>{_words(NOT_KNOWN)}</td>"
    drawn = bar([("gm-busy", row.gpu.utilization / 100)], row.utilization, short=True)
    return f"<td>{drawn}{_words(row.utilization)}</td>"


def _temperature(row: Row) -> str:
    gpu = row.gpu
    hot = (
        gpu.temperature is not None
        and gpu.temperature_limit is not None
        and gpu.temperature >= gpu.temperature_limit
    )
    return _number(row.temperature, "gm-bad" if hot else "")


def _number(text: str, css: str) -> str:
    return f'<td class="gm-number">{_words(text, css)}</td>'


def _words(text: str, css: str = "") -> str:
    """N/A stands back, so that what is known stands out."""
    return tag("span", text, "gm-dim" if text == NOT_KNOWN else css)


def _holders(
    snapshot: Snapshot, shown: Sequence[Row], holders: Sequence[Holder], processes: bool
) -> str:
    heads = ["Held by", "User", "Memory"]
    if processes:
        heads[2:2] = ["PID", "Kind", "Running"]
    gpus = [row.gpu for row in shown]
    body = []
    for holder in holders:
        cells = [
            tag("td", holder.name, _looks(holder), holder.name),
            tag("td", holder.user or ""),
        ]
        if processes:
            running = "" if holder.started is None else age(snapshot.time - holder.started)
            pids = " ".join(map(str, holder.pids))
            cells += [tag("td", text) for text in (pids, holder.kind or "", running)]
        memory = " ".join(tag("span", part) for part in held(holder, gpus))
        body.append(f'<tr>{"".join(cells)}<td class="gm-wrap">{memory}</td></tr>')
    return f'<table class="gm-section">{_head(heads)}<tbody>{"".join(body)}</tbody></table>'


def _looks(holder: Holder) -> str:
    if holder.mine:
        return "gm-name gm-this"
    return "gm-name" if holder.pids else "gm-name gm-dim"


def _legend(shown: Sequence[Row]) -> str:
    """Of the colours that occur."""
    marks = (
        f'<i class="gm-{part}"></i><span>{name}</span>'
        for part, name in _LEGEND
        if any(getattr(row.split, part) for row in shown)
    )
    return f'<div class="gm-legend">{"".join(marks)}</div>'


def _typed(text: str) -> str:
    """Escaped, with what one can type as code."""
    return re.sub(
        r"%gpus(?: --\w+)*(?: \d+)?|pip (?:un)?install [\w -]+|CUDA_[A-Z_]+|--gpus all",
        lambda match: tag("code", match[0]),
        escape(text),
    )
