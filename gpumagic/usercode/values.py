"""Read expressions, containers and functions of the user without running the user's code.

Objects are recognized by type, because `getattr` of a user's object may run any code. That
code could resolve a proxy, read a file or a database, or raise an error.
"""

import ast
import builtins
import dis
import functools
import sys
import types
from collections import ChainMap, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count, islice, repeat
from types import CodeType, FunctionType, MethodType
from typing import Any

from pure_eval import CannotEval, Evaluator


def torch_here() -> Any:
    """Return the module `torch` if this process has imported it, else None."""
    return sys.modules.get("torch")


def comes_from(kind: type, *names: str) -> bool:
    """Whether a class is one of `names`, such as ``"torch.nn.Module"``, or a subclass of one."""
    for name in names:
        module, _, word = name.rpartition(".")
        known = getattr(sys.modules.get(module), word, None)
        if known is not None and issubclass(kind, known):
            return True
    return False


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor, by its type."""
    return comes_from(type(value), "torch.Tensor")


def is_module(value: object) -> bool:
    """Whether a value is a torch module, by its type."""
    return comes_from(type(value), "torch.nn.Module")


# Functions that return a class's name, module, bases and members, bypassing its metaclass.
class_name = vars(type)["__name__"].__get__
defined_in = vars(type)["__module__"].__get__
bases_of = vars(type)["__mro__"].__get__
members_of = vars(type)["__dict__"].__get__


def own(value: Any) -> Any:
    """Return an object's `__dict__`, bypassing its `__getattr__`; empty if there is none."""
    try:
        held: Any = object.__getattribute__(value, "__dict__")
    except Exception:  # noqa: BLE001  a property named `__dict__` may raise
        return {}
    return held if isinstance(held, (dict, types.MappingProxyType)) else {}


# The value of a name that cannot be read.
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "MISSING"})()
_OF_TENSORS = {"data", "grad", "device"}  # cheap to read from tensors of torch's own classes
_MODULE_STATE = ("_parameters", "_buffers", "_modules")
_LISTS_OF_MODULES = tuple(f"torch.nn.{name}" for name in ("Sequential", "ModuleList", "ModuleDict"))


class Scope:
    """The names in a frame's scope: local, global and built-in ones."""

    def __init__(self, local: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self.local = local
        self.outer = outer

    @property
    def _names(self) -> Any:
        return ChainMap(self.local, self.outer, vars(builtins))  # type: ignore[arg-type]

    def name(self, name: str) -> Any:
        """Return the value of a name, or `MISSING`."""
        return self._names.get(name, MISSING)

    def value(self, node: ast.AST) -> Any:
        """Return the value of an expression, or `MISSING`."""
        try:
            return _TorchEvaluator(self._names)[node]  # type: ignore[index]
        except Exception:  # noqa: BLE001  not safe to read, or the user's container or key raised
            return MISSING


class _TorchEvaluator(Evaluator):
    """Evaluate expressions that may contain torch modules, tensors and container subclasses."""

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
    """Return `owner.name` of a tensor, a torch module or a named tuple."""
    kind, held = type(owner), own(owner)
    torch, fakes = torch_here(), sys.modules.get("torch._subclasses.fake_tensor")  # for dry runs
    of_torch = torch and (torch.Tensor, torch.nn.Parameter, getattr(fakes, "FakeTensor", None))
    if of_torch and kind in of_torch and name in _OF_TENSORS:
        return getattr(owner, name)
    if is_module(owner):
        return ChainMap(*(held[part] for part in _MODULE_STATE))[name]
    if issubclass(kind, tuple) and name in getattr(kind, "_fields", ()):
        return tuple.__getitem__(owner, kind._fields.index(name))  # type: ignore[attr-defined]
    raise CannotEval


def _item(owner: Any, key: Any) -> Any:
    """Return `owner[key]` of a torch container, or of a subclass of a Python container."""
    if issubclass(type(owner), UserDict):
        owner = own(owner)["data"]
    elif comes_from(type(owner), *_LISTS_OF_MODULES):
        owner = own(owner)["_modules"]
        owner = list(owner.values()) if type(key) is int else owner
    elif comes_from(type(owner), "torch.nn.ParameterList"):
        owner, key = own(owner)["_parameters"], str(key)
    for base in (dict, list, tuple, deque):
        if issubclass(type(owner), base) and type(key) in (int, str):
            return base.__getitem__(owner, key)
    raise CannotEval


Step = tuple[str, Any]  # from a value to an attribute or item: (".", name) or ("[]", key)
Path = tuple[Any, ...]  # to a value: the variable's name, then one step per attribute or item

PLAIN = {int, float, complex, bool, str, bytes, type(None), types.ModuleType}  # without parts
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, UserDict)  # items of other mappings may be in a file or database
_PARTS: dict[type, tuple[str, ...]] = {
    functools.partial: ("func", "args", "keywords"),
    MethodType: ("__self__",),
}
CONTAINERS = (*_SEQUENCES, *_MAPPINGS, *_PARTS)
# Packages whose objects, such as locks and threads, are not searched.
_CLOSED = {*sys.stdlib_module_names, "IPython", "ipykernel", "gpumagic"}


def written(path: Path) -> str:
    """Return a path as code: ``net.layer.weight``, ``batch['x']``."""
    steps = (f".{key}" if kind == "." else f"[{key_text(key)}]" for kind, key in path[1:])
    return "".join([str(path[0]), *steps])


def key_text(key: Any) -> str:
    """Return a dict key as code if plain, else its class, because a tensor's repr reads data."""
    return repr(key) if any(type(key) is kind for kind in PLAIN) else f"<{class_name(type(key))}>"


def items(value: Any, most: int | None = None) -> list[tuple[Step, Any]]:
    """Return the first `most` items of a container with their steps; empty if all are `PLAIN`."""
    kind = type(value)
    if kind in _PARTS:
        return [((".", name), getattr(value, name)) for name in _PARTS[kind]]
    if issubclass(kind, _MAPPINGS):
        held = own(value).get("data") if issubclass(kind, UserDict) else value
        pairs = list(islice(dict.items(held), most)) if issubclass(type(held), dict) else []
        steps = zip(repeat("[]"), [key for key, _ in pairs])
        held = [item for _, item in pairs]
    else:
        base: Any = next((base for base in _SEQUENCES if issubclass(kind, base)), None)
        held = [] if base is None else list(islice(base.__iter__(value), most))
        names = getattr(kind, "_fields", None)
        steps = zip(repeat("."), names) if names else zip(repeat("[]"), count())
    # `map` checks a list of a million numbers at C speed.
    return [] if set(map(type, held)) <= PLAIN else list(zip(steps, held, strict=False))


def contents(value: Any) -> list[tuple[Any, Any]]:
    """Return the first 2000 ``(key or index, item)`` pairs; empty if all are of `PLAIN` types."""
    if not issubclass(type(value), (list, tuple, deque, dict, UserDict)):
        return []
    found = enumerate(items(value, 2000))
    return [(n if kind == "." else key, item) for n, ((kind, key), item) in found]


def attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, from its `__dict__` and its `__slots__`."""
    held = dict(own(value))
    for slot in slots_of(type(value)):
        with suppress(AttributeError):  # the slot has no value
            held[slot.__name__] = slot.__get__(value)
    return held


def slots_of(kind: type) -> list[types.MemberDescriptorType]:
    """Return the `__slots__` of a class and its bases."""
    held = [members_of(base) for base in bases_of(kind)]
    members = [slot for names in held if "__slots__" in names for slot in names.values()]
    return [slot for slot in members if type(slot) is types.MemberDescriptorType]


def is_open(kind: type) -> bool:
    """Whether the attributes of a class's objects are searched."""
    if issubclass(kind, types.SimpleNamespace):
        return True
    # Look at the bases too, because a class made by a call of `ABCMeta` has the module `abc`.
    homes = [str(defined_in(base)).partition(".")[0] for base in bases_of(kind)]
    home = next((name for name in homes if name not in sys.stdlib_module_names), homes[0])
    return home not in _CLOSED and bool(kind.__dictoffset__ or slots_of(kind))


def walk(
    values: Iterable[tuple[Path, Any]],
    into: Callable[[Any], Iterable[tuple[Step, Any]]],
    *,
    most: int = sys.maxsize,
    depth: int = sys.maxsize,
) -> Iterator[tuple[Path, Any]]:
    """Yield each reachable value and its path once, breadth first; `into` finds a value's parts."""
    seen: dict[int, Any] = {}  # keeps visited values alive, so that their ids stay unique
    todo = deque(values)
    while todo and len(seen) < most:
        path, value = todo.popleft()
        if id(value) in seen or type(value) in PLAIN:
            continue
        seen[id(value)] = value
        yield path, value
        if len(path) <= depth:
            todo.extend(((*path, step), item) for step, item in into(value))


def parts_of(value: Any) -> list[tuple[Step, Any]]:
    """Return a value's items if it is a container, and its attributes if its class `is_open`."""
    kind = type(value)
    found = items(value) if issubclass(kind, CONTAINERS) else []
    if not issubclass(kind, type) and is_open(kind):
        found += [((".", name), item) for name, item in attributes(value).items()]
    return found


def of_function(function: Any, name: str) -> Any:
    """Return a C or Python function's `__name__` or `__module__`; None for any other value."""
    if type(function) is MethodType:
        function = function.__func__
    if not isinstance(function, (types.BuiltinFunctionType, FunctionType)):
        return None
    found = getattr(function, name, None)
    owner = getattr(function, "__self__", None)  # torch's C functions have no module
    return "torch" if found is None and "torch" in str(type(owner)) else found


_INNER = {  # attributes through which an object refers to functions
    FunctionType: ("__wrapped__",),
    type(functools.lru_cache(str)): ("__wrapped__",),
    MethodType: ("__func__", "__self__"),
    functools.partial: ("func", "args", "keywords"),
    functools.cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget", "fset"),
}
_FEW = 1000  # larger containers are not searched


def functions_in(value: Any, module: str) -> list[FunctionType]:
    """Search a value, its items, attributes and class for functions that `module` defines."""

    def into(value: Any) -> list[tuple[Step, Any]]:
        kind = type(value)
        if kind in _INNER:
            return [((".", ""), getattr(value, name, None)) for name in _INNER[kind]]
        if kind in (list, tuple, dict):
            return items(value) if len(value) <= _FEW else []
        held: list[Any] = []
        if issubclass(kind, type):
            spaces = [members_of(base) for base in bases_of(value) if defined_in(base) == module]
        else:
            held = [*map(type, value.modules())] if is_module(value) else [kind]
            spaces = [own(value)]
        held += [each for space in spaces for each in space.values() if type(each) in _INNER]
        return [((".", ""), each) for each in held]

    try:
        found = [each for _, each in walk([((), value)], into, most=2 * _FEW)]
    except Exception:  # noqa: BLE001  raised by a torch module before its `__init__`
        return []
    return [each for each in found if type(each) is FunctionType and each.__module__ == module]


def values_held(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's closure variables and default arguments."""
    code, defaults = function.__code__, function.__defaults__ or ()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the variable has no value yet
            yield name, cell.cell_contents
    yield from zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults, strict=False)
    yield from (function.__kwdefaults__ or {}).items()


def saved_by(node: Any) -> Iterator[tuple[str, Any]]:
    """Yield an autograd node's attributes, such as ``"._saved_self"``, and their saved tensors."""
    names = (name for base in bases_of(type(node)) for name in members_of(base))
    for name in [name for name in names if name.startswith("_raw_saved_")]:
        with suppress(RuntimeError):  # a backward pass has freed the tensor
            raw = getattr(node, name)
            several = type(raw) in (tuple, list)
            for n, part in enumerate(raw if several else [raw]):
                # In older versions of torch, a saved tensor has no `data`, so it is skipped.
                if (data := getattr(part, "data", None)) is not None:
                    yield f".{name.replace('raw_', '', 1)}" + f"[{n}]" * several, data


def globals_of(code: CodeType) -> list[str]:
    """Return the global names that a code object and its nested code objects read."""
    loads = ("LOAD_GLOBAL", "LOAD_NAME")
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in loads}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= dict.fromkeys(globals_of(constant))
    return list(names)
