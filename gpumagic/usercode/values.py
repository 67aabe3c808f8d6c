"""Read what a name stands for in a frame, without running any of the user's code.

Names, plain attributes and subscripts of builtin containers only: no property, no `__getattr__`, no
`__getitem__`, no call.
"""

import ast
import builtins
import types
from collections import UserDict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
"""What a name stands for that cannot be read."""
# References that cost nothing, of tensors whose class is torch's own.
_OF_TENSORS = {"data", "grad"}
_PLAIN_TENSORS = (Tensor, nn.Parameter)
_MODULE_STATE = ("_parameters", "_buffers", "_modules")


class Scope:
    """The names that the code of one frame sees.

    Parameters
    ----------
    local, outer : mapping
        A frame's own names, and the global ones.
    """

    def __init__(self, local: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self.local = local
        self.outer = outer

    def name(self, name: str) -> Any:
        for names in (self.local, self.outer, vars(builtins)):
            if name in names:
                return names[name]
        return MISSING

    def value(self, node: ast.AST) -> Any:
        """What an expression stands for, or `MISSING`."""
        try:
            return self._value(node)
        except Exception:  # noqa: BLE001  the user's own containers and keys
            return MISSING

    def _value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Name):
            return self.name(node.id)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            return attribute(self._value(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            owner = self._value(node.value)
            return MISSING if owner is MISSING else item(owner, self._key(node.slice))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = self._value(node.operand)
            return -number if type(number) in (int, float) else MISSING
        return MISSING

    def _key(self, node: ast.AST) -> Any:
        key = self._value(node)
        return key if type(key) in (int, str) else MISSING


def attribute(owner: Any, name: str) -> Any:
    """`owner.name` if that is stored, not computed."""
    if owner is MISSING:
        return MISSING
    kind = type(owner)
    if kind in _PLAIN_TENSORS:
        return getattr(owner, name) if name in _OF_TENSORS else MISSING
    if issubclass(kind, types.ModuleType):
        return types.ModuleType.__getattribute__(owner, "__dict__").get(name, MISSING)
    if issubclass(kind, type):
        return _of_class(owner, name)
    held = own(owner)
    if name in held:
        return held[name]
    if issubclass(kind, nn.Module):
        for part in _MODULE_STATE:
            if name in held.get(part, {}):
                return held[part][name]
    fields = getattr(kind, "_fields", None)
    if issubclass(kind, tuple) and isinstance(fields, tuple) and name in fields:
        return tuple.__getitem__(owner, fields.index(name))
    for base in kind.__mro__:
        slot = vars(base).get(name)
        if type(slot) is types.MemberDescriptorType:
            return slot.__get__(owner)
    return _of_class(kind, name)


def own(value: Any) -> Mapping[str, Any]:
    """An object's `__dict__`, without asking its `__getattr__`."""
    try:
        held: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held


def _of_class(kind: type, name: str) -> Any:
    for base in kind.__mro__:
        if name in vars(base):
            found = vars(base)[name]
            if isinstance(found, (staticmethod, classmethod)):
                return found.__func__
            # A property, or another descriptor: to ask it would run it.
            computed = hasattr(type(found), "__get__") and not isinstance(found, types.FunctionType)
            return MISSING if computed else found
    return MISSING


def item(owner: Any, key: Any) -> Any:
    """`owner[key]` of a builtin container or of torch's containers of modules."""
    if key is MISSING:
        return MISSING
    kind = type(owner)
    for base in (dict, list, tuple, deque):
        if issubclass(kind, base):
            return base.__getitem__(owner, key)
    if issubclass(kind, UserDict):
        return item(own(owner).get("data", {}), key)
    if issubclass(kind, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        modules = own(owner)["_modules"]
        return list(modules.values())[key] if type(key) is int else modules[key]
    if issubclass(kind, nn.ParameterList) and type(key) is int:
        return own(owner)["_parameters"][str(key)]
    return MISSING


def device_of(value: Any) -> torch.device | None:
    """A device that a variable holds, as a `torch.device` or in words."""
    if type(value) is torch.device:
        return value
    if type(value) in (str, int):
        try:
            return torch.device(value)
        except (RuntimeError, TypeError):
            return None
    return None


def full(device: torch.device) -> str:
    """``"cuda:0"``: with the number of the current device where there is none."""
    if str(device) == "cuda":
        return f"cuda:{torch.cuda.current_device()}"
    return device.type if device.type == "cpu" else str(device)


def of_function(function: Any, name: str) -> Any:
    """`__name__` or `__module__` of a function of C or Python; None of anything else.

    Of torch's own functions also the module that C leaves empty.
    """
    kind = type(function)
    if issubclass(kind, (types.BuiltinFunctionType, types.FunctionType)):
        found = getattr(function, name, None)
        if (
            found is None
            and name == "__module__"
            and isinstance(function, types.BuiltinFunctionType)
        ):
            return "torch" if "torch" in str(type(function.__self__)) else None
        return found
    return None
