"""Describe values and expressions as operands, with their devices.

Names, attributes and items are read from the frame. A container is described by its items. The
result of a call or an operator no longer exists, so its device is derived from the operands. If all
operands were on one device, the result was there too. Otherwise, the device is unknown.
"""

import ast
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from gpumagic.usercode import values
from gpumagic.usercode.files import is_users
from gpumagic.usercode.frames import FailedFrame

_DEEP, _MOST = 5, 500  # maximum depth and number of objects of a search for tensors
_STATE = ("_parameters", "_buffers", "_modules")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FACTORIES = words(
    "arange as_tensor empty eye full linspace logspace ones rand randint randn randperm tensor "
    "zeros hann_window hamming_window tril_indices triu_indices"
)
TRANSFERS = words("to cuda cpu")
# Methods and attributes of a tensor that do not return a tensor.
_NO_TENSOR = words(
    "item tolist numpy size dim numel shape stride device dtype ndim is_cuda requires_grad backward"
)
_PASSING = map, list, tuple, sorted, reversed, torch.autograd.Variable  # they pass arguments on
_DEVICE = type(torch.get_default_device())  # the original class, as `torch.device` may be patched
_PART_OF = words("T mT H mH real imag data grad values indices")  # on the same device as the tensor
NAMED = (ast.Name, ast.Attribute, ast.Subscript)  # expressions that read an existing value


def device_of(value: Any) -> torch.device | None:
    """Return the device that a `torch.device`, a string or a number names; else None."""
    if type(value) is _DEVICE:
        return value
    try:
        return torch.device(value) if type(value) in (str, int) else None
    except (RuntimeError, TypeError):
        return None


def full(device: torch.device) -> str:
    """Return a device's full name: ``"cuda"`` becomes the current device, such as ``"cuda:0"``."""
    if str(device) == "cuda":
        return f"cuda:{torch.cuda.current_device()}"
    return device.type if device.type == "cpu" else str(device)


@lru_cache(maxsize=1000)
def canonical(text: str) -> str:
    """Return an expression as `ast.unparse` writes it, so that texts can be compared."""
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError):
        return text


@dataclass(frozen=True)
class Part:
    """One operand, or one item of an operand that is a container."""

    node: ast.expr  # the operand's expression; for an item, the container's expression
    text: str  # as in the user's code
    # tensor, array, module, generator, object (with tensors), group (several tensors), made (the
    # result of a call or operator, now gone), or unknown (a value whose device is not known)
    kind: str
    devices: tuple[str, ...] = ()  # most bytes first, if a module is on several; empty if unknown
    nbytes: int | None = None
    about: str = ""  # a description: "float32[3, 2]"
    scalar: bool = False  # whether this is a 0-dim CPU tensor, which may be mixed with GPU tensors
    factory: bool = False  # made by a call without a `device` argument, such as `torch.zeros(3)`
    value: Any = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> str | None:
        """Return the operand's device; None if there are several or none is known."""
        return self.devices[0] if len(self.devices) == 1 else None

    @property
    def key(self) -> str:
        """Return the operand's text as `ast.unparse` writes it."""
        return canonical(self.text)

    def to_move(self, target: str) -> int | None:
        """Return the bytes that a move to `target` copies; None if unknown."""
        if self.kind != "module" or self.value is None:
            return 0 if self.factory else self.nbytes
        away = [tensor for _, tensor in tensors_of(self.value) if full(tensor.device) != target]
        return sum(bytes_of(tensor) or 0 for tensor in away)


def describe(value: Any, node: ast.expr, text: str) -> list[Part]:
    """Return a value as operands: one for a tensor or module, one for each item of a container."""
    kind = type(value)
    if issubclass(kind, Tensor):
        where, dtype = full(value.device), str(value.dtype).removeprefix("torch.")
        about = f"{dtype}[{', '.join(str(int(n)) for n in value.shape)}]"
        scalar = not value.dim() and where == "cpu"
        return [Part(node, text, "tensor", (where,), bytes_of(value), about, scalar, value=value)]
    if issubclass(kind, torch._C.Generator):  # virtual GPUs patch `torch.Generator`
        where = full(value.device)
        return [Part(node, text, "generator", (where,), about="generator", value=value)]
    if values.comes_from(kind, "numpy.ndarray", "pandas.Series"):
        about = f"{value.dtype}[{', '.join(map(str, value.shape))}]"
        return [Part(node, text, "array", ("cpu",), value.nbytes, about)]
    a_module, tensors = issubclass(kind, nn.Module), [t for _, t in tensors_of(value)]
    items = _items(value, node, text)
    of_torch = str(vars(kind).get("__module__")).startswith("torch.")
    if items or not (a_module or (tensors and not of_torch)):
        return items
    weight: dict[str, int] = {}
    for tensor in tensors:
        where = full(tensor.device)
        weight[where] = weight.get(where, 0) + (bytes_of(tensor) or 0)
    about = f"{kind.__name__}, {len(tensors)} tensor{'s' * (len(tensors) != 1)}"
    devices, total = tuple(sorted(weight, key=lambda d: -weight[d])), sum(weight.values())
    what = "module" if a_module else "object"
    return [Part(node, text, what, devices, total, about, value=value)]


def _items(value: Any, node: ast.expr, text: str) -> list[Part]:
    """Return the items of a container, or the parameters of a distribution."""
    if issubclass(type(value), Distribution):
        own = values.own(value)
        held = {name: v for name, v in own.items() if issubclass(type(v), (Tensor, Distribution))}
        parts = [
            part
            for name, each in held.items()
            for part in describe(each, ast.Attribute(node, name, ast.Load()), f"{text}.{name}")
        ]
        # Private tensors were computed from the parameters, so moving a parameter is not enough.
        private = any(name.startswith("_") for name in held)
        return [replace(part, kind="made", value=None) for part in parts] if private else parts
    parts = []
    for key, each in values.contents(value):
        if type(key) in (int, str) and issubclass(type(each), (Tensor, dict, list, tuple)):
            name = f"{text}[{key!r}]" if type(key) is int else f'{text}["{key}"]'
            parts += describe(each, node, name)
    return parts


def bytes_of(tensor: Tensor) -> int | None:
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


def tensors_of(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a module, or in an object's attributes and containers, with paths."""
    # A module's tensors are parameters, buffers and plain tensor attributes. No method is called.
    a_module = issubclass(type(value), nn.Module)

    def into(item: Any) -> list[tuple[values.Step, Any]]:
        held = values.own(item)
        if issubclass(type(item), nn.Module) and a_module:
            plain = {name: v for name, v in held.items() if issubclass(type(v), Tensor)}
            groups = [*(held.get(name, {}) for name in _STATE), plain]
            return [((".", name), v) for group in groups for name, v in group.items()]
        return [] if issubclass(type(item), (Tensor, nn.Module)) else values.parts_of(item)

    limits = {} if a_module else {"most": _MOST, "depth": _DEEP}
    walked = values.walk([(((".", ""),), value)], into, **limits)
    found = [(path, item) for path, item in walked if issubclass(type(item), Tensor)]
    names = ((values.key_text(key).strip("'") for _, key in path[1:]) for path, _ in found)
    return [(".".join(each), tensor) for each, (_, tensor) in zip(names, found, strict=True)]


class Reader:
    """Describe the expressions of a frame as operands."""

    def __init__(self, frame: FailedFrame, moved: Mapping[str, str | None] | None = None) -> None:
        self.frame, self.scope, self.text = frame, frame.scope, frame.text
        self.moved = {} if moved is None else moved  # devices after a fix, by expression

    def part(self, node: ast.expr) -> Part | None:
        """Return an expression, even of a container, as one operand; None if it has no tensors."""
        parts = self.parts(node)
        if len(parts) < 2:
            return parts[0] if parts else None
        devices = {part.device for part in parts}
        return _made(node, self.text(node), devices.pop() if len(devices) == 1 else None)

    def parts(self, node: ast.expr) -> list[Part]:
        """Return the operands of an expression: one, or the items of a container."""
        while isinstance(node, (ast.Starred, ast.NamedExpr, ast.Await)):
            node = node.value
        text = self.text(node)
        if self.moved and canonical(text) in self.moved:
            return [_made(node, text, self.moved[canonical(text)])]
        if isinstance(node, NAMED):
            if (value := self.scope.value(node)) is values.MISSING:
                return self._unread(node, text)
            return describe(value, node, text)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
            return self._inner(node)
        if isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp, ast.IfExp)):
            inner = self._inner(node)
            # If `a` and `b` are lists, the operands of `a + b` are the items.
            one_list = any(part.text != self.text(part.node) for part in inner)
            return inner if one_list else self._together(node, text, inner)
        if isinstance(node, ast.Call):
            return self._call(node, text)
        nothing = isinstance(node, (ast.Constant, ast.Lambda, ast.JoinedStr))
        return [] if nothing else [_made(node, text, None)]

    def _inner(self, node: ast.expr) -> list[Part]:
        inner = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
        return [part for each in inner for part in self.parts(each)]

    def _unread(self, node: Any, text: str) -> list[Part]:
        """Return the operand of a name, attribute or item whose value could not be read."""
        inner = self.part(node.value) if not isinstance(node, ast.Name) else None
        if inner is None:
            return [_made(node, text, None)]
        if inner.kind == "array":
            return [_array(node, text)]
        if isinstance(node, ast.Attribute):
            if node.attr in _NO_TENSOR:
                return []
            held = tensors_of(inner.value) if inner.kind == "object" else []
            if node.attr in (name.rpartition(".")[2] for name, _ in held):
                return [inner]
        part_of = isinstance(node, ast.Subscript) or getattr(node, "attr", "") in _PART_OF
        if inner.kind in ("tensor", "made") and part_of:
            return [_result_of(inner, node, text)]
        return [_made(node, text, None)]

    def _together(self, node: ast.expr, text: str, parts: list[Part]) -> list[Part]:
        """Return an operation's result, on the operands' device if only one device is known."""
        loose = [part for part in parts if not part.scalar]
        if not loose:
            return [Part(node, text, "made", ("cpu",), scalar=True)] if parts else []
        known = tuple(dict.fromkeys(part.device for part in loose if part.device))
        forgot = all(part.factory for part in loose)
        if len(known) == 1 or (forgot and not known):
            return [Part(node, text, "made", known, factory=forgot)]
        return [_made(node, text, None)]

    def _call(self, node: ast.Call, text: str) -> list[Part]:
        function: Any = self.scope.value(node.func)
        if isinstance(node.func, ast.Attribute):
            if node.func.attr == "values" and type(self.scope.value(node.func.value)) is dict:
                return self.parts(node.func.value)
            owner = self.part(node.func.value)
            result = self._method(owner, node, node.func.attr, text) if owner is not None else None
            if result is not None:
                return result
        of_numpy = str(values.of_function(function, "__module__")).partition(".")[0] == "numpy"
        if of_numpy or is_torch(function):
            name = str(values.of_function(function, "__name__"))
            return [_array(node, text)] if of_numpy else self._torch_call(node, name, text)
        # `len` and `float` return no tensor. `map` is lazy, so its arguments are the operands.
        if any(function is each for each in (*_PASSING, len, *values.PLAIN)):
            return self.given(node) if any(function is each for each in _PASSING) else []
        if function is torch.Generator or issubclass(type(function), type):
            return self._new(function, node, text)
        called = self.part(node.func)
        if called is None or called.kind != "module" or called.value is None:
            return [_made(node, text, None)]
        if not called.devices:  # a module without weights keeps the device of its arguments
            return self._together(node, text, self.given(node))
        return [_made(node, text, called.device)]

    def _new(self, kind: Any, node: ast.Call, text: str) -> list[Part]:
        """Return the object that a call of a class creates, as an operand."""
        if kind is torch.Generator:
            given = self.device(_argument(node, "device", 0), "cpu")
            return [Part(node, text, "generator", (given,) if given else (), about="generator")]
        if issubclass(kind, nn.Module):
            return [Part(node, text, "module", about=kind.__name__)]
        # A library's object that is created without tensors, such as a range, has no tensors.
        home = getattr(sys.modules.get(kind.__module__), "__file__", None)
        own_class = kind.__module__ == "__main__" or is_users(home)
        return [_made(node, text, None)] if own_class or self.given(node) else []

    def given(self, node: ast.Call) -> list[Part]:
        """Return the operands among a call's arguments."""
        return [part for argument in arguments(node) for part in self.parts(argument)]

    def _method(self, owner: Part, node: ast.Call, name: str, text: str) -> list[Part] | None:
        """Return the result of a method as operands; None if the result is unknown."""
        if name in TRANSFERS:
            return [self._transferred(owner, node, name, text)]
        if name == "type_as":
            return [_result_of(part, node, text) for part in self.given(node)]
        if name == "type" and cpu_dtype(node, self.scope):
            return [Part(node, text, "made", ("cpu",), factory=True)]
        if owner.kind == "array" or name == "numpy":
            return [_array(node, text)]
        if owner.kind == "generator":
            return [replace(owner, node=node, text=text, value=None)]
        if owner.kind == "module":
            return [owner] if name in ("eval", "train", "half", "float") else None
        if owner.kind not in ("tensor", "made"):
            return None
        return [] if name in _NO_TENSOR else [_result_of(owner, node, text)]

    def sent_to(self, node: ast.Call, name: str) -> str | None:
        """Return the device that `to`, `cuda` or `cpu` copies to; "" if none, None if unknown."""
        without = full(torch.device(name)) if name != "to" else ""
        return self.device(None if name == "cpu" else _argument(node, "device", 0), without)

    def _transferred(self, owner: Part, node: ast.Call, name: str, text: str) -> Part:
        target = self.sent_to(node, name)
        devices = owner.devices if target == "" else (target,) if target else ()
        if owner.kind == "module":
            return replace(owner, node=node, text=text, devices=devices)
        return Part(node, text, "made" if devices else "unknown", devices)

    def _torch_call(self, node: ast.Call, name: str, text: str) -> list[Part]:
        given = _argument(node, "device")
        if name in FACTORIES or name == "from_numpy" or (name.endswith("_like") and given):
            device = self.device(given, "cpu" if name == "from_numpy" else "")
            forgot = name in FACTORIES and given is None
            return [Part(node, text, "made", (device,) if device else (), factory=forgot)]
        return self._together(node, text, self.given(node)) or [_made(node, text, None)]

    def device(self, node: ast.expr | None, without: str) -> str | None:
        """Return the device that an argument names; `without` if it names none; None if unknown."""
        if node is None:
            return without
        value = self.scope.value(node)
        if issubclass(type(value), torch.dtype):
            return without
        device = value.device if issubclass(type(value), Tensor) else device_of(value)
        return full(device) if device is not None else None


def _result_of(part: Part, node: ast.expr, text: str) -> Part:
    """Return a tensor's item, attribute or method result, which are on the tensor's device."""
    return replace(part, node=node, text=text, kind="made", nbytes=None, about="", value=None)


def _made(node: ast.expr, text: str, device: str | None) -> Part:
    """Return a temporary result on `device`, of kind "unknown" if `device` is None."""
    return Part(node, text, "made", (device,)) if device else Part(node, text, "unknown")


def _array(node: ast.expr, text: str) -> Part:
    return Part(node, text, "array", ("cpu",))


def arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _argument(node: ast.Call, name: str, at: int | None = None) -> ast.expr | None:
    named = {keyword.arg: keyword.value for keyword in node.keywords}
    first = node.args[at] if at is not None and len(node.args) > at else None
    return named.get(name, first)


def cpu_dtype(node: ast.Call, scope: Any) -> torch.dtype | None:
    """Return the dtype of ``x.type(torch.FloatTensor)``, which also moves to the CPU; else None."""
    is_type = ast.unparse(node.func).endswith(".type")
    given = scope.value(node.args[0]) if is_type and node.args else None
    return given.dtype if type(given) is type(torch.FloatTensor) and not given.is_cuda else None


def is_torch(function: Any) -> bool:
    """Whether a function belongs to torch or torchvision."""
    module = values.of_function(function, "__module__")
    return isinstance(module, str) and module.split(".")[0] in ("torch", "torchvision")
