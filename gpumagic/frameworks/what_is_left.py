"""Report which variables remain usable after a fatal CUDA error."""

import types
from typing import Any

from gpumagic.device.cuda_state import Death
from gpumagic.display.units import some
from gpumagic.errors import GpuError
from gpumagic.frameworks.public import where
from gpumagic.usercode.files import shell, user_namespace
from gpumagic.usercode.values import PLAIN, comes_from, contents, is_tensor
from gpumagic.usercode.variables import own_variables

# Classes, functions and modules are left out. Running the notebook defines them again.
_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


def what_is_left(death: Death) -> str:
    """Return a text that says why CUDA failed, and which variables are safe or lost."""
    hidden = getattr(shell(), "user_ns_hidden", {})
    own = own_variables(user_namespace()).items()
    known = {name: v for name, v in own if name not in hidden and not issubclass(type(v), _CODE)}
    safe = [name for name, value in known.items() if _is_on_host(value)]
    lost = [name for name in known if name not in safe]
    parts = [f"{death}"]
    if safe:
        code = ", ".join(f"{name}={name}" for name in safe if _is_data(known[name]))
        do = f'; `torch.save(dict({code}), "rescue.pt")` saves plain data' if code else ""
        parts.append(f"On the host and safe: {some(safe)}{do}")
    return ". ".join([*parts, f"Lost: {some(lost)}"] if lost else parts)


def _is_data(value: Any) -> bool:
    """Whether a value has only tensors, arrays or plain data, so pickling runs no user code."""
    known = is_tensor(value) or comes_from(type(value), "numpy.ndarray")
    held = [item for _, item in contents(value)] if type(value) in (list, tuple, dict) else [value]
    return known or all(type(item) in PLAIN or is_tensor(item) for item in held)


def _is_on_host(value: Any) -> bool:
    if comes_from(type(value), "torch.Stream", "torch.Event", "torch.cuda.Event"):
        return False
    try:
        return where(value) == "cpu"
    except GpuError:  # the value holds no data of any framework
        return True
