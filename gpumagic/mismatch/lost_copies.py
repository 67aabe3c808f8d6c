"""Find lines such as ``x.to(device)`` that copy a tensor while nothing keeps the copy.

Such a line may be in a failed frame, in a function that the frame called before, or in an earlier
cell. In a loop, ``v = v.to(device)`` is such a line if the loop does not use `v` after it.
"""

import ast
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from gpumagic.mismatch.explanation import Fix, around, total
from gpumagic.mismatch.operand import TRANSFERS, Part, Reader
from gpumagic.mismatch.operation import named_in
from gpumagic.mismatch.sources import only_assignment
from gpumagic.usercode.files import is_users, label, shell
from gpumagic.usercode.frames import FailedFrame, first_name, function_of, parents, stored, uses

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COPY = "{} returns a copy of a tensor, and nothing keeps this copy"
_LOOP = "{} binds the name {} only; {} still holds the old tensors"
_CALL = "{} returns the copies, and nothing keeps them"
_LOCAL = "{} binds the local name {} only; return {}, and assign the result of the call"


class _Lost(NamedTuple):
    node: Any  # the code that loses a copy
    code: str  # the code that keeps the copy; empty if one edit is not enough
    why: str


def keep_copies(parts: list[Part], frames: list[FailedFrame]) -> tuple[Fix | None, str]:
    """Return the fix that keeps the lost copies of all operands, and the reason; or (None, "")."""
    each = [_names_of(part, frames[0]) for part in parts]
    for frame, outer in zip(frames, [*frames[1:], None], strict=True):
        if frame.failed is None:
            break
        for code, lost in _places(frame, set[str]().union(*each)):
            found = [next((lost[name] for name in names if name in lost), None) for names in each]
            if done := [one for one in found if one is not None]:
                cell = "" if code is frame else f"{label(code.filename)}, "
                whole = len(done) == len(found) and all(one.code for one in done)
                edits = [[one[:2] for one in some if one.code] for some in (lost.values(), done)]
                edit = around(code, edits[0]) or around(code, edits[1]) if whole else None
                nbytes, earlier = total(part.nbytes for part in parts), hasattr(code, "earlier")
                fix = replace(edit.fix(nbytes), earlier=earlier) if edit else None
                return fix, f"{cell}line {done[0].node.lineno}: {done[0].why}"
        each = [_given(names, frame, outer) for names in each] if outer else []
    return None, ""


def _names_of(part: Part, frame: FailedFrame) -> set[str]:
    """Return the operand's texts, and the names from which the function computed the operand."""
    texts = {named.text for named in named_in(part, Reader(frame)) if named.kind == "tensor"}
    made = [only_assignment(text, frame.failed or part.node) for text in texts]
    nodes = [node for stmt in made if stmt for node in ast.walk(stmt.value)]
    return texts | set(map(first_name, texts)) | {n.id for n in nodes if isinstance(n, ast.Name)}


def _given(names: set[str], frame: FailedFrame, outer: FailedFrame) -> set[str]:
    """Return a caller's names for the arguments `names`, and the names of global variables."""
    call: Any = outer.failed
    found = names - {*frame.code.co_varnames}
    for name, value in _arguments(call, frame.parameters) if isinstance(call, ast.Call) else ():
        read = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
        found |= {ast.unparse(value)} | read if name in names else set()
    return found


def _arguments(call: ast.Call, parameters: tuple[str, ...]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and value of each argument; for ``*batch``, each name that it may fill."""
    names = [name for name in parameters if name != "self"]
    for name, value in zip(names, call.args, strict=False):
        if isinstance(value, ast.Starred):
            yield from ((each, value.value) for each in names)
        else:
            yield name, value
    for word in call.keywords:
        yield from ((each, word.value) for each in ([word.arg] if word.arg else names))


def _places(frame: FailedFrame, names: set[str]) -> Iterator[tuple[Any, dict[str, _Lost]]]:
    """Yield code that ran before the failure, with the lost copies of `names` in it."""
    scope: Any = function_of(frame.failed or ast.Pass())
    classes = [node for node in parents(scope) if isinstance(node, ast.ClassDef)] if scope else []
    names = {n for n in names if not issubclass(type(_value(frame, n)), nn.Module)}
    ran = [node for node in _own_nodes(scope) if node.lineno < frame.line]
    yield from _in_code(frame, ran, frame, names)
    attributes = {name for name in names if name.startswith("self.")}
    for node in classes[:1] if attributes else ():
        yield frame, _lost_in([*ast.walk(node)], attributes)
    for file in _earlier_cells() if frame.at_top else ():
        names -= set[str]().union(*map(stored, ran))
        if names and file != frame.filename:
            ran = _own_nodes((cell := _code(file, earlier=True)).tree)
            yield from _in_code(cell, ran, frame, names)


def _in_code(
    code: Any, nodes: list[Any], frame: FailedFrame, names: set[str]
) -> Iterator[tuple[Any, dict[str, _Lost]]]:
    """Yield the lost copies in a scope's nodes, and in the functions that they call."""
    # Also find the other tensors of which this code lost a copy, except the items of loops.
    alone: Any = [n.value for n in nodes if isinstance(n, ast.Expr) and _is_transfer(n.value)]
    owners = {ast.unparse(call.func.value): frame.scope.value(call.func.value) for call in alone}
    items = set[str]().union(*(stored(n.target) for n in nodes if isinstance(n, ast.For)))
    tensors = {name for name, value in owners.items() if issubclass(type(value), Tensor)} - items
    yield code, _lost_in(nodes, names | tensors)
    for stmt in reversed(nodes):
        call = getattr(stmt, "value", None)
        if isinstance(stmt, (ast.Assign, ast.Expr)) and isinstance(call, ast.Call):
            yield from _in_function(stmt, call, frame, names, code)


def _earlier_cells() -> list[str]:
    """Return the file names of the cells that ran, the last first."""
    numbers: dict[str, int] = getattr(getattr(shell(), "compile", None), "_filename_map", {})
    return sorted(numbers, key=lambda file: -numbers[file])


def _value(frame: FailedFrame, text: str) -> Any:
    return frame.scope.value(ast.parse(text, mode="eval").body)


def _own_nodes(scope: Any) -> list[Any]:
    """Return the nodes of a function's or cell's own code, by line."""
    nodes = [n for n in ast.walk(scope or ast.Pass()) if hasattr(n, "lineno")]
    return sorted((n for n in nodes if function_of(n) is scope), key=lambda node: node.lineno)


def _code(file: str, **more: Any) -> SimpleNamespace:
    """Return a file's source and syntax tree, as far as an edit needs them."""
    from executing import Source  # a slow import, which reading the frames has done by now

    source = Source.for_filename(file)
    known = {"filename": file, "source": source.text, "tree": source.tree, "parameters": ()}
    return SimpleNamespace(**{**known, **more})


def _in_function(
    stmt: Any, call: ast.Call, frame: FailedFrame, names: set[str], caller: Any
) -> Iterator[tuple[Any, dict[str, _Lost]]]:
    """Yield the lost copies in the user's function that a statement calls with `names`."""
    function: Any = frame.scope.value(call.func)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if type(function) is type or code is None or not is_users(code.co_filename):
        return
    more = {"earlier": True} if hasattr(caller, "earlier") else {}
    at = _code(code.co_filename, parameters=code.co_varnames[: code.co_argcount], **more)
    nodes = [n for n in ast.walk(at.tree or ast.Pass()) if isinstance(n, _FUNCTIONS)]
    scope = next((n for n in nodes if n.name == code.co_name), None)
    ours = {name: ast.unparse(value) for name, value in _arguments(call, at.parameters)}
    own = _own_nodes(scope)
    returned = [n.value for n in own if isinstance(n, ast.Return) and n.value]
    targets = stmt.targets if isinstance(stmt, ast.Assign) else []
    pairs = [pair for to in targets for value in returned for pair in _pairs(value, to)]
    inner = {name: our for name, our in {**ours, **dict(pairs)}.items() if our in names}
    yield at, {inner[name]: lost for name, lost in _lost_in(own, {*inner}).items()}
    rebound = {} if targets else {ast.unparse(n.targets[0]): n for n in own if _rebinds(n)}
    results = [name for value in returned for name, _ in _pairs(value, value)]
    back, text = ", ".join(inner.get(name, "") for name in results), ast.unparse(call)
    if back:
        lost = _Lost(call, f"{back} = {text}" * all(back.split(", ")), _CALL.format(text))
        yield caller, {inner[name]: lost for name in rebound if name in inner}
    local = ((name, _LOCAL.format(ast.unparse(node), name, name)) for name, node in rebound.items())
    yield at, {inner[name]: _Lost(rebound[name], "", why) for name, why in local if name in inner}


def _pairs(value: ast.expr, target: ast.expr) -> list[tuple[str, str]]:
    """Return pairs of a returned value and the name to which a call's result is assigned."""
    groups = [node.elts if isinstance(node, ast.Tuple) else [node] for node in (value, target)]
    texts = [list(map(ast.unparse, group)) for group in groups]
    return [*zip(*texts, strict=True)] if len(texts[0]) == len(texts[1]) else []


def _rebinds(stmt: ast.AST) -> bool:
    """Whether a statement is such as ``x = x.to(device)``."""
    call = stmt.value if isinstance(stmt, ast.Assign) else None
    to = ast.unparse(stmt.targets[0]) if isinstance(stmt, ast.Assign) else ""
    return _is_transfer(call) and ast.unparse(call.func.value) == to  # type: ignore[union-attr]


def _is_transfer(node: Any) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") in TRANSFERS


def _lost_in(nodes: list[Any], names: set[str]) -> dict[str, _Lost]:
    """Return the last lost copy of each name in a scope's nodes."""
    found: dict[str, _Lost] = {}
    for node in nodes:
        if isinstance(node, ast.For):
            found |= _lost_in_loop(node, {name: name for name in names})
        elif isinstance(node, ast.Expr) and _is_transfer(call := node.value):
            text, code = ast.unparse(call.func.value), ast.unparse(call)  # type: ignore[attr-defined]
            found |= (
                {text: _Lost(call, f"{text} = {code}", _COPY.format(code))} if text in names else {}
            )
    return found


def _lost_in_loop(loop: ast.For, roots: dict[str, str]) -> dict[str, _Lost]:
    """Return the lost copies of a loop's items. `roots` maps containers to the names to report."""
    whole = loop.iter
    method = getattr(getattr(whole, "func", None), "attr", "")
    if method in ("items", "values"):
        whole = whole.func.value  # type: ignore[attr-defined]
    key, item = _pairs(loop.target, loop.target)[0][0], ast.unparse(loop.target)
    if isinstance(loop.target, ast.Tuple):
        item = ast.unparse(loop.target.elts[-1])
    wholes = whole.elts if isinstance(whole, (ast.Tuple, ast.List)) else [whole]
    texts = [text for text in map(ast.unparse, wholes) if text in roots]
    found: dict[str, _Lost] = {}
    for stmt in loop.body if texts else ():
        if isinstance(stmt, ast.For):
            found |= _lost_in_loop(stmt, {item: roots[texts[0]]})
        call: Any = getattr(stmt, "value", None)
        moves = _is_transfer(call) and ast.unparse(call.func.value) == item
        if (
            not moves
            or not (isinstance(stmt, ast.Expr) or _rebinds(stmt))
            or _used(loop, stmt, item)
        ):
            continue
        text, code, node = ast.unparse(stmt), ast.unparse(call), stmt
        if method == "items":
            new = f"{texts[0]}[{key}] = {code}"
        else:
            new, node = _in_one_line(loop, item, code, texts, method), loop
        why = (_COPY if isinstance(stmt, ast.Expr) else _LOOP).format(text, item, texts[0])
        found |= {roots[each]: _Lost(node, new, why) for each in texts}
    return found


def _used(loop: ast.For, stmt: ast.stmt, item: str) -> bool:
    """Whether a loop reads an item below a statement that binds it to a copy."""
    below = [use for use in uses(loop, item) if use.lineno > (stmt.end_lineno or 0)]
    return bool(below) and isinstance(stmt, ast.Assign)


def _in_one_line(loop: ast.For, item: str, code: str, texts: list[str], method: str) -> str:
    """Return the assignment that replaces a loop of one statement; empty for other loops."""
    whole = texts[0]
    if len(loop.body) > 1 or not isinstance(loop.target, ast.Name):
        return ""
    if method == "values":
        return f"{whole} = {{k: {code} for k, {item} in {whole}.items()}}"
    if isinstance(loop.iter, (ast.Tuple, ast.List)):
        moved = code.removeprefix(item)
        return f"{', '.join(texts)} = {', '.join(text + moved for text in texts)}"
    return f"{whole} = [{code} for {item} in {whole}]"
