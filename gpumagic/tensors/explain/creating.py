"""The cheapest fix of all: to make a tensor where it is needed moves nothing."""

import ast

from gpumagic.tensors.explain.edits import Edit, function_of, statement
from gpumagic.tensors.explain.explanation import Fix
from gpumagic.tensors.explain.moving_tensors import with_device
from gpumagic.tensors.explain.parts import Part
from gpumagic.tensors.explain.reader import FACTORIES, is_torch
from gpumagic.tensors.explain.site import Site, written_device
from gpumagic.tensors.explain.values import of_function

_COPIES = ("tensor", "as_tensor")


def create_there(part: Part, site: Site, target: str, other: int | None) -> Fix | None:
    """`device=` in the one statement of the same function that makes `part`.

    None unless the name stands for nothing else in the function, and is not used before it fails.
    """
    function, failing = function_of(site.node), statement(site.node)
    if part.kind != "tensor" or not isinstance(part.node, ast.Name) or failing is None:
        return None
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    names = [n for n in ast.walk(function) if isinstance(n, ast.Name) and n.id == part.node.id]
    stores = [n for n in names if not isinstance(n.ctx, ast.Load)]
    made = statement(stores[0]) if len(stores) == 1 else None
    if not isinstance(made, ast.Assign) or made.targets != stores:
        return None
    if any(n.lineno < failing.lineno for n in names if n is not stores[0]):
        return None
    call = made.value
    if not isinstance(call, ast.Call) or part.text in site.place.parameters:
        return None
    maker = site.place.scope.value(call.func)
    name = of_function(maker, "__name__")
    if not is_torch(maker) or name not in FACTORIES or name in _COPIES:
        return None
    given = {keyword.arg for keyword in call.keywords}
    if given & {"device", "generator", "out", "pin_memory", None}:
        return None
    # An operand that is the function's argument is known there already; another may not be.
    known = [p for p in site.anchors if p.text.split(".")[0] in site.place.parameters]
    there = Site(site.place, site.node, [part], known)
    device = written_device(there, target, before=True)
    edit = Edit(site.place, made)
    edit.replaced.append((call, with_device(call, site.place.text(call), device)))
    return edit.fix(0, other)
