"""GPUs in notebooks: what is there, run this cell on that one, what moved, how long, how much.

``%load_ext gpumagic`` turns the magics on; the names below are the same as a library. Nothing here
imports torch or IPython: a name imports what it needs when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpumagic import virtual
    from gpumagic.cell.report import Report
    from gpumagic.cell.run import last_report
    from gpumagic.device import Device
    from gpumagic.dryrun import DryRun, dry_run
    from gpumagic.errors import CrossDeviceWarning, GpuError
    from gpumagic.ledger.watch import watch
    from gpumagic.mismatch import explain
    from gpumagic.moving.move import move
    from gpumagic.placement.on import on
    from gpumagic.placement.torch_devices import cpu, devices, gpu, num_gpus, try_all_gpus, try_gpu
    from gpumagic.telemetry import take as snapshot
    from gpumagic.timing.compare import compare, last_comparison
    from gpumagic.timing.comparison import Comparison
    from gpumagic.widget import monitor

# Where each name is, and what it is called there if otherwise.
_HOMES = {
    "Comparison": "gpumagic.timing",
    "CrossDeviceWarning": "gpumagic.errors",
    "Device": "gpumagic.device",
    "DryRun": "gpumagic.dryrun",
    "GpuError": "gpumagic.errors",
    "Report": "gpumagic.cell.report",
    "compare": "gpumagic.timing",
    "cpu": "gpumagic.placement.torch_devices",
    "devices": "gpumagic.placement.torch_devices",
    "dry_run": "gpumagic.dryrun",
    "explain": "gpumagic.mismatch",
    "gpu": "gpumagic.placement.torch_devices",
    "last_comparison": "gpumagic.timing",
    "last_report": "gpumagic.cell.run",
    "monitor": "gpumagic.widget",
    "move": "gpumagic.moving.move",
    "num_gpus": "gpumagic.placement.torch_devices",
    "on": "gpumagic.placement.on",
    "snapshot": "gpumagic.telemetry:take",
    "try_all_gpus": "gpumagic.placement.torch_devices",
    "try_gpu": "gpumagic.placement.torch_devices",
    "watch": "gpumagic.ledger.watch",
}

__all__ = [
    "Comparison",
    "CrossDeviceWarning",
    "Device",
    "DryRun",
    "GpuError",
    "Report",
    "compare",
    "cpu",
    "devices",
    "dry_run",
    "explain",
    "gpu",
    "last_comparison",
    "last_report",
    "monitor",
    "move",
    "num_gpus",
    "on",
    "snapshot",
    "try_all_gpus",
    "try_gpu",
    "virtual",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "virtual":
        return importlib.import_module("gpumagic.virtual")
    if name not in _HOMES:
        raise AttributeError(f"module 'gpumagic' has no attribute {name!r}")
    try:
        module, _, original = _HOMES[name].partition(":")
        return getattr(importlib.import_module(module), original or name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from gpumagic.errors import NO_TORCH, GpuError

        raise GpuError(NO_TORCH.format(f"gpumagic.{name}")) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(shell: Any) -> None:
    """``%load_ext gpumagic``."""
    from gpumagic.magics.commands import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext gpumagic``: leaves nothing behind."""
    from gpumagic.magics.commands import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """What JupyterLab loads in the browser, and under which name."""
    return [{"src": "labextension", "dest": "gpumagic"}]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """What the Jupyter server loads; only a server asks."""
    from gpumagic.server import Extension

    return [{"module": "gpumagic.server", "app": Extension}]
