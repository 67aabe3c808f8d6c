"""Split code by rows of a tensor, so that it needs less memory and gives the same result.

The code is the failed statement, perhaps with later ones that use its value. To test whether the
parts' results can be joined, a fork runs the code on a few rows of random numbers.
"""

import ast
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

from gpumagic.memory.oom_trials import Trials
from gpumagic.memory.written_forms import Form, Swap, advice, expression, takes_rows
from gpumagic.usercode import frames
from gpumagic.usercode.values import is_module, is_tensor, torch_here
from gpumagic.usercode.variables import names_read

_PARTS = 8, 64  # numbers of parts to split a tensor into
_ROWS = 5, 80  # rows of a tensor in a test; code such as `topk(9)` needs many
# With large numbers, `softmax(x @ x.T)` seems to have independent rows, so test small ones too.
_SMALL = 0.01  # the second test multiplies its numbers by this factor
_TESTS_S = 6.0  # seconds, after which no test is started
_MOST, _ROOM = 2**30, 2**27  # maximum bytes of a random tensor, and free bytes of a GPU in a test
# Code that joins the parts' results, by the kind of the result.
_JOINED = {
    "other": "torch.cat([{each} {loop}])",
    "last": "torch.cat([{each} {loop}], -1)",
    "tuple": "tuple(map(torch.cat, zip(*({each} {loop}))))",
    "sum": "sum({each} {loop})",
    "mean": "sum(rows.shape[0] * {each} {loop}) / {text}.shape[0]",
}
_NAMED = (ast.Name, ast.Attribute, ast.Subscript)


class _Split(NamedTuple):
    """Describe code to split: its statements, their final value, and the expression to split."""

    old: list[Any]
    whole: ast.expr  # the final value, with earlier statements' values in place of their names
    part: ast.expr  # the expression to split: `whole`, or an expression in `whole`
    texts: tuple[str, ...]  # the tensors to split, as the code writes them
    once: bool = False  # whether to split only the first use of a tensor, as in ``x @ x.T``

    def in_parts(self, rows: int, result: str) -> str:
        """Return code that computes `part` for `rows` rows at a time. `result` is in `_JOINED`."""
        names = ["rows", *(f"rows{n + 1}" for n in range(1, len(self.texts)))]
        each = self.part
        for text, name in zip(self.texts, names, strict=True):
            each = _renamed(each, text, name, 1 if self.once else None)
        cuts = ", ".join(f"{text}.split({rows})" for text in self.texts)
        cuts = cuts if len(self.texts) == 1 else f"zip({cuts})"
        loop, text = f"for {', '.join(names)} in {cuts}", self.texts[0]
        code = ast.unparse(each)
        code = f"({code})" if result == "mean" and isinstance(each, ast.BinOp) else code
        code = _JOINED[result].format(each=code, loop=loop, text=text)
        return f"({code})" if result == "mean" and self.part is not self.whole else code


def split(rest: frames.RestOfCode, t: Trials) -> Iterator[Form]:
    """Yield the failed code, split by rows in each way that gives the same result."""
    if rest.failed is None or rest.frame.code.co_name == "forward":
        return  # the code that calls the module can be split instead
    block = frames.block_of(rest.failed)
    found = [*_candidates(rest, block)]
    results = t.in_fork(partial(_results, rest.frame, found), _ROOM) if found else None
    first = dict[Any, tuple[_Split, str]]()
    for each, result in zip(found, results or (), strict=False):
        if result:
            first.setdefault((each.whole, each.texts), (each, result))
    for each, result in first.values():
        yield from _forms(each, result, rest.frame, block)


def _forms(each: _Split, how: str, frame: frames.FailedFrame, block: list[Any]) -> Iterator[Form]:
    """Yield a statement that splits an expression, for each number in `_PARTS`."""
    bound = getattr(each.old[-1], "targets", [None])[0]
    start = f"{ast.unparse(bound)} = " if bound else "return "
    count, name = len(frame.scope.value(expression(each.texts[0]))), ast.Name("gpumagic_")
    for parts in (parts for parts in _PARTS if parts <= count):
        new = each.in_parts(2 ** (count // parts).bit_length() // 2, how)
        text = start + ast.unparse(Swap({each.part: name}.get).visit(each.whole))
        Swap({name: each.part}.get).visit(each.whole)
        text = text.replace(name.id, new)
        yield Form(advice(text, each.old, block), text, each.old, block)


def _candidates(rest: frames.RestOfCode, block: list[Any]) -> Iterator[_Split]:
    for old, whole in _chains(rest, block):
        lengths = _lengths(whole, rest.frame)
        parts = _parts(whole)
        for text in sorted(lengths, key=lengths.__getitem__, reverse=True):
            alike = tuple(each for each in lengths if lengths[each] == lengths[text])
            for texts, part in product(dict.fromkeys([(text,), alike]), parts):
                used = [len(frames.uses(part, each)) for each in texts]
                once = [False] * (0 not in used) + [True] * (used[0] > 1 == len(used))
                yield from (_Split(old, whole, part, texts, each) for each in once)


def _parts(whole: ast.expr) -> list[ast.expr]:
    """Return the calls, operators, and fields of results, in an expression."""
    nodes = [*ast.walk(whole)]
    called = [getattr(n, "func", None) for n in nodes]
    # For `x.topk(3).indices`, the field must be read before the parts' results are joined.
    fields = [n for n in nodes if isinstance(n, ast.Attribute) and n not in called]
    fields = [n for n in fields if isinstance(n.value, ast.Call)]
    return fields + [n for n in nodes if isinstance(n, (ast.Call, ast.BinOp))]


def _lengths(whole: ast.expr, frame: frames.FailedFrame) -> dict[str, int]:
    """Return the number of rows of each tensor that can be split, by the tensor's text."""
    indexed = [n for n in ast.walk(whole) if isinstance(n, ast.Subscript)]
    chosen = {ast.unparse(n.value) for n in indexed if takes_rows(n)}
    lengths = {text: len(x) for text, x in _tensors(whole, frame).items() if x.dim()}
    return {k: n for k, n in lengths.items() if n >= min(_PARTS) and k not in chosen}


def _chains(rest: frames.RestOfCode, block: list[Any]) -> Iterator[tuple[list[Any], ast.expr]]:
    """Yield growing lists of statements, each with the last statement's value as one expression.
    The first list has the failed statement. Each longer list adds the only reader of the value."""
    last: Any = rest.failed
    old, whole, name = list[Any](), expression("_"), "_"
    while last in block and isinstance(last, (ast.Assign, ast.Return)) and last.value is not None:
        value = expression(ast.unparse(last.value))
        whole = _renamed(value, name, f"({ast.unparse(whole)})") if old else value
        ran = block[block.index(rest.failed) : block.index(last)]
        between = [stmt for stmt in ran if stmt not in old]
        if frames.stored(ast.Module(between, [])) & {*names_read(ast.Expression(whole))}:
            return
        old = [*old, last]
        yield old, whole
        name = getattr(getattr(last, "targets", [None])[0], "id", "")
        last = _only_reader(name, last) if name else None


def _only_reader(name: str, made: ast.stmt) -> ast.stmt | None:
    """Return the only statement below `made` that reads a name; or None."""
    every = frames.uses(frames.function_of(made) or made, name)
    end = made.end_lineno, made.end_col_offset
    found = [node for node in every if (node.lineno, node.col_offset) > end]
    readers = {frames.statement(node) for node in found}
    return readers.pop() if len(readers) == 1 and not any(map(frames.in_own_scope, found)) else None


def _tensors(tree: ast.AST, frame: frames.FailedFrame) -> dict[str, Any]:
    """Return the tensors that code reads, by their text: ``d["x"]``, or ``x`` for ``x.T``."""
    found = dict[str, Any]()
    nodes = [n for n in ast.walk(tree) if isinstance(n, _NAMED) and isinstance(n.ctx, ast.Load)]
    for node in nodes:
        value, owner = frame.scope.value(node), getattr(node, "value", None)
        if is_tensor(value) and not (owner and is_tensor(frame.scope.value(owner))):
            found[ast.unparse(node)] = value
    return found


def _renamed(tree: ast.expr, text: str, new: str, most: int | None = None) -> Any:
    """Return a copy of code that reads `new` instead of `text`, at the first `most` places."""
    tree = expression(ast.unparse(tree))
    places = {id(node) for node in islice(frames.uses(tree, text), most)}
    return Swap(lambda n: expression(new) if id(n) in places else None).visit(tree)


def _results(frame: frames.FailedFrame, found: list[_Split]) -> list[str]:
    """Return a key of `_JOINED` for each candidate; empty if its parts cannot be joined."""
    space = {**frame.scope.outer, **frame.scope.local, "torch": torch_here()}
    read = {n for each in found for n in names_read(ast.Expression(each.whole))}
    torch_here().__future__.set_overwrite_module_params_on_conversion(True)
    for module in (space[name] for name in read if is_module(space.get(name))):
        module._apply(_random)
    results, until = list[str](), time.monotonic() + _TESTS_S
    for each in found:
        if time.monotonic() > until:
            break
        results.append("")
        with suppress(Exception):
            how = _joined(each, frame, space, [*_JOINED], False)
            results[-1] = _joined(each, frame, space, [how], True) if how else ""
    return results


def _joined(
    each: _Split, frame: frames.FailedFrame, space: dict[str, Any], keys: list[str], alike: bool
) -> str:
    """Return the first of `keys` that joins the parts' results for random numbers, or ""."""
    part, tensors = each.part, _tensors(each.part, frame)
    names = {text: f"gpumagic_{n}" for n, text in enumerate(tensors)}
    for text, name in names.items():
        part = _renamed(part, text, name)
    renamed = each._replace(part=part, texts=tuple(names[text] for text in each.texts))
    count = len(tensors[each.texts[0]])
    as_long = [text for text, x in tensors.items() if x.dim() and len(x) == count]
    # If only `x` is shortened, `softmax(x @ x.T) @ y` fails, because `y` has more rows than `x`.
    for rows, shortened in product(_ROWS, (each.texts, as_long)):
        with suppress(Exception):
            few = {text: x[:rows] if text in shortened else x for text, x in tensors.items()}
            numbers = {names[text]: _random(x, alike) for text, x in few.items()}
            return _first_equal(renamed, space | numbers, keys, alike, min(rows, count) * 2 // 5)
    return ""


def _first_equal(
    each: _Split, space: dict[str, Any], keys: list[str], alike: bool, rows: int
) -> str:
    whole = eval(ast.unparse(each.part), space)
    target = getattr(each.old[-1], "targets", [None])[0]
    # Joining loses a named tuple's fields, so skip a named tuple unless the code unpacks it.
    unnamed = type(whole) in (tuple, torch_here().Tensor) or isinstance(target, ast.Tuple)
    for result in keys if unnamed else ():
        with suppress(Exception):  # the parts' results do not join like this
            _check_equal(eval(each.in_parts(rows, result), space), whole)
            # Zeros confirm a sum only in the second test, because its small numbers may give zeros.
            if result not in ("sum", "mean") or alike or whole.any():
                return result
    return ""


def _check_equal(one: Any, two: Any) -> None:
    """Raise an error if two tensors differ by more than a rounding error of their median value."""
    torch = torch_here()
    for each, other in zip(one, two, strict=True) if isinstance(two, tuple) else [(one, two)]:
        usual = float(other.detach().to(torch.complex128).abs().nanmedian())
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5 * usual, equal_nan=True)


def _random(tensor: Any, alike: bool = False) -> Any:
    """Return random numbers of a tensor's shape; if `alike`, small, with nearly parallel rows."""
    if tensor.nbytes > _MOST:
        raise MemoryError
    torch, like = torch_here(), {"dtype": tensor.dtype, "device": tensor.device}
    if not (tensor.is_floating_point() or tensor.is_complex()):
        found = torch.randint(2, tensor.shape, device=tensor.device).to(tensor.dtype)
        # Keep negative labels: a loss may ignore them, and then its mean is not over all rows.
        return found * int(tensor.min()) if tensor.numel() and tensor.min() < 0 else found
    found = torch.randn(tensor.shape, **like)
    if alike and tensor.dim():
        factors = torch.rand(len(tensor), *[1] * (tensor.dim() - 1), **like)
        found = _SMALL * (factors * found[:1] + found / 10)
    return found
