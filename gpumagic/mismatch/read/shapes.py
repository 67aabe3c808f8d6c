"""Work out the shape and type of a result that has gone, without data.

The expression runs again on torch's device `meta`, which holds no data, with every value in it
replaced by its like there. Only torch's own operators are called, nothing of the user's.
"""

import ast
import sys
from typing import Any

import torch
from torch import Tensor

from gpumagic.usercode.values import MISSING, Scope, of_function

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.Size, slice)
_MOVES = ("to", "cpu", "cuda", "pin_memory")
_FROM_DATA = ("from_numpy", "as_tensor", "tensor")
_NOT_GIVEN = ("device", "generator", "pin_memory", "requires_grad")
_MODULES = ("torch.functional", "torch.nn.functional")
_ALLOWED = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Slice, ast.Tuple, ast.List),
    *(ast.Attribute, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context),
)
_MOST = 2**40
_MOST_ITEMS = 1000


def meta(node: ast.AST, scope: Scope) -> Tensor | None:
    """A tensor without data that stands for the value of `node`, or None."""
    try:
        tree = ast.parse(ast.unparse(node), mode="eval")
        likes = _Likes(scope)
        tree.body = likes.visit(tree.body)
        code = compile(ast.fix_missing_locations(tree), "<shapes>", "eval")
        with torch.no_grad(), torch.device("meta"):
            value = eval(code, {"__builtins__": {}}, likes.names)
    except Exception:  # noqa: BLE001  not to be worked out; whatever the reason, it is not known
        return None
    return value if isinstance(value, Tensor) and value.is_meta else None


class _NotKnown(Exception):
    pass


class _Likes(ast.NodeTransformer):
    """Replaces what can be read by names for its likes, and refuses what may be the user's code."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.names: dict[str, Any] = {}

    def visit(self, node: ast.AST) -> Any:
        value = self.scope.value(node) if isinstance(node, ast.expr) else MISSING
        return super().visit(node) if value is MISSING else self._name(_like(value))

    def generic_visit(self, node: ast.AST) -> ast.AST:
        private = isinstance(node, ast.Attribute) and node.attr.startswith("_")
        if private or not isinstance(node, _ALLOWED):
            raise _NotKnown
        return super().generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        power = isinstance(node.op, (ast.Pow, ast.LShift))
        if power and not (isinstance(node.right, ast.Constant) and node.right.value in range(9)):
            raise _NotKnown  # a number with more digits than there is memory
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = self.scope.value(node.func)
        if any(keyword.arg in (None, "out") for keyword in node.keywords):
            raise _NotKnown
        if of_function(function, "__name__") in _FROM_DATA and node.args:
            result: ast.AST = self.visit(node.args[0])
            return result
        if function is MISSING and isinstance(node.func, ast.Attribute):
            if node.func.attr in _MOVES:
                return self._moved(node, node.func.value)
            called = self.generic_visit(node.func)
        elif _is_operator(function):
            called = self._name(function)
        else:
            raise _NotKnown
        args = [self.visit(argument) for argument in node.args]
        given = [k for k in node.keywords if k.arg not in _NOT_GIVEN]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in given]
        return ast.Call(called, args, keywords)  # type: ignore[arg-type]

    def _moved(self, node: ast.Call, owner: ast.expr) -> ast.AST:
        """`x.to(…)`, which changes the type at most."""
        values = map(self.scope.value, [*node.args, *(k.value for k in node.keywords)])
        types: list[ast.expr] = [self._name(v) for v in values if type(v) is torch.dtype]
        like = self.visit(owner)
        return ast.Call(ast.Attribute(like, "to", ast.Load()), types, []) if types else like

    def _name(self, value: Any) -> ast.Name:
        name = f"value_{len(self.names)}"
        self.names[name] = value
        return ast.Name(name, ast.Load())


def _like(value: Any) -> Any:
    """A value's like without data."""
    if issubclass(type(value), Tensor):
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise _NotKnown  # under vmap the shape is that of one slice
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    numpy = sys.modules.get("numpy")
    if numpy is not None and type(value) is numpy.ndarray:
        like = torch.from_numpy(numpy.empty(0, value.dtype))
        return torch.empty(value.shape, dtype=like.dtype, device="meta")
    if type(value) in (tuple, list) and len(value) < _MOST_ITEMS:
        return type(value)(_like(item) for item in value)
    if type(value) not in _PLAIN or (isinstance(value, int) and abs(value) > _MOST):
        raise _NotKnown
    return value


def _is_operator(function: Any) -> bool:
    """Whether a function is one of torch's that compute with tensors, and change none."""
    name = str(of_function(function, "__name__"))
    known = getattr(torch._C._VariableFunctions, name, None) is function
    known = known or of_function(function, "__module__") in _MODULES
    return known and not name.endswith("_")
