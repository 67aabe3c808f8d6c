"""Report what is left of a notebook whose CUDA is dead, and write it to a file.

Nothing here calls CUDA: of a tensor on a GPU only its device is read.
"""

import ast
import os
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gpumagic.device.cuda_state import Death
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError, library_needed
from gpumagic.frameworks.public import where
from gpumagic.memory.roots import KeptOutputs
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.values import comes_from
from gpumagic.usercode.variables import NOT_VARIABLES

# The notebook's text has these.
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_FILE = "rescue.pt"
_TYPE = f'gpumagic.save_host("{_FILE}")'


def what_is_left(death: Death) -> str:
    """Return in one line what has happened, what is safe, and what is lost."""
    safe, lost = _sorted(user_namespace())
    parts = [f"{death}"]
    if safe:
        parts.append(f"On the host and safe: {some(safe)}; `{_TYPE}` writes copies")
    if lost:
        saved = _last_saved(lost)
        named = (f"{n} (last saved: {saved[n]})" if n in saved else n for n in lost)
        parts.append(f"Lost: {some(named)}")
    return ". ".join(parts)


def save_host(path: str = _FILE) -> None:
    """Write copies of the notebook's host variables to a file, and name them.

    Variables that hold anything on a GPU or cannot be pickled are left out. This needs no CUDA: it
    is for a kernel in which CUDA is dead.

    Parameters
    ----------
    path : str, default "rescue.pt"
        The file, which `torch.load` reads. Classes and functions of the notebook are written along.

    Raises
    ------
    GpuError
        There is nothing to write.

    Examples
    --------
    >>> gpumagic.save_host("rescue.pt")
    X, y, history: 3.2 MiB written to rescue.pt; in the new kernel type
    globals().update(torch.load("rescue.pt", weights_only=False))
    """
    with library_needed("torch", "save_host()", '"gpumagic[torch]"'):
        import torch
    safe, lost = _sorted(user_namespace())
    writable: dict[str, Any] = {}
    for name, value in safe.items():
        with suppress(Exception):  # a generator, a lock, an open file: named below
            torch.save(value, os.devnull, pickle_module=cloudpickle)
            writable[name] = value
    if not writable:
        raise GpuError("no variable on the host can be written; nothing was")
    whole = f"{path}.incomplete"  # an earlier file stays until this one is whole
    torch.save(writable, whole, pickle_module=cloudpickle)
    os.replace(whole, path)
    load = f"globals().update(torch.load({path!r}, weights_only=False))"
    print(f"{some(writable)}: {size(os.path.getsize(path))} written to {path}; in the new kernel")
    print(f"type {load}")
    for reason, names in (("on a GPU", lost), ("not to be pickled", safe.keys() - writable.keys())):
        if names:
            print(f"left out, {reason}: {some(sorted(names))}")


def _sorted(namespace: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the user's variables on the host, and the ones with something on a GPU."""
    hidden = {*getattr(shell(), "user_ns_hidden", ()), *NOT_VARIABLES}
    safe: dict[str, Any] = {}
    lost: dict[str, Any] = {}
    for name, value in KeptOutputs(namespace).variables().items():
        if not name.startswith("_") and name not in hidden and not issubclass(type(value), _CODE):
            (safe if _is_on_host(value) else lost)[name] = value
    return safe, lost


def _is_on_host(value: Any) -> bool:
    if comes_from(type(value), "torch.Stream", "torch.Event", "torch.cuda.Event"):
        return False
    try:
        return where(value) == "cpu"
    except GpuError:  # there is no data of any framework in it
        return True


def _last_saved(names: Iterable[str]) -> dict[str, str]:
    """Return the last file that a cell wrote of each variable, and when: ``"net.pt, 14:02"``."""
    wanted, found = {*names}, dict[str, str]()
    for cell in getattr(getattr(shell(), "history_manager", None), "input_hist_parsed", ()):
        with suppress(SyntaxError, ValueError):
            for call in ast.walk(ast.parse(cell)):
                if isinstance(call, ast.Call) and "save" in ast.unparse(call.func):
                    told = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}
                    for path in _files(call):
                        when = time.strftime("%H:%M", time.localtime(os.path.getmtime(path)))
                        found |= dict.fromkeys(told & wanted, f"{path}, {when}")
    return found


def _files(call: ast.Call) -> Iterator[str]:
    """Yield the existing files that a call names."""
    texts = (node.value for node in ast.walk(call) if isinstance(node, ast.Constant))
    return (text for text in texts if isinstance(text, str) and os.path.isfile(text))
