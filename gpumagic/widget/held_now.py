"""Tell a monitor what of this notebook holds each GPU's memory, as `%gpumem` does.

It is asked only while somebody has that table open, between two cells: JupyterLab's panel evaluates
`panel()` in the kernel, and the widget's view sends a message. Imports no torch of its own.
"""

import sys
from dataclasses import dataclass
from typing import Any

from IPython import get_ipython


@dataclass(frozen=True, repr=False)
class PanelAnswer:
    """JSON for the panel, which IPython hands over as it is."""

    held: dict[str, Any]

    def _repr_json_(self) -> dict[str, Any]:
        return self.held


def panel() -> PanelAnswer:
    """For JupyterLab's panel."""
    return PanelAnswer(held_now())


def held_now() -> dict[str, Any]:
    """The rows of `%gpumem` by the UUID of the GPU, as JSON; none where torch was not imported."""
    shell = get_ipython()
    # Between two cells it is the number of the next one.
    told: dict[str, Any] = {"cell": shell.execution_count - 1, "seconds": 0.0, "gpus": {}}
    if "torch" not in sys.modules:
        return told
    from gpumagic.memory import memory_view
    from gpumagic.memory.ask import memory

    report = memory()
    told["seconds"] = report.seconds
    for device in report.devices:
        shown = memory_view.folded_rows(device)
        rows = [
            {
                "name": row.path,
                "kind": memory_view.kind(row),
                "nbytes": row.nbytes,
                "made": str(row.made or ""),
                "aliases": list(row.aliases[:8]),
            }
            for row in device.holders[:shown]
        ]
        rest = device.holders[shown:]
        told["gpus"][device.uuid or device.device] = {
            "allocated": device.allocated,
            "rows": rows,
            "more": len(rest),
            "left": sum(row.nbytes for row in rest),
        }
    return told
