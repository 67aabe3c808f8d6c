"""The cheapest fix of all: to make a tensor where it is needed moves nothing."""

import ast
from dataclasses import replace

from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.edits import Edit, function_of, statement
from gpumagic.mismatch.fix.fix_tensors import with_device
from gpumagic.mismatch.fix.site import Site, written_device
from gpumagic.mismatch.read.expressions import FACTORIES, is_torch
from gpumagic.mismatch.read.operand import Part
from gpumagic.usercode.frames import Place, parents
from gpumagic.usercode.values import of_function

_COPIES = ("tensor", "as_tensor")


def maker(part: Part, place: Place) -> ast.Call | None:
    """The one call of the same code that makes it, and that takes `device=`.

    None unless the name stands for nothing else there, and is not used before it fails.
    """
    part = part.source or part
    function, failing = function_of(part.node), statement(part.node)
    if part.kind != "tensor" or not isinstance(part.node, ast.Name) or failing is None:
        return None
    if isinstance(function, ast.Lambda) or function is None or part.text in place.parameters:
        return None
    if isinstance(function, ast.Module) and not _is_written(part.node):
        return None  # data, which may well come from a file in its user's real code
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == part.node.id]
    stores = [n for n in names if not isinstance(n.ctx, ast.Load)]
    stores = [n for n in stores if not isinstance(statement(n), ast.AugAssign)]
    made = statement(stores[0]) if len(stores) == 1 else None
    if not isinstance(made, ast.Assign) or made.lineno > failing.lineno:
        return None
    if any(made.lineno < n.lineno < failing.lineno for n in names):
        return None
    call = _given(made, stores[0])
    function_called = place.scope.value(call.func) if isinstance(call, ast.Call) else None
    name = of_function(function_called, "__name__")
    if not is_torch(function_called) or name not in FACTORIES or name in _COPIES:
        return None
    given = {keyword.arg for keyword in call.keywords} if isinstance(call, ast.Call) else set()
    takes_none = given & {"device", "generator", "out", "pin_memory", None}
    return call if isinstance(call, ast.Call) and not takes_none else None


def _given(stmt: ast.Assign, name: ast.Name) -> ast.expr | None:
    """What a statement gives a name: `x = …`, or its own part of `x, n = …, 0`."""
    (target, *more), value = stmt.targets, stmt.value
    if target is name and not more:
        return value
    if more or not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return None
    same = len(target.elts) == len(value.elts) and name in target.elts
    return value.elts[target.elts.index(name)] if same else None


def _is_written(node: ast.Name) -> bool:
    parent = next(parents(node), None)
    in_place = isinstance(parent, ast.Attribute) and parent.attr.endswith("_")
    out = isinstance(parent, ast.keyword) and parent.arg == "out"
    return isinstance(node.ctx, ast.Store) or in_place or out


def create_there(part: Part, site: Site, target: str, other: int | None) -> Fix | None:
    """`device=` in the statement that makes `part`."""
    made = maker(part, site.place)
    stmt = statement(made) if made is not None else None
    if made is None or stmt is None:
        return None
    there = Site(site.place, made, [replace(part, node=made)], site.anchors)
    device = written_device(there, target, before=True)
    edit = Edit(site.place, stmt)
    edit.replaced.append((made, with_device(made, site.place.text(made), device)))
    return edit.fix(0, other)
