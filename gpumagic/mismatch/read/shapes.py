"""The shape and type of a result that has gone, worked out without data.

Tensors of the same shape on torch's device `meta`, which holds none, go through torch's own
operators. Names, constants, operators, methods of tensors and functions of torch; nothing of the
user's is called.
"""

import ast
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.usercode.values import MISSING, Scope, of_function, own

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
_PLAIN = (int, float, bool, str, type(None), torch.dtype, slice, torch.Size)
_PLACES = ("cpu", "cuda", "detach", "contiguous", "clone", "pin_memory", "requires_grad_")
_MAX_NUMBER = 2**40


def meta(node: ast.AST, scope: Scope) -> Tensor | None:
    """A tensor without data that stands for the value of `node`, or None."""
    try:
        with torch.no_grad():
            value = _value(node, scope)
    except Exception:  # noqa: BLE001  not to be worked out; whatever the reason, it is not known
        return None
    return value if isinstance(value, Tensor) else None


class _NotKnown(Exception):
    pass


def _value(node: ast.AST, scope: Scope) -> Any:
    found = scope.value(node)
    if found is not MISSING:
        return _plain(found)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, scope)
        if isinstance(owner, (Tensor, tuple)) and not node.attr.startswith("_"):
            return getattr(owner, node.attr)
    elif isinstance(node, ast.Subscript):
        return _value(node.value, scope)[_value(node.slice, scope)]
    elif isinstance(node, ast.Slice):
        parts = (node.lower, node.upper, node.step)
        return slice(*(None if p is None else _value(p, scope) for p in parts))
    elif isinstance(node, (ast.Tuple, ast.List)):
        return tuple(_value(e, scope) for e in node.elts)
    elif isinstance(node, ast.BinOp):
        both = _value(node.left, scope), _value(node.right, scope)
        if isinstance(node.op, ast.Pow) and not any(isinstance(v, Tensor) for v in both):
            raise _NotKnown
        return _bounded(_OPERATORS[type(node.op)](*both))
    elif isinstance(node, ast.UnaryOp):
        return _OPERATORS[type(node.op)](_value(node.operand, scope))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        both = _value(node.left, scope), _value(node.comparators[0], scope)
        return _OPERATORS[type(node.ops[0])](*both)
    elif isinstance(node, ast.Call):
        return _call(node, scope)
    raise _NotKnown


def _plain(value: Any) -> Any:
    if issubclass(type(value), Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise _NotKnown  # under vmap the shape is that of one slice
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        like = torch.from_numpy(numpy.empty(0, value.dtype))
        return torch.empty(value.shape, dtype=like.dtype, device="meta")
    if type(value) in _PLAIN:
        return _bounded(value)
    if type(value) in (tuple, list) and len(value) < 1000:
        return type(value)(_plain(v) for v in value)
    raise _NotKnown


def _bounded(value: Any) -> Any:
    if isinstance(value, int) and abs(value) > _MAX_NUMBER:
        raise _NotKnown
    return value


def _call(node: ast.Call, scope: Scope) -> Any:
    function = scope.value(node.func)
    if isinstance(node.func, ast.Attribute) and function is MISSING:
        owner, name = _value(node.func.value, scope), node.func.attr
        if not isinstance(owner, Tensor) or name.startswith("_"):
            raise _NotKnown
        if name in _PLACES:
            return owner
        if name == "to":
            dtypes = [v for v in _arguments(node, scope, ignore=True) if type(v) is torch.dtype]
            return owner.to(dtypes[0]) if dtypes else owner
        if name.endswith("_"):
            return owner
        args, names = _both(node, scope)
        return getattr(Tensor, name)(owner, *args, **names)
    args, names = _both(node, scope)
    if type(function) in (nn.Linear, nn.Embedding) and not _hooked(function):
        return _of_layer(function, args[0])
    kinds = (types.BuiltinFunctionType, types.FunctionType)
    name = of_function(function, "__name__")
    if name in ("from_numpy", "as_tensor", "tensor") and isinstance(args[0], Tensor):
        return args[0].to(names.get("dtype", args[0].dtype))
    if isinstance(function, kinds) and _is_an_operator(function):
        made = not any(isinstance(a, Tensor) for a in _leaves([*args, *names.values()]))
        return function(*args, **names, **({"device": "meta"} if made else {}))
    raise _NotKnown


def _hooked(module: nn.Module) -> bool:
    held = own(module)
    return bool(held["_forward_hooks"] or held["_forward_pre_hooks"] or "forward" in held)


def _of_layer(layer: nn.Linear | nn.Embedding, given: Tensor) -> Tensor:
    kept = given.shape[:-1] if isinstance(layer, nn.Linear) else given.shape
    weight = layer.weight
    last = weight.shape[0] if isinstance(layer, nn.Linear) else weight.shape[1]
    return torch.empty((*kept, last), dtype=weight.dtype, device="meta")


def _is_an_operator(function: Any) -> bool:
    name = function.__name__
    known = any(getattr(home, name, None) is function for home in (torch, torch.nn.functional))
    return known and not name.endswith("_")


def _both(node: ast.Call, scope: Scope) -> tuple[list[Any], dict[str, Any]]:
    args = [_value(a, scope) for a in node.args]
    names = {
        str(k.arg): _value(k.value, scope)
        for k in node.keywords
        if k.arg not in ("device", "generator", "out", "pin_memory", "requires_grad")
    }
    if any(k.arg in (None, "out") for k in node.keywords):
        raise _NotKnown
    return args, names


def _arguments(node: ast.Call, scope: Scope, *, ignore: bool) -> list[Any]:
    return [scope.value(a) for a in [*node.args, *(k.value for k in node.keywords)]]


def _leaves(values: list[Any]) -> list[Any]:
    return [x for v in values for x in (_leaves(list(v)) if isinstance(v, (tuple, list)) else [v])]
