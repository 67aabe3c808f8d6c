"""Read what an expression stands for in a frame, without running any of the user's code.

What pure_eval finds safe, and what torch and its users keep things in. No property, no call.
"""

import ast
import builtins
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Mapping
from itertools import islice
from typing import Any

from pure_eval import CannotEval, Evaluator

from gpumagic.usercode.torch_classes import is_module, torch_here

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
