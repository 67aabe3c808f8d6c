"""Describe a value as an operand: where it is, how large, what it holds, its device in full."""

import ast
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from gpumagic.usercode.values import contents, own
from gpumagic.usercode.walk import Step, parts_of, walk


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


_DEEP, _MOST = 5, 500  # an object's store, its layers, a layer, its tensors; of so many things


@lru_cache(maxsize=1000)
def canonical(text: str) -> str:
    """An expression in one spelling, however it was written."""
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
    devices: tuple[str, ...] = ()  # most bytes first; none where not known
    nbytes: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    about: str = ""
    scalar: bool = False  # of no dimensions on the CPU, so that it may meet any device
    factory: bool = False  # made by a call that takes `device=`
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
    if issubclass(kind, Distribution):
        return _distribution(value, node, text)
    return _container(value, node, text) or _object(value, node, text)


def _tensor(value: Tensor, node: ast.expr, text: str) -> Part:
    where, dtype = full(value.device), str(value.dtype).removeprefix("torch.")
    shape = tuple(int(n) for n in value.shape)
    about = f"{dtype}[{', '.join(map(str, shape))}]"
    if torch._C._functorch.is_batchedtensor(value):
        about += ", one of a batch by vmap"
    scalar, nbytes = not shape and where == "cpu", bytes_of(value)
    return Part(node, text, "tensor", (where,), nbytes, dtype, shape, about, scalar, value=value)


def _container(value: Any, node: ast.expr, text: str) -> Part | None:
    items = []
    for key, held in contents(value):
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


def bytes_of(tensor: Tensor) -> int | None:
    """Its bytes, if it has any to be known."""
    try:
        return tensor.numel() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers, and tensors that it keeps as plain attributes.

    Each once, by its path; asks no module for them.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    queue, seen = [("", module)], {id(module)}
    while queue:
        path, current = queue.pop(0)
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
    """The tensors in an object's attributes and containers, by their own names; asks nothing."""

    def into(item: Any) -> list[tuple[Step, Any]]:
        return [] if issubclass(type(item), (Tensor, nn.Module)) else parts_of(item)

    walked = walk([(((".", ""),), value)], into, most=_MOST, depth=_DEEP)
    return [(str(path[-1][-1]), item) for path, item in walked if issubclass(type(item), Tensor)]


def _module(module: nn.Module, node: ast.expr, text: str) -> Part:
    return _of_tensors(module, [t for _, t in tensors_of(module)], "module", node, text)


def _of_tensors(value: Any, tensors: list[Tensor], kind: str, node: ast.expr, text: str) -> Part:
    weight: dict[str, int] = {}
    for tensor in tensors:
        where = full(tensor.device)
        weight[where] = weight.get(where, 0) + (bytes_of(tensor) or 0)
    devices = tuple(sorted(weight, key=lambda d: -weight[d]))
    count = len(tensors)
    about = f"{type(value).__name__}, {count} tensor{'s' * (count != 1)}"
    nbytes = sum(weight.values())
    return Part(node, text, kind, devices, nbytes, about=about, value=value)
