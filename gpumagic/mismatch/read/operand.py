"""One operand of an expression, and a value described as one."""

import ast
from collections import UserDict, deque
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.optim import Optimizer

from gpumagic.usercode.values import full, own

_ITEMS = 2000


@lru_cache(maxsize=1000)
def canonical(text: str) -> str:
    """An expression in one spelling, however it was written."""
    try:
        return ast.unparse(ast.parse(text, mode="eval"))
    except (SyntaxError, ValueError):
        return text


@dataclass(frozen=True)
class Part:
    """One operand.

    Attributes
    ----------
    text : str
        As in the user's code.
    kind : str
        ``"tensor"``, ``"module"``, ``"generator"``, ``"optimizer"``, ``"group"`` (a container of
        tensors), ``"made"`` (a result that has gone) or ``"unknown"``.
    devices : tuple of str
        Most bytes first; empty where unknown.
    scalar : bool
        A tensor of no dimensions on the CPU, which may meet any device.
    factory : bool
        Made by a call that takes `device=`.
    """

    node: ast.expr
    text: str
    kind: str
    devices: tuple[str, ...] = ()
    nbytes: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    about: str = ""
    scalar: bool = False
    factory: bool = False
    items: tuple["Part", ...] = ()
    value: Any = field(default=None, repr=False, compare=False)

    @property
    def device(self) -> str | None:
        return self.devices[0] if len(self.devices) == 1 else None

    @property
    def key(self) -> str:
        return canonical(self.text)


def flat(parts: list[Part] | tuple[Part, ...]) -> list[Part]:
    """Parts with groups taken apart."""
    return [x for p in parts for x in (flat(p.items) if p.kind == "group" and p.items else [p])]


def describe(value: Any, node: ast.expr, text: str) -> Part | None:
    """A value as an operand."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return _tensor(value, node, text)
    if issubclass(kind, nn.Module):
        return _module(value, node, text)
    if issubclass(kind, torch.Generator):
        where = full(value.device)
        return Part(node, text, "generator", (where,), about="generator", value=value)
    if issubclass(kind, Optimizer):
        return Part(node, text, "optimizer", (), about=kind.__name__, value=value)
    if issubclass(kind, Distribution):
        return _distribution(value, node, text)
    if issubclass(kind, (list, tuple, deque)):
        return _container(list(enumerate(kind_items(value))), value, node, text)
    if issubclass(kind, dict):
        return _container(list(dict.items(value)), value, node, text)
    if issubclass(kind, UserDict):
        return _container(list(own(value).get("data", {}).items()), value, node, text)
    return None


def kind_items(value: Any) -> list[Any]:
    """The items of a list, tuple or deque, or of a class made from one."""
    base = next(b for b in (list, tuple, deque) if issubclass(type(value), b))
    return list(base.__iter__(value)) if len(value) <= _ITEMS else []


def _container(pairs: list[tuple[Any, Any]], value: Any, node: ast.expr, text: str) -> Part | None:
    items = []
    for key, held in pairs[:_ITEMS]:
        if type(key) in (int, str) and issubclass(type(held), (Tensor, dict, list, tuple)):
            name = f"{text}[{key!r}]" if type(key) is int else f'{text}["{key}"]'
            part = describe(held, node, name)
            if part is not None:
                items.append(part)
    if not items:
        return None
    leaves = flat(items)
    devices = dict.fromkeys(d for part in leaves for d in part.devices)
    count = len(leaves)
    return Part(
        node,
        text,
        "group",
        tuple(devices),
        sum(part.nbytes or 0 for part in leaves),
        about=f"{type(value).__name__} of {count} tensor{'s' * (count > 1)}",
        items=tuple(items),
        value=value,
    )


def _distribution(value: Distribution, node: ast.expr, text: str) -> Part | None:
    """Its parameters, which its methods bring together, as operands of their own."""
    items = []
    derived = any(
        name.startswith("_") and issubclass(type(t), Tensor) for name, t in own(value).items()
    )
    for name, held in own(value).items():
        if issubclass(type(held), (Tensor, Distribution)) and not name.startswith("_"):
            inner = ast.Attribute(node, name, ast.Load())
            part = describe(held, inner, f"{text}.{name}")
            if part is not None:
                # With others computed from it, to replace it would not do.
                items.append(replace(part, kind="made", value=None) if derived else part)
    devices = dict.fromkeys(d for part in items for d in part.devices)
    return Part(node, text, "group", tuple(devices), items=tuple(items), value=value)


def _tensor(tensor: Tensor, node: ast.expr, text: str) -> Part:
    device = full(tensor.device)
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(int(n) for n in tensor.shape)
    return Part(
        node,
        text,
        "tensor",
        (device,),
        bytes_of(tensor),
        dtype,
        shape,
        described(dtype, shape) + ", one of a batch by vmap" * _is_batched(tensor),
        scalar=not shape and device == "cpu",
        value=tensor,
    )


def described(dtype: str, shape: tuple[int, ...]) -> str:
    """``"float32[3, 2]"``."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


def bytes_of(tensor: Tensor) -> int | None:
    """Its bytes; of one slice under vmap, those of the whole batch, which is what would move."""
    try:
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


def _is_batched(tensor: Tensor) -> bool:
    return bool(torch._C._functorch.is_batchedtensor(tensor))


def modules_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """A module and those within it, each once, by their paths; asks none of them."""
    found: dict[int, tuple[str, nn.Module]] = {}
    queue: list[tuple[str, nn.Module]] = [("", module)]
    while queue:
        path, current = queue.pop(0)
        if id(current) not in found:
            found[id(current)] = (path, current)
            for name, child in own(current).get("_modules", {}).items():
                if child is not None:
                    queue.append((f"{path}.{name}" if path else name, child))
    return list(found.values())


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers, and tensors that it keeps as plain attributes."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, child in modules_of(module):
        held = own(child)
        for names in (held.get("_parameters", {}), held.get("_buffers", {}), held):
            for name, tensor in names.items():
                if issubclass(type(tensor), Tensor):
                    found.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
    return list(found.values())


def _module(module: nn.Module, node: ast.expr, text: str) -> Part:
    tensors = [t for _, t in tensors_of(module)]
    weight: dict[str, int] = {}
    for tensor in tensors:
        where = full(tensor.device)
        weight[where] = weight.get(where, 0) + (bytes_of(tensor) or 0)
    devices = tuple(sorted(weight, key=lambda d: -weight[d]))
    count = len(tensors)
    about = f"{type(module).__name__}, {count} tensor{'s' * (count != 1)}"
    nbytes = sum(weight.values())
    return Part(node, text, "module", devices, nbytes, about=about, value=module)
