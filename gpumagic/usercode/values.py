"""Read the user's values without running their code: torch's classes, attributes, functions.

Reads what pure_eval finds safe and the containers of torch and its users; no property, no call.
Objects are recognized by their type, since a user's object may answer getattr with anything.
"""

import ast
import builtins
import dis
import functools
import sys
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Mapping
from itertools import islice
from types import CodeType, FunctionType, MethodType
from typing import Any

from pure_eval import CannotEval, Evaluator


def torch_here() -> Any:
    """The module `torch` if this process has imported it, else None."""
    return sys.modules.get("torch")


def comes_from(kind: type, *names: str) -> bool:
    """Whether a class is one of these, or comes from one: ``"torch.nn.Module"``."""
    for name in names:
        module, _, word = name.rpartition(".")
        known = getattr(sys.modules.get(module), word, None)
        if known is not None and issubclass(kind, known):
            return True
    return False


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of torch's, by its type."""
    return comes_from(type(value), "torch.Tensor")


def is_module(value: object) -> bool:
    """Whether it is a module of torch's, by its type."""
    return comes_from(type(value), "torch.nn.Module")


MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
"""What a name stands for that cannot be read."""
# References that cost nothing, of tensors whose class is torch's own.
_OF_TENSORS = {"data", "grad", "device"}
_ITEMS = 2000
_MODULE_STATE = ("_parameters", "_buffers", "_modules")

# Name, module, bases and members of a class, whatever its metaclass answers.
class_name = vars(type)["__name__"].__get__
defined_in = vars(type)["__module__"].__get__
bases_of = vars(type)["__mro__"].__get__
members_of = vars(type)["__dict__"].__get__


class Scope:
    """The names that the code of one frame sees: its own, and the global ones."""

    def __init__(self, local: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self.local = local
        self.outer = outer

    @property
    def _names(self) -> Any:
        return ChainMap(self.local, self.outer, vars(builtins))  # type: ignore[arg-type]

    def name(self, name: str) -> Any:
        """What a name stands for, or `MISSING`."""
        return self._names.get(name, MISSING)

    def value(self, node: ast.AST) -> Any:
        """What an expression stands for, or `MISSING`."""
        try:
            return _TorchEvaluator(self._names)[node]  # type: ignore[index]
        except Exception:  # noqa: BLE001  not safe to read, or the user's own container or key
            return MISSING


class _TorchEvaluator(Evaluator):
    """Reads torch's modules and tensors, and classes made from containers, too."""

    def _handle(self, node: ast.expr) -> Any:
        try:
            return super()._handle(node)
        except CannotEval:
            if isinstance(node, ast.Attribute):
                return _attribute(self[node.value], node.attr)
            if isinstance(node, ast.Subscript):
                return _item(self[node.value], self[node.slice])
            raise


def _attribute(owner: Any, name: str) -> Any:
    """`owner.name` where torch or a named tuple stores it."""
    kind = type(owner)
    torch = torch_here()
    if torch and kind in (torch.Tensor, torch.nn.Parameter) and name in _OF_TENSORS:
        return getattr(owner, name)
    if is_module(owner):
        for part in _MODULE_STATE:
            if name in own(owner).get(part, {}):
                return own(owner)[part][name]
    if issubclass(kind, tuple) and name in getattr(kind, "_fields", ()):
        return tuple.__getitem__(owner, kind._fields.index(name))  # type: ignore[attr-defined]
    raise CannotEval


def _item(owner: Any, key: Any) -> Any:
    """`owner[key]` of a class made from a container, or of torch's containers of modules."""
    kind = type(owner)
    if type(key) not in (int, str):
        raise CannotEval
    for base in (dict, list, tuple, deque):
        if issubclass(kind, base):
            return base.__getitem__(owner, key)
    if issubclass(kind, UserDict):
        return own(owner)["data"][key]
    if not is_module(owner):
        raise CannotEval
    nn = torch_here().nn
    if issubclass(kind, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        modules = own(owner)["_modules"]
        return list(modules.values())[key] if type(key) is int else modules[key]
    if issubclass(kind, nn.ParameterList):
        return own(owner)["_parameters"][str(key)]
    raise CannotEval


def contents(value: Any) -> list[tuple[Any, Any]]:
    """The first keys and items of a container, or of a class made from one, which is not asked."""
    if issubclass(type(value), UserDict):
        value = own(value).get("data")
    if issubclass(type(value), dict):
        return list(islice(dict.items(value), _ITEMS))
    for base in (list, tuple, deque):
        if issubclass(type(value), base):
            return list(enumerate(islice(base.__iter__(value), _ITEMS)))
    return []


def own(value: Any) -> dict[str, Any]:
    """An object's `__dict__`, without asking its `__getattr__`."""
    try:
        held: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held


def is_array(value: object) -> bool:
    """Whether it is a tensor, or an array of any library that can lend its bytes to another."""
    return any("__dlpack_device__" in members_of(base) for base in bases_of(type(value)))


def of_function(function: Any, name: str) -> Any:
    """`__name__` or `__module__` of a function of C or Python; None of anything else.

    Of torch's own functions also the module that C leaves empty.
    """
    if type(function) is types.MethodType:
        function = function.__func__
    if not isinstance(function, (types.BuiltinFunctionType, types.FunctionType)):
        return None
    found = getattr(function, name, None)
    owner = getattr(function, "__self__", None)
    return "torch" if found is None and "torch" in str(type(owner)) else found


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
