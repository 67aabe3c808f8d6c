"""Random numbers: a generator on another device than what it is to draw.

A generator is state: made anew in a loop, or in a function that runs again, it would draw the same
numbers each time. So it is made where it was made, or once before the outermost loop; else nowhere.
"""

import ast
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpumagic.mismatch.check.loops import around, stored
from gpumagic.mismatch.explanation import Explanation, Fix
from gpumagic.mismatch.fix.edits import Edit, can_precede, function_of, statement
from gpumagic.mismatch.read.expressions import Reader, arguments, is_torch
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operand_rows import expression, named, row
from gpumagic.usercode.frames import Place
from gpumagic.usercode.values import full, own


def for_generator(place: Place, outer: list[Place]) -> Explanation | None:
    """A generator on another device than the numbers that it is to draw."""
    nodes = place.nodes()
    if len(nodes) != 1 or place.scope.name("torch") is not torch:
        return None
    node, reader = nodes[0], Reader(place.scope, place.text)
    found = arguments(node) if isinstance(node, ast.Call) else []
    parts = [p for a in found if (p := reader.part(a))]
    given = [p for p in parts if p.kind == "generator"]
    if len(given) != 1 or not isinstance(node, ast.Call):
        return _shuffled(place, outer, node)
    (part,) = given
    target = _drawn_on(node, reader, part)
    if target is None or target == part.device:
        return None
    if part.value is None:
        fix = _made_within(part, place, target)
    else:
        places = [place, *outer]
        fix = _made_there(part, node, target, places) or _made_once(part, node, target, places)
    drawn = [p for p in parts if p.kind in ("tensor", "made")]
    rows = [row(shown, False) for p in drawn for shown, _ in named(p, reader, False)]
    why = f"numbers for {target} are drawn by a generator on {target}"
    return Explanation(*expression(place, node), (*rows, row(part, True)), fix, why)


def _drawn_on(node: ast.Call, reader: Reader, part: Part) -> str | None:
    for keyword in node.keywords:
        if keyword.arg == "device":
            return reader._device(keyword.value, "")
    if isinstance(node.func, ast.Attribute):
        owner = reader.part(node.func.value)
        if owner is not None and owner.kind in ("tensor", "made"):
            return owner.device
    tensors = [reader.part(a) for a in arguments(node)]
    devices = {p.device for p in tensors if p is not None and p.kind in ("tensor", "made")}
    if len(devices) == 1:
        return devices.pop()
    return "cpu" if part.device != "cpu" else None


def _maker(node: ast.expr) -> ast.Call | None:
    """The call that makes a generator, where nothing but that and its seeding is written."""
    while isinstance(node, ast.Call):
        if ast.unparse(node.func) == "torch.Generator":
            return node
        if not isinstance(node.func, ast.Attribute) or node.func.attr != "manual_seed":
            return None
        node = node.func.value
    return None


def _made_within(part: Part, place: Place, target: str) -> Fix | None:
    made, stmt = _maker(part.node), statement(part.node)
    if made is None or stmt is None:
        return None
    return Edit(place, stmt, replaced=[(made, f'torch.Generator("{target}")')]).fix(0, None)


def _made_there(part: Part, node: ast.Call, target: str, places: list[Place]) -> Fix | None:
    """The device in the one statement that made it, where all that it draws is on `target`."""
    for place in places:
        nodes = place.nodes()
        tree, scope = place.tree, function_of(nodes[0]) if nodes else None
        found = []
        for stmt in ast.walk(tree) if tree is not None else ():
            if not isinstance(stmt, ast.Assign) or len(stmt.targets) != 1:
                continue
            name = stmt.targets[0]
            here = function_of(stmt) is scope if isinstance(name, ast.Name) else True
            if here and place.scope.value(name) is part.value:
                found.append((stmt, ast.unparse(name), _maker(stmt.value)))
        if len(found) != 1 or tree is None:
            continue
        stmt, text, made = found[0]
        if made is not None and not _draws_elsewhere(text, tree, node, target, part, place):
            return Edit(place, stmt, replaced=[(made, f'torch.Generator("{target}")')]).fix(0, None)
    return None


def _made_once(part: Part, node: ast.Call, target: str, places: list[Place]) -> Fix | None:
    """A line in the cell, before its outermost loop, that binds the name to one on `target`."""
    found = _in_the_cell(part, places)
    if found is None or not found[1].isidentifier():
        return None
    place, text, stmt = found
    body = place.tree.body if place.tree else []
    rest = ast.Module([s for s in body if _last(s) >= stmt.lineno], [])
    if _draws_elsewhere(text, rest, node, target, part, place):
        return None
    line = f'{text} = torch.Generator("{target}").manual_seed({text}.initial_seed())'
    return Edit(place, stmt, before=[line]).fix(0, None)


def _last(stmt: ast.stmt) -> int:
    return stmt.end_lineno or stmt.lineno


def _in_the_cell(part: Part, places: list[Place]) -> tuple[Place, str, ast.stmt] | None:
    """What a cell or script calls it, and the statement there before which a line runs once."""
    place = places[0]
    top = next((p for p in places if p.at_top), None)
    nodes = top.nodes() if top is not None else []
    if top is None or len(nodes) != 1:
        return None
    texts = [part.text]
    if place is not top:
        code = place.code
        free = part.text not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
        given = [a for n in ast.walk(nodes[0]) if isinstance(n, ast.Call) for a in arguments(n)]
        texts = [part.text] if free else [ast.unparse(a) for a in given]
        if not free and not any(part.text in p.parameters for p in places):
            return None
    same = [t for t in texts if top.scope.value(ast.parse(t, mode="eval").body) is part.value]
    inner = statement(nodes[0])
    loops = around(inner) if inner is not None else []
    stmt = loops[-1] if loops else inner
    if not same or stmt is None or not _stands_before(top, stmt):
        return None
    root = same[0].split(".")[0].split("[")[0]
    return None if loops and root in stored(stmt) else (top, same[0], stmt)


def _stands_before(place: Place, stmt: ast.stmt) -> bool:
    return isinstance(stmt, ast.While) or can_precede(place, stmt, stmt)


def _draws_elsewhere(
    text: str, tree: ast.AST, node: ast.Call, target: str, part: Part, place: Place
) -> bool:
    """Whether torch draws from it anywhere else than on `target`, or that is not certain."""
    reader = Reader(place.scope, place.text)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or call is node or _span(call) == _span(node):
            continue
        if text not in [ast.unparse(a) for a in arguments(call)]:
            continue
        function = place.scope.value(call.func)
        ours = is_torch(function) or str(getattr(function, "__module__", "")).startswith("torch")
        by_name = any(k.arg == "generator" for k in call.keywords)
        if (ours or by_name) and _drawn_on(call, reader, part) != target:
            return True
    return False


def _span(node: ast.expr) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _shuffled(place: Place, outer: list[Place], node: ast.AST) -> Explanation | None:
    """A loader that shuffles, under a default device."""
    loaders = []
    for inner in ast.walk(node):
        value = place.scope.value(inner) if isinstance(inner, (ast.Name, ast.Attribute)) else None
        if isinstance(inner, ast.expr) and issubclass(type(value), DataLoader):
            loaders.append((inner, value))
    default = full(torch.get_default_device())
    if len(loaders) != 1:
        return None
    name, loader = loaders[0]
    generator: Any = own(loader).get("generator")
    if default == "cpu" or (generator is not None and full(generator.device) == default):
        return None
    about = "DataLoader, shuffled by a generator"
    part = Part(name, place.text(name), "generator", ("cpu",), about=about, value=loader)
    fix = None
    if found := _in_the_cell(part, [place, *outer]):
        top, text, stmt = found
        line = f'{text}.generator = {text}.sampler.generator = torch.Generator("{default}")'
        fix = Edit(top, stmt, before=[line]).fix(0, None)
    why = f"the default device is {default}, so the loader draws its order there"
    return Explanation(*expression(place, node), (row(part, True),), fix, why)
