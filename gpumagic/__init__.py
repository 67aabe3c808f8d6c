"""GPUs in notebooks: what is there, run this cell on that one, what moved, how long, how much.

``%load_ext gpumagic`` turns the magics on; the names below are the same as a library. Nothing here
imports torch or IPython: a name imports what it needs when it is first used.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

# Each public name once, with its module; after a colon its name there, if that is another.
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
    "virtual": "gpumagic.virtual",
    "watch": "gpumagic.ledger.watch",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gpumagic' has no attribute {name!r}")
    from gpumagic.errors import torch_needed

    module, _, original = _HOMES[name].partition(":")
    with torch_needed(f"gpumagic.{name}"):
        home = importlib.import_module(module)
    return home if module == f"gpumagic.{name}" else getattr(home, original or name)


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
