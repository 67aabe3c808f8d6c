"""Answer an assistant's questions about this kernel: its memory, last report and last error.

Nothing is executed or changed. Names of other users' processes and notebooks are left out.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gpumagic.display.table import as_json
from gpumagic.display.units import size, some

RUNNING = "a cell is running: gpu_memory lists variables between cells, gpu_status has totals"
_NAMED = 3


def last_report() -> dict[str, Any]:
    """Return the report of the last `%%ongpu` cell."""
    reports = sys.modules.get("gpumagic.cell.report")
    report = reports.last_report() if reports else None
    return _told(report, "no %%ongpu cell has run in this notebook")


def last_error(found: Any) -> dict[str, Any]:
    """Return the last error that gpumagic explained: a record, or a line about dead CUDA."""
    if isinstance(found, str):
        return {"record": "CudaError", "text": found}
    if (device := getattr(found, "device", None)) is not None:
        named = some(name for name, _ in device.others_by_name)
        reason = found.reason.replace(f": {named}", "") if named else found.reason
        found = replace(found, device=replace(device, others_by_name=()), reason=reason)
    return _told(found, "gpumagic has explained no error in this notebook")


def held() -> dict[str, Any]:
    """Return the holders of this kernel's GPU memory, the largest first."""
    from gpumagic.frameworks.known import started

    if "torch" not in sys.modules and not started():
        return _told(None, "neither torch nor JAX is in use: this notebook has nothing on a GPU")
    from gpumagic.memory.holders_by_name import memory

    report = memory()
    lines = []
    for device in report.devices:
        rows = [f"{row.path} {size(row.nbytes)}" for row in device.holders[:_NAMED]]
        more = f": {', '.join(rows)}" if rows else ""
        allocated = f"{size(device.allocated)} of {size(device.total)} allocated"
        lines.append(f"{device.device} {allocated}{more}")
    return as_json(report) | {"text": "; ".join(lines) or "no GPU in this notebook"}


def between_cells(shell: Any, answer: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return an answer that needs the main thread, unless a cell runs there."""
    running = getattr(shell.displayhook, "exec_result", None) is not None
    return _told(None, RUNNING) if running else answer()


def _told(record: Any, without: str) -> dict[str, Any]:
    """Return a record with the first line of its text and its fixes, or what there is instead."""
    if record is None:
        return {"record": None, "text": without}
    first, *more = map(str.strip, str(record).splitlines())
    fixes = [line for line in more if line.startswith(("fix:", "→"))]
    return as_json(record) | {"text": " · ".join([first, *fixes])}
