"""Describe a value as an operand, and read an expression as one: where it is, or must have been.

A name, an attribute, an item is read. The result of a call or an operator has gone; but since it
was made without an error, it was where its own operands are. Anything else is unknown.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import MISSING, Step, contents, of_function, own, parts_of, walk

_DEEP, _MOST = 5, 500  # levels of an object that are searched, and objects in all


def words(text: str) -> frozenset[str]:
    """Return a set of words."""
    return frozenset(text.split())


FACTORIES = words(
    "arange as_tensor empty eye full linspace logspace ones rand randint randn randperm tensor "
    "zeros hann_window hamming_window tril_indices triu_indices"
)
# Methods and attributes of a tensor that are no tensor: they meet no other tensor's device.
_NO_TENSOR = words(
    "item tolist numpy size dim numel shape stride device dtype ndim is_cuda requires_grad backward"
)
_PART_OF = words("T mT H mH real imag data grad values indices")
_WITH_METHODS = ("tensor", "made", "module", "generator", "unknown")
NAMED = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that read a value and make none."""


def device_of(value: Any) -> torch.device | None:
    """Return the device that a variable names, as a `torch.device`, in words or by its number."""
    if type(value) is torch.device:
        return value
    try:
        return torch.device(value) if type(value) in (str, int) else None
    except (RuntimeError, TypeError):
        return None


def full(device: torch.device) -> str:
    """``"cuda:0"``: with the number of the current device if it has none."""
    if str(device) == "cuda":
        return f"cuda:{torch.cuda.current_device()}"
    return device.type if device.type == "cpu" else str(device)


@lru_cache(maxsize=1000)
def canonical(text: str) -> str:
    """Return an expression in one spelling, however it was written."""
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError):
        return text


@dataclass(frozen=True)
class Part:
    """One operand."""

    node: ast.expr
    text: str  # as in the user's code
    kind: str  # tensor, module, generator, group, object (of tensors), made (it has gone), unknown
    devices: tuple[str, ...] = ()  # most bytes first; empty if unknown
    nbytes: int | None = None
    about: str = ""
    scalar: bool = False  # of no dimensions on the CPU, so that it may meet any device
    factory: bool = False  # made by a call that takes `device=`
    items: tuple["Part", ...] = ()
    value: Any = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> str | None:
        """Return its device; None if it has several, or none is known."""
        return self.devices[0] if len(self.devices) == 1 else None

    @property
    def key(self) -> str:
        """Return its text in one spelling."""
        return canonical(self.text)


def flat(parts: Iterable[Part]) -> list[Part]:
    """Return parts with groups taken apart."""
    return [x for p in parts for x in (flat(p.items) if p.kind == "group" and p.items else [p])]


def _group(node: ast.expr, text: str, items: Iterable[Part | None], value: Any) -> Part | None:
    """Return operands of one container; None if there are none."""
    found = tuple(item for item in items if item is not None)
    leaves = flat(found)
    devices = tuple(dict.fromkeys(d for part in leaves for d in part.devices))
    made = Part(node, text, "group", devices, items=found, value=value)
    if value is not None:
        about = f"{type(value).__name__} of {_tensors(len(leaves))}"
        made = replace(made, nbytes=sum(part.nbytes or 0 for part in leaves), about=about)
    return made if found else None


def _tensors(count: int) -> str:
    return f"{count} tensor{'s' * (count != 1)}"


# -- values
def describe(value: Any, node: ast.expr, text: str) -> Part | None:
    """Return a value as an operand; None if it holds no tensor."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return _tensor(value, node, text)
    if issubclass(kind, nn.Module):
        return _of_tensors(value, [t for _, t in tensors_of(value)], "module", node, text)
    if issubclass(kind, torch.Generator):
        where = full(value.device)
        return Part(node, text, "generator", (where,), about="generator", value=value)
    if issubclass(kind, Distribution):
        return _distribution(value, node, text)
    return _container(value, node, text) or _object(value, node, text)


def _tensor(value: Tensor, node: ast.expr, text: str) -> Part:
    where, dtype = full(value.device), str(value.dtype).removeprefix("torch.")
    about = f"{dtype}[{', '.join(str(int(n)) for n in value.shape)}]"
    scalar, nbytes = not value.dim() and where == "cpu", bytes_of(value)
    return Part(node, text, "tensor", (where,), nbytes, about, scalar, value=value)


def _container(value: Any, node: ast.expr, text: str) -> Part | None:
    items = []
    for key, held in contents(value):
        if type(key) in (int, str) and issubclass(type(held), (Tensor, dict, list, tuple)):
            name = f"{text}[{key!r}]" if type(key) is int else f'{text}["{key}"]'
            items.append(describe(held, node, name))
    return _group(node, text, items, value)


def _distribution(value: Distribution, node: ast.expr, text: str) -> Part:
    """Return its parameters, which its methods combine, as operands of their own."""
    items = []
    kinds = (Tensor, Distribution)
    held = {name: each for name, each in own(value).items() if issubclass(type(each), kinds)}
    # If tensors were computed from them, replacing a parameter is not enough.
    derived = any(n.startswith("_") and issubclass(type(t), Tensor) for n, t in held.items())
    for name, each in held.items():
        inner = ast.Attribute(node, name, ast.Load())
        part = None if name.startswith("_") else describe(each, inner, f"{text}.{name}")
        if part is not None:
            items.append(replace(part, kind="made", value=None) if derived else part)
    return _group(node, text, items, value) or Part(node, text, "group", value=value)


def bytes_of(tensor: Tensor) -> int | None:
    """Return its bytes; None if unknown."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a module's parameters, buffers, and tensors in plain attributes, with their paths.

    Each once; calls no method of the module.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    queue, seen = [("", module)], {id(module)}
    for path, current in queue:
        held = own(current)
        for names in (held.get("_parameters", {}), held.get("_buffers", {}), held):
            for name, tensor in names.items():
                if issubclass(type(tensor), Tensor):
                    found.setdefault(id(tensor), (path + name, tensor))
        children = held.get("_modules", {}).items()
        new = [(f"{path}{n}.", c) for n, c in children if c is not None and id(c) not in seen]
        seen |= {id(child) for _, child in new}
        queue += new
    return list(found.values())


def _object(value: Any, node: ast.expr, text: str) -> Part | None:
    of_torch = str(vars(type(value)).get("__module__")).startswith("torch.")
    tensors = {} if of_torch else {id(t): t for _, t in held_by(value)}
    return _of_tensors(value, [*tensors.values()], "object", node, text) if tensors else None


def held_by(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in an object's attributes and containers, with their own names.

    Calls no method of the object.
    """

    def into(item: Any) -> list[tuple[Step, Any]]:
        return [] if issubclass(type(item), (Tensor, nn.Module)) else parts_of(item)

    walked = walk([(((".", ""),), value)], into, most=_MOST, depth=_DEEP)
    return [(str(path[-1][-1]), item) for path, item in walked if issubclass(type(item), Tensor)]


def _of_tensors(value: Any, tensors: list[Tensor], kind: str, node: ast.expr, text: str) -> Part:
    weight: dict[str, int] = {}
    for tensor in tensors:
        where = full(tensor.device)
        weight[where] = weight.get(where, 0) + (bytes_of(tensor) or 0)
    devices = tuple(sorted(weight, key=lambda d: -weight[d]))
    about = f"{type(value).__name__}, {_tensors(len(tensors))}"
    return Part(node, text, kind, devices, sum(weight.values()), about=about, value=value)


# -- expressions
class Reader:
    """Reads the expressions of a frame as operands."""

    def __init__(self, frame: FailedFrame, moved: Mapping[str, str | None] | None = None) -> None:
        self.scope, self.text = frame.scope, frame.text
        # Expressions taken to be elsewhere than they are: their device, or None for unknown.
        self.moved = moved if moved is not None else {}

    def part(self, node: ast.expr) -> Part | None:
        """Return an expression as an operand; None if it is no tensor, module or the like."""
        while isinstance(node, (ast.Starred, ast.NamedExpr, ast.Await)):
            node = node.value
        text = self.text(node)
        if self.moved and canonical(text) in self.moved:
            return _made(node, text, self.moved[canonical(text)])
        if isinstance(node, (ast.Constant, ast.Lambda, ast.JoinedStr)):
            return None
        if isinstance(node, NAMED):
            value = self.scope.value(node)
            return self._unread(node, text) if value is MISSING else describe(value, node, text)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
            elements = node.values if isinstance(node, ast.Dict) else node.elts
            return _group(node, text, [self.part(each) for each in elements if each], None)
        if isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp)):
            operands = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
            return self._together(node, text, operands)
        if isinstance(node, ast.IfExp):
            return self._together(node, text, [node.body, node.orelse])
        return self._call(node, text) if isinstance(node, ast.Call) else _made(node, text, None)

    def _unread(self, node: ast.expr, text: str) -> Part | None:
        if isinstance(node, ast.Name):
            return _made(node, text, None)
        if isinstance(node, ast.Attribute) and node.attr in _NO_TENSOR:
            return None
        inner = self.part(node.value)  # type: ignore[attr-defined]
        if inner is not None and isinstance(node, ast.Attribute):
            if inner.kind == "object" and node.attr in (name for name, _ in held_by(inner.value)):
                return inner
            if node.attr not in _PART_OF:
                return _made(node, text, None)
        known = inner is not None and inner.kind in ("tensor", "made", "group")
        return _made(node, text, inner.device if inner and known else None)

    def _together(self, node: ast.expr, text: str, operands: list[ast.expr]) -> Part | None:
        """Return the result of operands that agreed: it is where any one of them is known to be."""
        parts = [part for operand in operands if (part := self.part(operand)) is not None]
        if not parts:
            return None
        adds = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
        if adds and all(part.kind == "group" for part in parts):
            return _group(node, text, parts, None)  # one list from two
        loose = [part for part in flat(parts) if not part.scalar]
        if not loose:
            return Part(node, text, "made", ("cpu",), scalar=True)
        known = dict.fromkeys(part.device for part in loose if part.device)
        forgot = all(part.factory for part in loose)
        if len(known) == 1 or (forgot and not known):
            return Part(node, text, "made", tuple(d for d in known if d), factory=forgot)
        return _made(node, text, None)

    # -- calls
    def _call(self, node: ast.Call, text: str) -> Part | None:
        function = self.scope.value(node.func)
        if isinstance(node.func, ast.Attribute):
            owner = self.part(node.func.value)
            if owner is not None and owner.kind in _WITH_METHODS:
                result: Part | None = self._method(owner, node, node.func.attr, text)
                if result is not MISSING:
                    return result
        if is_torch(function):
            return self._torch_call(node, function, text)
        if issubclass(type(function), type):
            return self._made_by_class(node, function, text)
        called = self.part(node.func)
        if called is None or called.kind != "module" or called.value is None:
            return _made(node, text, None)
        if not called.devices:  # without weights: its result is where its arguments are
            return self._together(node, text, arguments(node))
        return _made(node, text, called.device)

    def _made_by_class(self, node: ast.Call, kind: type, text: str) -> Part:
        if issubclass(kind, nn.Module):
            return Part(node, text, "module", (), about=kind.__name__)
        if issubclass(kind, torch.Generator):
            given = self.device(_argument(node, "device", 0), "cpu")
            return Part(node, text, "generator", (given,) if given else (), about="generator")
        return _made(node, text, None)

    def _method(self, owner: Part, node: ast.Call, name: str, text: str) -> Any:
        """Return the result of a method; `MISSING` if it may be anything."""
        if name in ("to", "cuda", "cpu"):
            return self._moved(owner, node, name, text)
        if owner.kind == "generator":
            return replace(owner, node=node, text=text, value=None)
        if owner.kind == "module":
            return owner if name in ("eval", "train", "half", "float") else MISSING
        if owner.kind == "unknown":
            return MISSING
        if name in _NO_TENSOR:
            return None
        if name.startswith("new_"):
            target = self.device(_argument(node, "device", None), owner.device or "")
            return Part(node, text, "made", (target,) if target else (), factory=True)
        return Part(node, text, "made", owner.devices, scalar=owner.scalar)

    def _moved(self, owner: Part, node: ast.Call, name: str, text: str) -> Part:
        without = {"cpu": "cpu", "cuda": full(torch.device("cuda"))}.get(name, "")
        given = None if name == "cpu" else _argument(node, "device", 0)
        target = self.device(given, without)
        devices = owner.devices if target == "" else (target,) if target else ()
        if owner.kind == "module":
            return replace(owner, node=node, text=text, devices=devices)
        return Part(node, text, "made", devices)

    def only_transfers(self, node: ast.Call) -> bool:
        """Return whether a method's call brings a tensor to a device and does nothing else."""
        name, given = getattr(node.func, "attr", ""), arguments(node)
        if name not in ("to", "cuda", "cpu") or len(given) > 1:
            return False
        a_tensor = any(issubclass(type(self.scope.value(argument)), Tensor) for argument in given)
        return not a_tensor and all(self.device(argument, "") for argument in given)

    def device(self, node: ast.expr | None, without: str) -> str | None:
        """Return the device that an argument names, `without` if there is none, None if unknown."""
        if node is None:
            return without
        value = self.scope.value(node)
        if issubclass(type(value), torch.dtype):
            return without
        if issubclass(type(value), Tensor):
            return full(value.device)
        if isinstance(node, ast.Attribute) and node.attr == "device":
            part = self.part(node.value)
            return part.device if part else None
        device = device_of(value)
        return full(device) if device is not None else None

    def _torch_call(self, node: ast.Call, function: Any, text: str) -> Part | None:
        name = str(of_function(function, "__name__"))
        if name == "device":
            return None
        given = _argument(node, "device", None)
        factory = name in FACTORIES or name == "from_numpy"
        if factory or (name.endswith("_like") and given is not None):
            device = self.device(given, "cpu" if name == "from_numpy" else "")
            forgot = name in FACTORIES and given is None
            return Part(node, text, "made", (device,) if device else (), factory=forgot)
        return self._together(node, text, arguments(node)) or _made(node, text, None)


def _made(node: ast.expr, text: str, device: str | None) -> Part:
    """Return a result that has gone; of kind unknown if its device is."""
    return Part(node, text, "made", (device,)) if device else Part(node, text, "unknown")


def arguments(node: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, keywords and unpacked ones included."""
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _argument(node: ast.Call, name: str, at: int | None) -> ast.expr | None:
    for keyword in node.keywords:
        if keyword.arg == name:
            return keyword.value
    return node.args[at] if at is not None and len(node.args) > at else None


def is_torch(function: Any) -> bool:
    """Return whether a function is torch's own."""
    module = of_function(function, "__module__")
    return isinstance(module, str) and module.split(".")[0] in ("torch", "torchvision")
