"""Install gpumagic's magics and hooks in a shell, and remove them in reverse order.

Loading may take at most 20 ms (benchmarks/load_ext.py), so most imports are inside functions.
"""

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from IPython.core.completer import context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir
from IPython.paths import get_ipython_dir
from traitlets.config.manager import BaseJSONConfigManager

from gpumagic.errors import GpuError
from gpumagic.magics.commands import GpuMagics
from gpumagic.magics.hooks import DisplayOnce
from gpumagic.magics.ongpu import BEGIN, CellHooks, transform
from gpumagic.magics.options import MAGICS

_loaded: WeakKeyDictionary[Any, ExitStack] = WeakKeyDictionary()


class _Change(NamedTuple):
    install: Callable[[], object]
    uninstall: Callable[[], object]


def hooks(shell: Any) -> tuple[Any, ...]:
    """Return the changes to a shell; install them in this order, uninstall them in reverse."""
    cells = CellHooks(shell)
    once, kernel = DisplayOnce(shell, cells.current), getattr(shell, "kernel", None)
    of_kernel: list[Any] = []
    if hasattr(kernel, "control_handlers"):
        from gpumagic.magics.control_channel import ControlChannel

        of_kernel.append(ControlChannel(kernel))
    if kernel is not None:
        from gpumagic.telemetry.crash_file import CrashFile

        of_kernel.append(CrashFile())
    return (
        _Change(lambda: None, forget),
        _registered(GpuMagics(shell, cells, once)),
        cells.explaining,  # replaces shell.showtraceback
        # `transform` runs last, after IPython has removed indentation and prompts (`>>>`).
        _appended(shell.input_transformers_cleanup, transform),
        _appended(shell.ast_transformers, cells),
        _Change(partial(setattr, shell, BEGIN, cells.begin), partial(delattr, shell, BEGIN)),
        *_called(cells, "pre_execute", "pre_run_cell", "post_execute", "post_run_cell"),
        once,  # changes shell.display_formatter
        *of_kernel,
        _appended(shell.Completer.custom_matchers, context_matcher()(_complete)),
        _Change(lambda: None, lambda: cells.watch(None)),
        _Change(lambda: None, cells.end_all),
    )


def _registered(magics: Any) -> _Change:
    manager = magics.shell.magics_manager

    def uninstall() -> None:
        for kind, ours in magics.magics.items():
            for name in ours:
                manager.magics[kind].pop(name, None)
        manager.registry.pop(type(magics).__name__, None)

    return _Change(partial(manager.register, magics), uninstall)


def _appended(items: list[Any], item: Any) -> _Change:
    def uninstall() -> None:
        if item in items:  # IPython itself removes an AST transformer that failed
            items.remove(item)

    return _Change(partial(items.append, item), uninstall)


def _called(hook: Any, *events: str) -> list[_Change]:
    found = hook.shell.events
    return [
        _Change(partial(found.register, event, call), partial(found.unregister, event, call))
        for event in events
        for call in [getattr(hook, event)]
    ]


def _complete(context: Any) -> dict[str, Any]:
    from gpumagic.magics.arguments import completions

    return completions(context)


FORGET = (
    ("gpumagic.ledger.dispatch", "uninstall"),
    ("gpumagic.memory.allocator", "forget"),
    ("gpumagic.device.cuda_state", "forget"),
    ("gpumagic.faults", "forget"),
)


def forget() -> None:
    """Discard the state of earlier cells, but not the origins of moved variables."""
    for name, function in FORGET:
        if (module := sys.modules.get(name)) is not None:
            getattr(module, function)()


def load(shell: Any) -> None:
    """Install all magics and hooks in `shell`, or none if one fails. A second call does nothing."""
    if shell in _loaded:
        return
    with ExitStack() as installed:
        for hook in hooks(shell):
            hook.install()
            installed.callback(hook.uninstall)
        _loaded[shell] = installed.pop_all()
    if wanted := os.environ.get("GPUMAGIC_VIRTUAL"):
        from gpumagic.magics import gpus

        try:
            gpus.virtual_on(wanted, os.environ.get("GPUMAGIC_VIRTUAL_MEMORY"), quiet=True)
        except GpuError as error:
            print(f"GPUMAGIC_VIRTUAL={wanted}: {error}")


def unload(shell: Any) -> None:
    if (installed := _loaded.pop(shell, None)) is not None:
        installed.close()


_CONFIG = "ipython_config"
_EXTENSION = "gpumagic"


def enable() -> str:
    """Make IPython load the extension at the first use of a magic; return the line to print."""
    path = _update(dict.fromkeys(MAGICS, _EXTENSION))
    when = "when you first use one of its magics"
    return f"new kernels load gpumagic {when} ({path}); to undo: gpumagic disable"


def disable() -> str:
    """Remove the entries that `enable` wrote; return the line to print."""
    if not (path := _update(dict.fromkeys(MAGICS))):
        return "nothing to remove: each notebook already needs %load_ext gpumagic"
    return f"each notebook again needs %load_ext gpumagic ({path})"


def _update(names: Mapping[str, str | None]) -> Path | None:
    """Set each magic's extension in the profile; None deletes it. Return the file if it changed."""
    started = InteractiveShell.initialized() and InteractiveShell.instance().profile_dir
    profile = started or ProfileDir.create_profile_dir_by_name(get_ipython_dir(), "default")
    manager = BaseJSONConfigManager(config_dir=profile.location)
    path = Path(profile.location) / f"{_CONFIG}.json"
    try:
        written = manager.get(_CONFIG).get("MagicsManager", {}).get("lazy_magics", {})
        if not (ours := {n: to for n, to in names.items() if to or written.get(n) == _EXTENSION}):
            return None
        manager.update(_CONFIG, {"MagicsManager": {"lazy_magics": ours}})
    except (OSError, ValueError) as error:
        raise GpuError(f"{path} cannot be changed: {error}; correct or remove it") from None
    return path
