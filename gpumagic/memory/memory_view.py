"""Show a report on memory: for each GPU its numbers, and a table of who holds what."""

from gpumagic.display import table
from gpumagic.display.shown import block, tag
from gpumagic.display.table import Column
from gpumagic.display.units import size
from gpumagic.memory.memory_report import DeviceMemory, MemoryReport


def text(report: MemoryReport) -> str:
    """A line for each GPU, and below it its holders."""
    if not report.devices:
        return "no GPU here"
    lines = []
    for device in report.devices:
        lines += [_numbers(device), *table.lines(_columns(device), margin="  ")]
    return "\n".join(lines)


def html(report: MemoryReport) -> str:
    """The same as tables."""
    parts = [
        tag("div", _numbers(device)) + table.html(_columns(device)) for device in report.devices
    ]
    return block("".join(parts) or tag("div", "no GPU here"))


def _numbers(device: DeviceMemory) -> str:
    numbers = f"{size(device.allocated)} allocated · {size(device.reserved)} reserved"
    return f"{device.device} · {numbers} · {size(device.free)} free of {size(device.total)}"


def _columns(device: DeviceMemory) -> list[Column]:
    rows = device.holders
    return [
        Column("holder", [row.path for row in rows], fit="cut"),
        Column("kind", [row.kind for row in rows]),
        Column("memory", [size(row.nbytes) for row in rows], number=True),
        Column("made in", [str(row.made or "") for row in rows]),
        Column("also", [", ".join(row.aliases) for row in rows], fit="cut"),
    ]
