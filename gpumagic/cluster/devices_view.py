"""Show how a cell went on several devices: a line, or the same in HTML with a table behind it."""

from html import escape

from gpumagic.cluster.devices_report import DevicesReport
from gpumagic.display import table
from gpumagic.display.shown import block, coded
from gpumagic.display.units import duration, size, some


def text(report: DevicesReport) -> str:
    """`cuda:0, cuda:1 · 3.2 s (cuda:1 the slowest, 3.1 s) · 17 prompts: 9 + 8 · sent net: …`."""
    return "\n".join([" · ".join(_parts(report)), *(f"  → {note}" for note in report.notes)])


def html(report: DevicesReport) -> str:
    """The line, and behind it the devices one by one."""
    head, *rest = _parts(report)
    line = f'<b class="gm-where">{escape(head)}</b>' + "".join(
        f' <span class="gm-dim">·</span> {coded(part)}' for part in rest
    )
    rows = report.devices
    columns = [
        table.Column("device", [str(each.device) for each in rows]),
        table.Column("parts", [f"{each.parts:,}" for each in rows], number=True),
        table.Column("time", [duration(each.seconds) for each in rows], number=True),
        table.Column("peak", [size(each.peak) for each in rows], number=True),
    ]
    body = f"<details><summary>{line}</summary>{table.html(columns)}</details>"
    body += "".join(f"<div>→ {coded(note)}</div>" for note in report.notes)
    return block(body, "report", css="gpumagic gm-report")


def _parts(report: DevicesReport) -> list[str]:
    rows = report.devices
    virtual = " (virtual, at CPU speed)" if any(each.device.virtual for each in rows) else ""
    ran = [each for each in rows if each.parts]
    slowest = max(ran, key=lambda each: each.seconds)
    took = f"{slowest.device} the slowest, {duration(slowest.seconds)}" if len(ran) > 1 else ""
    idle = f"{some(str(each.device) for each in rows if not each.parts)} had nothing to do"
    said = "; ".join(filter(None, [took, idle if len(ran) < len(rows) else ""]))
    parts = [
        some(str(each.device) for each in rows) + virtual,
        duration(report.seconds) + (f" ({said})" if said else ""),
        report.shared_out,
    ]
    if report.sent_bytes:
        sent = f"{size(report.sent_bytes)} in {duration(report.sent_seconds)}"
        parts.append(f"sent {some(report.sent)}: {sent}")
    parts += report.made
    peaks = [f"{size(each.peak)} on {each.device}" for each in rows if each.peak is not None]
    return [*parts, f"peak {some(peaks)}"] if peaks else parts
