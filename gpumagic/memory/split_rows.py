"""Write code that computes a result in parts, if each of its rows needs one row of a tensor.

Model calls, distances, products, and element-wise operations are such; names are looked up in the
assignments before them. A dry run tries the code, and refuses shapes that do not fit.
"""

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from gpumagic.memory.written_forms import Form, FormReader
from gpumagic.usercode.frames import RestOfCode, block_of, stored
from gpumagic.usercode.values import MISSING, is_module, is_tensor

# Into how many parts a tensor is split: the first number that lets the code fit is proposed.
_PARTS = 8, 64
# Operations whose result has a row for each row of the first operand. In the first pattern, other
# operands have such rows too; in the second, each row needs all of them.
_EACH = re.compile(
    "add|sub|mul|div|pow|maximum|minimum|masked_fill|to|cuda|cpu|float|half|double|bfloat16|detach"
    "|clone|contiguous|relu|gelu|silu|sigmoid|tanh|exp|log|log1p|r?sqrt|square|abs|neg|sin|cos"
    "|clamp|round|i?r?fft2?|one_hot"
)
_ALL = re.compile("matmul|mm|cdist|linear|embedding|conv[12]d|interpolate")
# Operations along a dimension, which must not be the first; the last of them have a default.
_ALONG = re.compile(
    "sum|mean|std|var|norm|a?min|a?max|argmin|argmax|softmax|log_softmax|logsumexp|cumsum|median"
    "|mode|flatten|unsqueeze|squeeze|topk|sort|argsort|normalize"
)
_LAST = "topk", "sort", "argsort", "normalize"
_KEEPS = re.compile("(log_)?softmax|cumsum|flatten|unsqueeze|topk|(arg)?sort|normalize")
_ATTRIBUTES = "real", "imag", "values", "indices", "mT"


def in_parts(rest: RestOfCode) -> Iterator[Form]:
    """Yield code that computes the largest expression around the failed operation in parts."""
    block: list[Any] = block_of(rest.failed) if rest.failed is not None else []
    first = block.index(rest.failed) if block else 0
    kinds = (ast.Assign, ast.Expr, ast.Return)
    for at in (n for n in reversed(range(first, len(block))) if isinstance(block[n], kinds)):
        yield from _in_parts(rest, block, first, at)


def _in_parts(rest: RestOfCode, block: list[Any], first: int, at: int) -> Iterator[Form]:
    read = [node for stmt in block[first : at + 1] for node in ast.walk(stmt)]
    known = {ast.unparse(n): rest.frame.scope.value(n) for n in read if isinstance(n, ast.expr)}
    tensors = {text: v for text, v in known.items() if is_tensor(v) and v.dim() > 1}
    name = next(word for word in ("rows", "part", "chunk", "_") if word not in known)
    for node in (n for n in ast.walk(block[at]) if isinstance(n, ast.expr)):
        for text in sorted(tensors, key=lambda text: -len(tensors[text])):
            reader = RowReader(rest.frame, block, at, text, name)
            part, count = reader.part(node, at), len(tensors[text])
            if part is not None and first in reader.used and count >= _PARTS[0]:
                for parts in _PARTS:
                    split = f"{text}.split({2 ** (count // parts).bit_length() // 2 or 1})"
                    new = f"torch.cat([{ast.unparse(part)} for {name} in {split}])"
                    yield from reader.replaced(node, ast.parse(new, mode="eval").body)
                return


class RowReader(FormReader):
    """Write an expression for some rows of a tensor, whose code is `batch`.

    Each written expression has its number of dimensions in `dims`; 0 if it is unknown.
    """

    def __init__(self, frame: Any, block: list[Any], at: int, batch: str, name: str) -> None:
        super().__init__(frame, block, at)
        self._batch, self._name = batch, name

    def part(self, node: Any, at: int) -> Any:
        """Return an expression of the statement `at` for some rows; None if they need others."""
        used, found = {*self.used}, {**self._found}
        if ast.unparse(node) == self._batch:
            return _of(ast.Name(self._name), self._dims(node))
        kinds: dict[type, Any] = {ast.Name: self._named, ast.Attribute: self._attribute}
        kinds |= {ast.UnaryOp: self._negated, ast.BinOp: self._combined}
        kinds |= {ast.Subscript: self._indexed, ast.Call: self._result}
        part = kinds.get(type(node), lambda *_: None)(node, at)
        if part is None:
            self.used, self._found = used, found
        return part

    def _dims(self, node: ast.expr) -> int:
        value = self._frame.scope.value(node)
        return value.dim() if is_tensor(value) else 0

    def _named(self, node: ast.Name, at: int) -> Any:
        made = next((n for n in reversed(range(at)) if node.id in stored(self._block[n])), at)
        stmt = self._block[made]
        if made == at or not isinstance(getattr(stmt, "targets", [None])[0], ast.Name):
            return None
        self.used.add(made)
        self._found[ast.unparse(stmt)] = stmt.value, made
        return self.part(stmt.value, made)

    def _attribute(self, node: ast.Attribute, at: int) -> Any:
        inner = self.part(node.value, at) if node.attr in _ATTRIBUTES else None
        return inner and _of(ast.Attribute(inner, node.attr), inner.dims)

    def _negated(self, node: ast.UnaryOp, at: int) -> Any:
        inner = self.part(node.operand, at)
        return inner and _of(ast.UnaryOp(node.op, inner), inner.dims)

    def _combined(self, node: ast.BinOp, at: int) -> Any:
        left, right = self.part(node.left, at), None
        if isinstance(node.op, ast.MatMult):
            other = self._dims(node.right)
            dims = left.dims - (other == 1) if left and other else 0
            return left and _of(ast.BinOp(left, node.op, node.right), dims)
        right = self.part(node.right, at)
        if left is None and right is None:
            return None
        dims = max(each.dims for each in (left, right) if each)
        return _of(ast.BinOp(left or node.left, node.op, right or node.right), dims)

    def _indexed(self, node: ast.Subscript, at: int) -> Any:
        inner, index = self.part(node.value, at), node.slice
        if inner is None:  # rows of indices give rows of what they index
            rows, whole = self.part(index, at), self._dims(node.value)
            dims = rows.dims + whole - 1 if rows and whole else 0
            return rows and _of(ast.Subscript(node.value, rows), dims)
        kept = [*map(ast.unparse, index.elts)] if isinstance(index, ast.Tuple) else [""]
        if kept[0] not in (":", "..."):
            return None
        known = {*kept} <= {":", "...", "None"}
        return _of(ast.Subscript(inner, index), inner.dims + kept.count("None") if known else 0)

    def _result(self, node: Any, at: int) -> Any:
        function, owner = self._frame.scope.value(node.func), getattr(node.func, "value", None)
        if is_module(function):
            alone = len(node.args) == 1 and all(map(_of_rows, function.modules()))
            inner = self.part(node.args[0], at) if alone else None
            return inner and _of(ast.Call(node.func, [inner], node.keywords), 2)
        is_torchs = (getattr(function, "__module__", None) or "torch").startswith("torch")
        if owner is None or not (is_torchs or function is MISSING):
            return None
        a_module = isinstance(self._frame.scope.value(owner), ModuleType)
        name, given = node.func.attr, node.args if a_module else [owner, *node.args]
        first, others = self.part(given[0], at) if given else None, given[1:]
        if first is None or not (dims := _dims_of(name, first.dims, others, node.keywords)):
            return None
        if _EACH.fullmatch(name):
            others = [self.part(each, at) or each for each in others]
        called = node.func if a_module else ast.Attribute(first, name)
        others = [first, *others] if a_module else others
        return _of(ast.Call(called, others, node.keywords), dims)


def _of(node: Any, dims: int) -> Any:
    node.dims = dims
    return node


def _dims_of(name: str, dims: int, args: list[ast.expr], keywords: list[ast.keyword]) -> int:
    """Return the dimensions of an operation's result; 0 if its rows may need other rows."""
    if _EACH.fullmatch(name) or _ALL.fullmatch(name):
        return (dims or 1) + (name in ("one_hot", "embedding"))
    named = {word.arg: word.value for word in keywords}
    given = [each for each in (named.get("dim"), named.get("start_dim")) if each is not None]
    along: Any = None
    with suppress(ValueError, IndexError):
        default = [ast.Constant(-1)] if name in _LAST else []
        along = ast.literal_eval([*given, *args[name == "topk" :], *default][0])
    along = along if isinstance(along, tuple) else (along,)
    if not _ALONG.fullmatch(name) or not all(
        type(dim) is int and (dim > 0 or (dim == -1 and dims > 1)) for dim in along
    ):
        return 0
    keeps = "keepdim" in named or _KEEPS.fullmatch(name)
    return dims if keeps else max(dims - len(along), 1)


def _of_rows(layer: Any) -> bool:
    """Whether each row of a layer's result depends only on that row of its batch."""
    if hasattr(layer, "running_mean") and layer.training:
        return False
    return getattr(layer, "batch_first", True) and getattr(layer, "dim", -1) != 0
