"""Explain random numbers: a generator on another device than what it is to draw.

A generator is state: made anew in a loop, or in a function that runs again, it would draw the same
numbers each time. So it is made where it was made, or once before the outermost loop; else nowhere.
"""

import ast
from typing import Any

import torch
from torch.utils.data import DataLoader

from gpumagic.mismatch.explanation import Explanation, Fix
from gpumagic.mismatch.fix.edit import Edit
from gpumagic.mismatch.fix.site import can_precede
from gpumagic.mismatch.read.expressions import Reader, arguments, is_torch
from gpumagic.mismatch.read.named_devices import full
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operand_rows import expression, named, row
from gpumagic.mismatch.read.syntax import function_of, loops_around, root, statement, stored
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import own


def for_generator(frame: FailedFrame, outer: list[FailedFrame]) -> Explanation | None:
    """A generator on another device than the numbers that it is to draw."""
    node, reader = frame.failed, Reader(frame)
    if node is None or frame.scope.name("torch") is not torch:
        return None
    found = arguments(node) if isinstance(node, ast.Call) else []
    parts = [p for a in found if (p := reader.part(a))]
    given = [p for p in parts if p.kind == "generator"]
    if len(given) != 1 or not isinstance(node, ast.Call):
        return _shuffled(frame, outer, node)
    (part,) = given
    target = _drawn_on(node, reader, part)
    if target is None or target == part.device:
        return None
    frames = [frame, *outer]
    if part.value is None:
        fix = _made(part.node, frame, target)
    else:
        fix = _made_there(part, node, target, frames)
    drawn = [p for p in parts if p.kind in ("tensor", "made")]
    rows = [row(shown, False) for p in drawn for shown, _ in named(p, reader, False)]
    why = f"numbers for {target} are drawn by a generator on {target}"
    return Explanation(*expression(frame, node), (*rows, row(part, True)), fix, why)


def _drawn_on(node: ast.Call, reader: Reader, part: Part) -> str | None:
    """The device of the numbers that a call draws."""
    for keyword in node.keywords:
        if keyword.arg == "device":
            return reader.device(keyword.value, "")
    owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    for candidates in (owner, arguments(node)):
        parts = [p for n in candidates if (p := reader.part(n)) and p.kind in ("tensor", "made")]
        if len({p.device for p in parts}) == 1:
            return parts[0].device
    return "cpu" if part.device != "cpu" else None


def _made(node: ast.expr, frame: FailedFrame, target: str) -> Fix | None:
    """The device in the call that makes it, where nothing but that and its seeding is written."""
    made, stmt = node, statement(node)
    while isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and stmt is not None:
        if ast.unparse(made.func) == "torch.Generator":
            return Edit(frame, stmt, replaced=[(made, f'torch.Generator("{target}")')]).fix(0)
        if made.func.attr != "manual_seed":
            return None
        made = made.func.value
    return None


def _made_there(part: Part, node: ast.Call, target: str, frames: list[FailedFrame]) -> Fix | None:
    """The device in the one statement that made it, where all that it draws is on `target`."""
    for frame in frames:
        tree, scope = frame.tree, function_of(frame.candidates[0]) if frame.candidates else None
        found = []
        for stmt in ast.walk(tree) if tree is not None else ():
            if isinstance(stmt, ast.Assign) and len(stmt.targets) == 1:
                (name,) = stmt.targets
                here = function_of(stmt) is scope or not isinstance(name, ast.Name)
                if here and frame.scope.value(name) is part.value:
                    found.append(stmt)
        if len(found) == 1 and tree is not None:
            text = ast.unparse(found[0].targets[0])
            fix = _made(found[0].value, frame, target)
            if fix and not _draws_elsewhere(text, tree, node, target, part, frame):
                return fix
    return None


def _in_the_cell(part: Part, frames: list[FailedFrame]) -> tuple[FailedFrame, str, ast.stmt] | None:
    """What a cell or script calls it, and the statement there before which a line runs once."""
    top = next((frame for frame in frames if frame.at_top), None)
    failed = top.failed if top is not None else None
    inner = statement(failed) if failed is not None else None
    if top is None or failed is None or inner is None:
        return None
    nodes = [part.node, *ast.walk(failed)]
    texts = [ast.unparse(n) for n in nodes if top.scope.value(n) is part.value]
    loops = loops_around(inner)
    stmt = loops[-1] if loops else inner
    if not texts or not (isinstance(stmt, ast.While) or can_precede(top, stmt)):
        return None
    return None if loops and root(texts[0]) in stored(stmt) else (top, texts[0], stmt)


def _draws_elsewhere(
    text: str, tree: ast.AST, node: ast.Call, target: str, part: Part, frame: FailedFrame
) -> bool:
    """Whether torch draws from it anywhere else than on `target`, or that is not certain."""
    reader = Reader(frame)
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or call.lineno == node.lineno:
            continue
        by_name = any(k.arg == "generator" for k in call.keywords)
        draws = by_name or is_torch(frame.scope.value(call.func))
        given = draws and text in [ast.unparse(a) for a in arguments(call)]
        if given and _drawn_on(call, reader, part) != target:
            return True
    return False


def _shuffled(frame: FailedFrame, outer: list[FailedFrame], node: ast.AST) -> Explanation | None:
    """A loader that shuffles, under a default device."""
    names = [n for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))]
    loaders = [n for n in names if issubclass(type(frame.scope.value(n)), DataLoader)]
    default = full(torch.get_default_device())
    if len(loaders) != 1:
        return None
    loader = frame.scope.value(loaders[0])
    generator: Any = own(loader).get("generator")
    if default == "cpu" or (generator is not None and full(generator.device) == default):
        return None
    about = "DataLoader, shuffled by a generator"
    text = frame.text(loaders[0])
    part = Part(loaders[0], text, "generator", ("cpu",), about=about, value=loader)
    fix = None
    if found := _in_the_cell(part, [frame, *outer]):
        top, text, stmt = found
        line = f'{text}.generator = {text}.sampler.generator = torch.Generator("{default}")'
        fix = Edit(top, stmt, [line]).fix(0)
    why = f"the default device is {default}, so the loader draws its order there"
    return Explanation(*expression(frame, node), (row(part, True),), fix, why)
