"""Turn the magics on in a shell, and off again, with nothing left behind."""

import os
import sys
from typing import Any
from weakref import WeakKeyDictionary

from gpumagic import faults
from gpumagic.device import cuda_state
from gpumagic.errors import GpuError
from gpumagic.magics.cluster_commands import OFFERED, ClusterMagics
from gpumagic.magics.commands import GpuMagics
from gpumagic.magics.completion import complete_where
from gpumagic.magics.memory_commands import MemoryMagics

_loaded: WeakKeyDictionary[Any, GpuMagics] = WeakKeyDictionary()


def load(shell: Any) -> None:
    """Turn the magics on in `shell`; to call it twice does no harm."""
    if shell in _loaded:
        return
    magics = _loaded[shell] = GpuMagics(shell)
    shell.register_magics(magics, MemoryMagics(shell, magics), ClusterMagics(shell))
    for hooks in (
        magics.explaining,
        magics.cells,
        magics.once,
        magics.memory_hooks,
        magics.mxnet,
        magics.control,
    ):
        hooks.install()
    shell.Completer.custom_matchers.append(complete_where)
    if wanted := os.environ.get("GPUMAGIC_VIRTUAL"):
        from gpumagic.magics import gpus

        try:
            gpus.virtual_on(wanted, os.environ.get("GPUMAGIC_VIRTUAL_MEMORY"))
        except GpuError as error:
            print(f"GPUMAGIC_VIRTUAL={wanted}: {error}")


def unload(shell: Any) -> None:
    """Take them away, and what they hold."""
    magics = _loaded.pop(shell, None)
    if magics is None:
        return
    for hooks in (
        magics.cells,
        magics.explaining,
        magics.once,
        magics.memory_hooks,
        magics.mxnet,
        magics.control,
    ):
        hooks.uninstall()
    magics.watched.stop()
    if (dispatch := sys.modules.get("gpumagic.ledger.dispatch")) is not None:
        dispatch.uninstall()
    if (moving := sys.modules.get("gpumagic.moving.move")) is not None:
        moving.forget_origins()
    faults.forget()
    cuda_state.forget()
    shell.Completer.custom_matchers.remove(complete_where)
    manager = shell.magics_manager
    for offered in OFFERED:
        for kind, ours in offered.magics.items():
            for name in ours:
                manager.magics[kind].pop(name, None)
        manager.registry.pop(offered.__name__, None)
