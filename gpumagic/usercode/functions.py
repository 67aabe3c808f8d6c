"""Find the notebook's own functions in a value: in containers, partials, methods, classes, modules.

By type and not by attribute: a user's object may answer getattr with anything.
"""

import dis
import functools
from types import CodeType, FunctionType, MethodType
from typing import Any

from gpumagic.usercode.torch_classes import is_module
from gpumagic.usercode.values import defined_in

_CACHED = type(functools.lru_cache(str))
_GLOBAL_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}


def functions_in(value: Any, module: str) -> list[FunctionType]:
    """Those of `module` that a value is or holds."""
    try:
        return _functions(value, module)
    except Exception:  # noqa: BLE001  a module without its __init__, a function that wraps itself
        return []


_FEW = 1000  # a container of more functions than this is no list of steps


def _functions(value: Any, module: str, depth: int = 2) -> list[FunctionType]:
    kind = type(value)
    if kind in (list, tuple, dict):
        items = value.values() if kind is dict else value
        few = depth and len(value) <= _FEW
        return [f for item in items for f in _functions(item, module, depth - 1)] if few else []
    if kind is functools.partial:
        return _functions(value.func, module) + _functions([*value.args], module)
    if kind is MethodType:
        return _functions(value.__func__, module) + _functions(value.__self__, module)
    if kind in (staticmethod, classmethod):
        return _functions(value.__func__, module)
    if kind is property:
        return _functions([value.fget, value.fset], module)
    if kind in (FunctionType, _CACHED):
        found = [value] if kind is FunctionType and value.__module__ == module else []
        wrapped = vars(value).get("__wrapped__")
        return found + (_functions(wrapped, module) if wrapped is not None else [])
    if is_module(value):
        kinds = dict.fromkeys(type(part) for part in value.modules())
    else:
        kinds = {value if issubclass(kind, type) else kind: None}
    return [f for one in kinds for f in _methods(one, module)]


def _methods(kind: type, module: str) -> list[FunctionType]:
    return [
        function
        for base in kind.__mro__
        if defined_in(base) == module
        for member in vars(base).values()
        if type(member) in (FunctionType, staticmethod, classmethod, property, _CACHED)
        for function in _functions(member, module)
    ]


def globals_of(code: CodeType) -> list[str]:
    """The global names that a code object reads, and those within it."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in _GLOBAL_LOADS}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(globals_of(constant))
    return list(names)
