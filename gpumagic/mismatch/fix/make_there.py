"""Make a tensor on the right device where it is made, rather than move it each time.

So it is done with what a function makes for itself, and with what is made before a loop that adds
to it; nowhere where the rest of the code would then fail.
"""

import ast
from dataclasses import replace

import torch
from torch import Tensor

from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.later_uses import meets_others, named_in
from gpumagic.mismatch.fix.site import Edit, Site, moving, written_device
from gpumagic.mismatch.read.expressions import FACTORIES, Reader
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.syntax import function_of, loops_around, parents, statement, uses
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import full

_LIKE = ("empty", "ones", "rand", "randn", "zeros")


def make_there(site: Site, target: str) -> Fix | None:
    """The device in the one call that made what is odd; None where that is not better."""
    frame, reader = site.frame, Reader(site.frame)
    parts = {p.key: p for odd in site.odd for p in named_in(odd, reader) if p.device == odd.device}
    if len(parts) != 1 or len(site.odd) != 1:
        return None
    (part,) = parts.values()
    made = maker(part, frame, site.node, target, written=part is site.fixed)
    if made is None:
        return None
    device = written_device(Site(frame, made, [], anchors=site.anchors), target, before=True)
    return Edit(frame, made, replaced=told(made.value, frame, device, target)).fix(0)


def maker(
    part: Part, frame: FailedFrame, node: ast.AST, target: str, *, written: bool
) -> ast.Assign | None:
    """The statement whose call is to be told the device."""
    scope, reader = function_of(node), Reader(frame)
    if scope is None or part.device != "cpu" or part.text in frame.parameters:
        return None
    stmts = [s for s in ast.walk(scope) if isinstance(s, ast.Assign) and function_of(s) is scope]
    stmts = [s for s in stmts if ast.unparse(s.targets[0]) == part.text]
    made = [s for s in stmts if not uses(s.value, part.text)]
    call = reader.part(made[0].value) if len(made) == 1 else None
    if call is None or not call.factory:
        return None
    deeper = len(loops_around(node)) > len(loops_around(made[0]))
    adds = written or (deeper and statement(node) in stmts)
    host = any(_goes_to_numpy(use) for use in uses(scope, part.text))
    if host or (frame.at_top and not adds):
        return None
    starts = ((call.node, replace(call, devices=part.devices)), (node, part))
    return None if any(meets_others(frame, *start, target) for start in starts) else made[0]


def _goes_to_numpy(node: ast.expr) -> bool:
    names = [n.attr for n in parents(node) if isinstance(n, ast.Attribute)]
    return "numpy" in names and "cpu" not in names


def told(node: ast.expr, frame: FailedFrame, device: str, target: str) -> list[tuple[ast.AST, str]]:
    """The calls in an expression that make tensors, each told where."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and _is_factory(n)]
    return [(call, _made_on(call, frame, device, target)) for call in calls]


def _is_factory(node: ast.Call) -> bool:
    name = ast.unparse(node.func).rpartition(".")[2]
    known = name in FACTORIES or name.endswith("_like") or name.startswith("new_")
    return known and all(keyword.arg != "device" for keyword in node.keywords)


def _made_on(node: ast.Call, frame: FailedFrame, device: str, target: str) -> str:
    """A call that makes a tensor, told where; where that is not possible, moved."""
    text = frame.text(node)
    function, given = ast.unparse(node.func), {keyword.arg for keyword in node.keywords}
    name = function.rpartition(".")[2]
    if given & {"generator", "out", None} or not text.endswith(")"):
        return moving(text, device)
    if name in _LIKE and len(node.args) == 1 and not given:
        shape = node.args[0].func if isinstance(node.args[0], ast.Call) else node.args[0]
        if isinstance(shape, ast.Attribute) and shape.attr in ("shape", "size"):
            like = frame.scope.value(shape.value)
            alike = issubclass(type(like), Tensor) and like.dtype == torch.get_default_dtype()
            if alike and full(like.device) == target:
                return f"{function}_like({ast.unparse(shape.value)})"
    inside = text[:-1].rstrip().rstrip(",")
    comma = "" if inside.endswith("(") else ", "
    return f"{inside}{comma}device={device})"
