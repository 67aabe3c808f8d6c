"""Make IPython load the extension at the first use of one of its magics, for a whole profile.

It is ``MagicsManager.lazy_magics`` in the profile's ``ipython_config.json``. Other settings stay.
"""

import json
from pathlib import Path
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.core.profiledir import ProfileDir, ProfileDirError
from IPython.paths import get_ipython_dir
from traitlets.config.loader import PyFileConfigLoader
from traitlets.config.manager import BaseJSONConfigManager

from gpumagic.errors import GpuError
from gpumagic.magics.options import MAGICS

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
