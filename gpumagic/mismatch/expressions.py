"""Read what an expression stands for, and on which device it is or must have been.

A name, an attribute, an item is read. What a call or an operator made has gone; but since it was
made without an error, it is where its own operands are. What neither way tells is unknown.
"""

import ast
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.mismatch.operand import Part, canonical, describe, device_of, flat, full, held_by
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import MISSING, of_function


def words(text: str) -> frozenset[str]:
    """A set of words."""
    return frozenset(text.split())


FACTORIES = words(
    "arange as_tensor empty eye full linspace logspace ones rand randint randn randperm tensor "
    "zeros hann_window hamming_window tril_indices triu_indices"
)
# Methods and attributes of a tensor that are no tensor: they meet no other tensor's device.
_NO_TENSOR = words(
    "item tolist numpy size dim numel nelement stride shape device dtype ndim data_ptr is_cuda "
    "element_size get_device is_contiguous requires_grad backward type layout nbytes "
    "itemsize __len__"
)
_PART_OF = words("T mT H mH real imag data grad values indices")
_WITH_METHODS = ("tensor", "made", "module", "generator", "unknown")
_NO_OPERANDS = words("len int float bool str repr range print isinstance type id hash format round")


class Reader:
    """Turns the expressions of a frame into parts."""

    def __init__(self, frame: FailedFrame, moved: Mapping[str, str | None] | None = None) -> None:
        self.scope, self.text = frame.scope, frame.text
        # Expressions taken to be elsewhere than they are: their device, or None for unknown.
        self.moved = moved if moved is not None else {}

    def part(self, node: ast.expr) -> Part | None:
        """A node as an operand; None where it is no tensor, module or the like."""
        while isinstance(node, (ast.Starred, ast.NamedExpr, ast.Await)):
            node = node.value
        text = self.text(node)
        if self.moved and canonical(text) in self.moved:
            device = self.moved[canonical(text)]
            return Part(node, text, "made" if device else "unknown", (device,) if device else ())
        if isinstance(node, (ast.Constant, ast.Lambda, ast.JoinedStr)):
            return None
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            value = self.scope.value(node)
            return self._unread(node, text) if value is MISSING else describe(value, node, text)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
            elements = node.values if isinstance(node, ast.Dict) else node.elts
            return self._group(node, text, elements)
        if isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp)):
            operands = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
            return self._together(node, text, operands)
        if isinstance(node, ast.IfExp):
            return self._together(node, text, [node.body, node.orelse])
        if isinstance(node, ast.Call):
            return self._call(node, text)
        return Part(node, text, "unknown")

    def _unread(self, node: ast.expr, text: str) -> Part | None:
        if isinstance(node, ast.Attribute) and node.attr in _NO_TENSOR:
            return None
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            inner = self.part(node.value)
            if inner is not None and inner.kind == "object" and isinstance(node, ast.Attribute):
                names = [name for name, _ in held_by(inner.value)]
                return inner if node.attr in names else Part(node, text, "unknown")
            of_result = isinstance(node, ast.Subscript) or node.attr in _PART_OF
            if inner is None or inner.kind not in ("tensor", "made", "group"):
                return Part(node, text, "unknown")
            if of_result and inner.device:
                return Part(node, text, "made", inner.devices)
        return Part(node, text, "unknown")

    def _group(self, node: ast.expr, text: str, elements: list[Any]) -> Part | None:
        items = [part for e in elements if e is not None and (part := self.part(e)) is not None]
        if not items:
            return None
        devices = dict.fromkeys(d for part in items for d in part.devices)
        return Part(node, text, "group", tuple(devices), items=tuple(items))

    def _together(self, node: ast.expr, text: str, operands: list[ast.expr]) -> Part | None:
        """The result of operands that agreed: it is where any one of them is known to be."""
        parts = [part for operand in operands if (part := self.part(operand)) is not None]
        if not parts:
            return None
        loose = [part for part in flat(parts) if not part.scalar]
        known = dict.fromkeys(part.device for part in loose if part.device)
        forgot = bool(loose) and all(part.factory for part in loose)
        if len(known) == 1 or (forgot and not known):
            return Part(node, text, "made", tuple(d for d in known if d), factory=forgot)
        if not loose:
            return Part(node, text, "made", ("cpu",), scalar=True)
        return Part(node, text, "unknown")

    # -- calls
    def _call(self, node: ast.Call, text: str) -> Part | None:
        function = self.scope.value(node.func)
        if isinstance(node.func, ast.Name) and node.func.id in _NO_OPERANDS:
            return None
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
            return Part(node, text, "unknown")
        if not called.devices:  # without weights: its result is where its arguments are
            return self._together(node, text, arguments(node))
        where = (called.device,) if called.device else ()
        return Part(node, text, "made" if where else "unknown", where)

    def _made_by_class(self, node: ast.Call, kind: type, text: str) -> Part:
        if issubclass(kind, nn.Module):
            return Part(node, text, "module", (), about=kind.__name__)
        if issubclass(kind, torch.Generator):
            given = self.device(_argument(node, "device", 0), "cpu")
            return Part(node, text, "generator", (given,) if given else (), about="generator")
        return Part(node, text, "unknown")

    def _method(self, owner: Part, node: ast.Call, name: str, text: str) -> Any:
        """The result of a method; `MISSING` where it may be anything."""
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
        """A device that an argument names; `without` if there is none; None if it is unknown."""
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
        return self._together(node, text, arguments(node)) or Part(node, text, "unknown")


def arguments(node: ast.Call) -> list[ast.expr]:
    """The arguments of a call, keywords and unpacked ones included."""
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _argument(node: ast.Call, name: str, at: int | None) -> ast.expr | None:
    for keyword in node.keywords:
        if keyword.arg == name:
            return keyword.value
    return node.args[at] if at is not None and len(node.args) > at else None


def is_torch(function: Any) -> bool:
    """Whether a function is torch's own."""
    module = of_function(function, "__module__")
    return isinstance(module, str) and module.split(".")[0] in ("torch", "torchvision")


def loads_as_saved(node: ast.Call, function: Any) -> bool:
    """Whether it is a `torch.load` that is not told where to."""
    told = len(node.args) > 1 or any(k.arg in ("map_location", None) for k in node.keywords)
    return is_torch(function) and of_function(function, "__name__") == "load" and not told
