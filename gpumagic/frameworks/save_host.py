"""Report which variables remain usable after a fatal CUDA error, and save them without CUDA."""

import os
import types
from contextlib import suppress
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gpumagic.device.cuda_state import Death
from gpumagic.display.units import size, some
from gpumagic.errors import GpuError
from gpumagic.faults import first_line
from gpumagic.frameworks.public import where
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.values import comes_from, torch_here
from gpumagic.usercode.variables import own_variables

# Classes, functions and modules are not saved. Running the notebook defines them again.
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def what_is_left(death: Death) -> str:
    """Return a text that says why CUDA failed, and which variables are safe or lost."""
    safe, lost = _sorted()
    parts = [f"{death}"]
    if safe:
        do = '`import gpumagic; gpumagic.save_host("rescue.pt")` writes copies'
        parts.append(f"On the host and safe: {some(safe)}; {do}")
    return ". ".join([*parts, f"Lost: {some(lost)}"] if lost else parts)


def save_host(path: str = "rescue.pt") -> None:
    """Write the notebook's variables that are on the host to a file that `torch.load` reads.
    This works after a fatal CUDA error. Variables with data on a GPU and variables that cannot be
    pickled are skipped. Their names are printed. Raises `GpuError` if there is nothing to write."""
    if (torch := torch_here()) is None:
        raise GpuError("save_host() needs torch, which is not imported; type `import torch` first")
    safe, lost = _sorted()
    writable: dict[str, Any] = {}
    for name, value in safe.items():
        with suppress(Exception):  # fails for a generator, a lock or an open file
            torch.save(value, os.devnull, pickle_module=cloudpickle)
            writable[name] = value
    if not writable:
        raise GpuError("no variable on the host can be pickled; nothing was written")
    whole = f"{path}.incomplete"  # replaces `path` after writing has succeeded
    try:
        torch.save(writable, whole, pickle_module=cloudpickle)
        os.replace(whole, path)
    except (OSError, RuntimeError) as error:  # torch raises RuntimeError for a missing folder
        raise GpuError(f"nothing was written to {path}: {first_line(error)}") from None
    print(f"{some(writable)}: {size(os.path.getsize(path))} written to {path}; in the new kernel,")
    print(f"type import torch; globals().update(torch.load({path!r}, weights_only=False))")
    for reason, names in (("on a GPU", lost), ("cannot be pickled", safe.keys() - writable.keys())):
        if names:
            print(f"left out, {reason}: {some(sorted(names))}")


def _sorted() -> tuple[dict[str, Any], dict[str, Any]]:
    hidden = getattr(shell(), "user_ns_hidden", {})
    safe, lost = dict[str, Any](), dict[str, Any]()
    for name, value in own_variables(user_namespace()).items():
        if name not in hidden and not issubclass(type(value), _CODE):
            (safe if _is_on_host(value) else lost)[name] = value
    return safe, lost


def _is_on_host(value: Any) -> bool:
    if comes_from(type(value), "torch.Stream", "torch.Event", "torch.cuda.Event"):
        return False
    try:
        return where(value) == "cpu"
    except GpuError:  # the value holds no data of any framework
        return True
