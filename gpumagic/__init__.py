"""Use GPUs in notebooks: list GPUs, run cells on a GPU, and report copies, time and memory.

``%load_ext gpumagic`` turns the magics on. Programs can use the public functions instead.
torch and IPython are imported only when a public name first needs them.
"""

import sys
from typing import Any

import lazy_loader

# The public names are listed only in __init__.pyi, which type checkers and editors also read.
_import, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("gpumagic")
    if name not in __all__:
        raise AttributeError(f"module 'gpumagic' has no attribute {name!r}")
    from gpumagic.errors import torch_needed

    with torch_needed(f"gpumagic.{name}"):
        return _import(name)


def load_ipython_extension(shell: Any) -> None:
    """Turn the magics on, for ``%load_ext gpumagic``."""
    if sys.platform == "emscripten":  # JupyterLite
        print("gpumagic needs a server: Python in the browser has no GPUs, no torch, no processes")
        return
    from gpumagic.magics.loading import load

    load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Turn the magics off, for ``%unload_ext gpumagic``."""
    from gpumagic.magics.loading import unload

    unload(shell)


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Return the folder and the name of gpumagic's JupyterLab extension."""
    return [{"src": "labextension", "dest": "gpumagic"}]


def _jupyter_server_extension_points() -> list[dict[str, Any]]:
    """Return gpumagic's extension of the Jupyter server. The server calls this function."""
    from gpumagic.server.routes import Extension

    return [{"module": "gpumagic.server", "app": Extension}]
