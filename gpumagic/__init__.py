"""GPUs in notebooks: what is there, run this cell on that one, what moved, how long, how much.

``%load_ext gpumagic`` turns the magics on; the names below are the same as a library. Nothing here
imports torch or IPython: a name imports what it needs when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gpumagic import virtual
    from gpumagic.device import Device
    from gpumagic.errors import CrossDeviceWarning, GpuError
    from gpumagic.telemetry import take as snapshot
    from gpumagic.tensors.devices import cpu, devices, gpu, num_gpus, try_all_gpus, try_gpu
    from gpumagic.tensors.dry_run import DryRun, dry_run
    from gpumagic.tensors.explain import explain
    from gpumagic.tensors.move import move
    from gpumagic.tensors.place import on
    from gpumagic.tensors.report import Report
    from gpumagic.tensors.run import last_report
    from gpumagic.tensors.timing.comparison import Comparison
    from gpumagic.tensors.watching.watch import watch
    from gpumagic.timed import compare, last_comparison
    from gpumagic.widget import monitor

# Where each name is, and what it is called there if otherwise.
_HOMES = {
    "Comparison": "gpumagic.tensors.timing.comparison",
    "CrossDeviceWarning": "gpumagic.errors",
    "Device": "gpumagic.device",
    "DryRun": "gpumagic.tensors.dry_run",
    "GpuError": "gpumagic.errors",
    "Report": "gpumagic.tensors.report",
    "compare": "gpumagic.timed",
    "cpu": "gpumagic.tensors.devices",
    "devices": "gpumagic.tensors.devices",
    "dry_run": "gpumagic.tensors.dry_run",
    "explain": "gpumagic.tensors.explain",
    "gpu": "gpumagic.tensors.devices",
    "last_comparison": "gpumagic.timed",
    "last_report": "gpumagic.tensors.run",
    "monitor": "gpumagic.widget",
    "move": "gpumagic.tensors.move",
    "num_gpus": "gpumagic.tensors.devices",
    "on": "gpumagic.tensors.place",
    "snapshot": "gpumagic.telemetry:take",
    "try_all_gpus": "gpumagic.tensors.devices",
    "try_gpu": "gpumagic.tensors.devices",
    "watch": "gpumagic.tensors.watching.watch",
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
    from gpumagic.magics import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """``%unload_ext gpumagic``: leaves nothing behind."""
    from gpumagic.magics import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """What JupyterLab loads in the browser, and under which name."""
    return [{"src": "labextension", "dest": "gpumagic"}]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """What the Jupyter server loads; only a server asks."""
    from gpumagic.server import Extension

    return [{"module": "gpumagic.server", "app": Extension}]
