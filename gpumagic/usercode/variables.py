"""Follow the names that a cell reads to the variables, through the notebook's own functions.

A cell that says only `train()` reads what `train` reads: functions defined in the notebook are
followed into their bodies, wherever a name of the cell leads to one.
"""

import dis
import functools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

_CACHED = type(functools.lru_cache(str))
_GLOBAL_LOADS = {"LOAD_GLOBAL", "LOAD_NAME"}


def variables_read(
    names: Iterable[str], namespace: Mapping[str, Any], module: str = "__main__"
) -> Iterator[tuple[str, Any]]:
    """Yield `(name, value)` for each name, and for those that functions of `module` read."""
    queue, seen = deque(names), set[str]()
    followed = set[CodeType]()
    while queue:
        name = queue.popleft()
        if name in seen or name not in namespace:
            continue
        seen.add(name)
        value = namespace[name]
        yield name, value
        functions = deque(_found_in(value, module))
        while functions:
            function = functions.popleft()
            if function.__code__ in followed:
                continue
            followed.add(function.__code__)
            queue.extend(globals_of(function.__code__))
            for free, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                try:
                    held = cell.cell_contents
                except ValueError:  # a closure variable that is not bound yet
                    continue
                yield f"{name}.{free}", held
                functions.extend(_found_in(held, module))


def _found_in(value: Any, module: str) -> list[FunctionType]:
    try:
        return _functions(value, module)
    except Exception:  # noqa: BLE001  a module without its __init__, a function that wraps itself
        return []


_FEW = 1000  # a container of more functions than this is no list of steps


def _functions(value: Any, module: str, depth: int = 2) -> list[FunctionType]:
    # By type and not by attribute: a user's object may answer getattr with anything.
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
    if issubclass(kind, nn.Module):
        kinds = dict.fromkeys(type(part) for part in value.modules())
    else:
        kinds = {value if issubclass(kind, type) else kind: None}
    return [f for one in kinds for f in _methods(one, module)]


def _methods(kind: type, module: str) -> list[FunctionType]:
    return [
        function
        for base in kind.__mro__
        if base.__module__ == module
        for member in vars(base).values()
        if type(member) in (FunctionType, staticmethod, classmethod, property, _CACHED)
        for function in _functions(member, module)
    ]


def globals_of(code: CodeType) -> list[str]:
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in _GLOBAL_LOADS}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(globals_of(constant))
    return list(names)
