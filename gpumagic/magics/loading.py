"""Install what gpumagic adds to a shell, in order, and remove it in reverse.

Loading has at most 20 ms (benchmarks/load_ext.py): magics and hooks import what they need when they
first need it.

`enable` makes IPython load the extension at the first use of one of its magics, for a whole
profile: ``MagicsManager.lazy_magics`` in its ``ipython_config.json``. Other settings stay.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from IPython.core.completer import context_matcher
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir, ProfileDirError
from IPython.paths import get_ipython_dir
from traitlets.config.loader import PyFileConfigLoader
from traitlets.config.manager import BaseJSONConfigManager

from gpumagic.errors import GpuError
from gpumagic.magics.cluster_commands import ClusterMagics
from gpumagic.magics.commands import GpuMagics
from gpumagic.magics.hooks import MemoryHooks, Once
from gpumagic.magics.memory_commands import MemoryMagics
from gpumagic.magics.ongpu import BEGIN, CellHooks, Watched, transform
from gpumagic.magics.options import MAGICS

_loaded: WeakKeyDictionary[Any, ExitStack] = WeakKeyDictionary()


class _Change(NamedTuple):
    install: Callable[[], object]
    uninstall: Callable[[], object]


def hooks(shell: Any) -> tuple[Any, ...]:
    """Return each change of a shell, to `install` in this order and `uninstall` in reverse."""
    cells, memory = CellHooks(shell), MemoryHooks(shell)
    watched, once = Watched(cells), Once(shell, cells.current)
    commands, kernel = GpuMagics(shell, cells, watched, once), getattr(shell, "kernel", None)
    return (
        _Change(lambda: None, forget),
        *map(_registered, (commands, MemoryMagics(shell, commands), ClusterMagics(shell))),
        cells.explaining,  # shell.showtraceback
        # Last: indentation and pasted prompts are removed by then, as before any %%magic.
        _appended(shell.input_transformers_cleanup, transform),
        _appended(shell.ast_transformers, cells),
        _Change(partial(setattr, shell, BEGIN, cells.begin), partial(delattr, shell, BEGIN)),
        *_called(cells, "pre_execute", "pre_run_cell", "post_execute", "post_run_cell"),
        once,  # shell.display_formatter
        *_called(memory, "pre_run_cell", "post_run_cell"),
        *([_control_channel(kernel, cells)] if hasattr(kernel, "control_handlers") else []),
        *([_crash_file()] if kernel is not None else []),
        _appended(shell.Completer.custom_matchers, _matcher),
        _Change(lambda: None, watched.stop),
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


def _control_channel(kernel: Any, cells: CellHooks) -> Any:
    from gpumagic.magics.control_channel import ControlChannel

    return ControlChannel(kernel, lambda: cells.explaining.last)


def _crash_file() -> Any:
    from gpumagic.telemetry.crash_file import CrashFile

    return CrashFile()


def _complete(context: Any) -> dict[str, Any]:
    from gpumagic.magics.arguments import completions

    return completions(context)


_matcher: Any = context_matcher()(_complete)


FORGET = (
    ("gpumagic.ledger.dispatch", "uninstall"),
    ("gpumagic.moving.move", "forget_origins"),
    ("gpumagic.frameworks.array_framework", "forget_origins"),
    ("gpumagic.memory.allocator", "forget"),
    ("gpumagic.device.cuda_state", "forget"),
    ("gpumagic.faults", "forget"),
)


def forget() -> None:
    """Discard what cells left in this process."""
    for name, function in FORGET:
        if (module := sys.modules.get(name)) is not None:
            getattr(module, function)()


def load(shell: Any) -> None:
    """Install magics and hooks in `shell`, all or none; do nothing if they are there."""
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
    """Remove magics and hooks from `shell`, the last one first, and what they keep."""
    if (installed := _loaded.pop(shell, None)) is not None:
        installed.close()


_CONFIG = "ipython_config"
_EXTENSION = "gpumagic"


def enable() -> str:
    """Write it for the profile of this shell, or the default one; return what was done, where."""
    folder = _profile()
    script = folder / f"{_CONFIG}.py"
    theirs = PyFileConfigLoader(script.name, str(folder)).load_config() if script.exists() else {}
    if "lazy_magics" in theirs.get("MagicsManager", {}):
        ours = ", ".join(f"{name!r}: {_EXTENSION!r}" for name in sorted(MAGICS))
        raise GpuError(f"{script} sets MagicsManager.lazy_magics itself; add there {ours}")
    path = _update(folder, dict.fromkeys(MAGICS, _EXTENSION))
    return (
        "kernels that start from now on load gpumagic at the first %gpus, %%ongpu or %%gputime "
        f"({path}); gpumagic disable ends it"
    )


def disable() -> str:
    """Remove what `enable` wrote; return what was done, and where."""
    folder = _profile()
    written = _read(folder).get("MagicsManager", {}).get("lazy_magics", {})
    ours = [name for name, module in written.items() if module == _EXTENSION]
    if not ours:
        return "nothing to remove: each notebook needs %load_ext gpumagic already"
    path = _update(folder, dict.fromkeys(ours))
    return f"each notebook needs %load_ext gpumagic again ({path})"


def _profile() -> Path:
    if InteractiveShell.initialized():
        found = InteractiveShell.instance().profile_dir
        if found is not None:
            return Path(found.location)
    try:
        return Path(ProfileDir.find_profile_dir_by_name(get_ipython_dir(), "default").location)
    except ProfileDirError:
        made = ProfileDir.create_profile_dir_by_name(get_ipython_dir(), "default")
        return Path(made.location)


def _read(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = BaseJSONConfigManager(config_dir=str(folder)).get(_CONFIG)
    except json.JSONDecodeError as error:
        path = folder / f"{_CONFIG}.json"
        raise GpuError(f"{path} is not JSON ({error}); correct or remove it") from None
    return found


def _update(folder: Path, names: dict[str, str | None]) -> Path:
    """Set each name to its module; remove those without one."""
    _read(folder)
    manager = BaseJSONConfigManager(config_dir=str(folder))
    try:
        manager.update(_CONFIG, {"MagicsManager": {"lazy_magics": names}})
    except OSError as error:
        raise GpuError(f"{error.filename} cannot be written: {error.strerror}") from None
    return folder / f"{_CONFIG}.json"
