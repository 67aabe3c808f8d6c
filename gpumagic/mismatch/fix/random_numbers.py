"""Explain random numbers: a generator on another device than what it is to draw.

A generator is state: made anew in a loop, or in a function that runs again, it would draw the same
numbers each time. So it is made where it was made, or once before the outermost loop; else nowhere.
"""

import ast

import torch

from gpumagic.mismatch.explanation import Explanation, Fix
from gpumagic.mismatch.fix.edit import Edit
from gpumagic.mismatch.read.expressions import Reader, arguments, is_torch
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operand_rows import expression, named, row
from gpumagic.mismatch.read.syntax import function_of, statement
from gpumagic.usercode.frames import FailedFrame


def for_generator(frame: FailedFrame, outer: list[FailedFrame]) -> Explanation | None:
    """A generator on another device than the numbers that it is to draw."""
    node, reader = frame.failed, Reader(frame)
    if node is None or frame.scope.name("torch") is not torch:
        return None
    found = arguments(node) if isinstance(node, ast.Call) else []
    parts = [p for a in found if (p := reader.part(a))]
    given = [p for p in parts if p.kind == "generator"]
    if len(given) != 1 or not isinstance(node, ast.Call):
        return None
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
