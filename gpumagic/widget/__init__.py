"""Show the live monitor in a notebook: ``gpumagic.monitor()``.

Importing this module does not import ipywidgets or anywidget, which a terminal does not need.
"""

from typing import TYPE_CHECKING

from gpumagic.errors import as_typed
from gpumagic.gputable.gpu_table import GpuTable

if TYPE_CHECKING:
    from gpumagic.widget.live_monitor import MonitorWidget


def monitor(period: float = 1.0) -> "MonitorWidget | None":
    """Show a live view of the GPUs' utilization, the owners of GPU memory, and the cells that ran.

    The monitor updates even while a cell runs. It pauses while it is not visible, and ends with
    ``close()`` or with the kernel. Its last state stays in the notebook as a table.

    Parameters
    ----------
    period : float
        Seconds between two readings, from 0.25 to 60.

    Returns
    -------
    MonitorWidget or None
        A widget for the notebook. None in a plain terminal, where the table of GPUs is printed.

    Raises
    ------
    GpuError
        If `period` is out of bounds.
    """
    from IPython import get_ipython

    # Only a shell in a Jupyter kernel may have a front end that shows widgets.
    if not hasattr(get_ipython(), "kernel"):
        from gpumagic.telemetry.collect import snapshot

        print(GpuTable(snapshot()))
        print(f"\nThe live monitor needs a notebook; here, type {as_typed('%gpus')} to look again.")
        return None
    from gpumagic.widget.live_monitor import MonitorWidget

    return MonitorWidget(period)
