"""What the user meant to move, and did not."""

import ast
from itertools import pairwise

from gpumagic.mismatch.fix.edits import function_of
from gpumagic.mismatch.read.operand import Part
from gpumagic.usercode.frames import Place, parents
from gpumagic.usercode.values import of_function

_MOVES = ("to", "cuda", "cpu")


def not_assigned(name: str, place: Place) -> ast.Expr | None:
    """The statement `x.to(…)` whose result nobody keeps, on the way to the failing line."""
    nodes = place.nodes()
    if len(nodes) != 1:
        return None
    failing = [nodes[0], *parents(nodes[0])]
    last: ast.Expr | None = None
    for stmt in _before(failing):
        if isinstance(stmt, ast.Expr) and _moves(stmt.value, name):
            last = stmt
        elif _binds(stmt, name):
            last = None
    return last


def last_assignment(name: str, place: Place) -> ast.Assign | None:
    """The statement that surely gave a name the value that it had at the failing line."""
    nodes = place.nodes()
    last: ast.stmt | None = None
    for stmt in _before([nodes[0], *parents(nodes[0])]) if len(nodes) == 1 else ():
        last = stmt if _binds(stmt, name) else last
    plain = isinstance(last, ast.Assign) and name in [ast.unparse(t) for t in last.targets]
    return last if plain and isinstance(last, ast.Assign) else None


def loaded(part: Part, place: Place) -> tuple[ast.Assign, ast.Call] | None:
    """The statement and the `torch.load` that it comes from, as it was saved."""
    outer = place.scope.outer.items()
    names = [part.key, *(n for n, held in outer if part.value is not None and held is part.value)]
    for name in names:
        found = _origin(name, place)
        while found is not None:
            node = found.value
            while (inner := _within(node, place)) is not None:
                node = inner
            if isinstance(node, ast.Call) and _loads(node, place):
                return found, node
            last, found = found, _origin(node.id, place) if isinstance(node, ast.Name) else None
            found = found if found is None or found.lineno < last.lineno else None
    return None


def _loads(node: ast.Call, place: Place) -> bool:
    function = place.scope.value(node.func)
    home = str(of_function(function, "__module__"))
    return of_function(function, "__name__") == "load" and home.startswith("torch")


def _within(node: ast.expr, place: Place) -> ast.expr | None:
    """What an item, an attribute or a method's result is of, if that leaves it where it is."""
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return node.value
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    moved = node.func.attr in _MOVES or _loads(node, place)
    return None if moved else node.func.value


def _origin(name: str, place: Place) -> ast.Assign | None:
    """The statement that gave a name its value: on the way here, or the only one of the file."""
    while (found := last_assignment(name, place)) is None and name.endswith("]"):
        name = name[: name.rindex("[")]
    if found is not None or place.tree is None:
        return found
    if not place.at_top and name in (*place.code.co_varnames, *place.code.co_freevars):
        return None
    every = [n for n in ast.walk(place.tree) if isinstance(n, ast.stmt) and _is_assignment(n, name)]
    own = [n for n in every if "." in name or isinstance(function_of(n), ast.Module)]
    return own[0] if len(own) == 1 and isinstance(own[0], ast.Assign) else None


def _is_assignment(stmt: ast.stmt, name: str) -> bool:
    return isinstance(stmt, ast.Assign) and name in [ast.unparse(t) for t in stmt.targets]


def _before(failing: list[ast.AST]) -> list[ast.stmt]:
    """The statements that surely ran before a node: those above it in its own blocks."""
    found: list[ast.stmt] = []
    for inner, outer in pairwise(failing):
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
