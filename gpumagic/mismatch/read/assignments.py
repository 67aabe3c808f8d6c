"""Find the statement that gave a name its value, or that was meant to."""

import ast
from itertools import pairwise

from gpumagic.mismatch.read.syntax import parents
from gpumagic.usercode.frames import FailedFrame

_MOVES = ("to", "cuda", "cpu")


def not_assigned(name: str, frame: FailedFrame) -> ast.Expr | None:
    """The statement `x.to(…)` whose result nobody keeps, on the way to the failing line."""
    last: ast.Expr | None = None
    for stmt in _before(frame.failed):
        if isinstance(stmt, ast.Expr) and _moves(stmt.value, name):
            last = stmt
        elif _binds(stmt, name):
            last = None
    return last


def last_assignment(name: str, frame: FailedFrame) -> ast.Assign | None:
    """The statement that surely gave a name, or what holds it, its value at the failing line."""
    last: ast.stmt | None = None
    for stmt in _before(frame.failed):
        last = stmt if _binds(stmt, name) else last
    if last is None and name.endswith("]"):
        return last_assignment(name[: name.rindex("[")], frame)
    plain = isinstance(last, ast.Assign) and name in [ast.unparse(t) for t in last.targets]
    return last if plain and isinstance(last, ast.Assign) else None


def _before(failed: ast.AST | None) -> list[ast.stmt]:
    """The statements that surely ran before a node: those above it in its own blocks."""
    found: list[ast.stmt] = []
    for inner, outer in pairwise([failed, *parents(failed)] if failed is not None else []):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(outer, name, None)
            if isinstance(block, list) and inner in block:
                found = block[: block.index(inner)] + found
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            break
        if isinstance(outer, (ast.For, ast.AsyncFor)):
            found = [ast.Assign([outer.target], outer.iter, lineno=outer.lineno), *found]
    return found


def _binds(stmt: ast.stmt, name: str) -> bool:
    return any(
        isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node) == name
        for node in ast.walk(stmt)
    )


def _moves(node: ast.expr, name: str) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr in _MOVES and ast.unparse(node.func.value) == name
