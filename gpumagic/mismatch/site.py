"""Find the caller that passed the operands of a failed operation, and write a device there."""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gpumagic.mismatch.explanation import trial_on
from gpumagic.mismatch.operand import Part, Reader, device_of, full
from gpumagic.mismatch.operation import Operation, named_in, operation, ran_mixed
from gpumagic.mismatch.sources import only_assignment
from gpumagic.usercode.frames import (
    FailedFrame,
    first_name,
    function_of,
    in_own_scope,
    loops_around,
    parents,
    stored,
)

_DEVICE_NAMES = ("device", "dev", "DEVICE", "self.device", "self.cfg.device", "args.device")


@dataclass(frozen=True)
class Site:
    """Record an operation and the operands to move, as written in the code of one frame."""

    at: Operation
    odd: list[Part]
    extra: list[Part]  # other values to move, which later code combines with the result

    @property
    def frame(self) -> FailedFrame:
        """Return the frame whose code is edited."""
        return self.at.reader.frame


def climb(site: Site, outer: list[FailedFrame]) -> tuple[Site, dict[str, str]]:
    """Return the site in the outermost caller that passed the operands as arguments."""
    # Also return a map from operands at `site` to their names in that caller, if different.
    first = moved = [*site.odd, *site.extra]
    for frame in outer:
        done = operation(frame.failed, Reader(frame)) if frame.failed is not None else None
        made = _made_for(moved, site.frame, frame) if done else []
        above = _given(moved, site.frame, [*done.parts, *made] if done else ())
        if done is None or above is None:
            break
        moved, count = above, len(site.odd)
        site = Site(done, moved[:count], moved[count:])
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return _at_notebook(site, outer), names


def _at_notebook(site: Site, outer: list[FailedFrame]) -> Site:
    """Return the site in the cell's loop, if called functions read the operands as globals."""
    frame = next((each for each in outer if each.at_top), site.frame)
    moved = [*site.odd, *site.extra]
    local = {*site.frame.code.co_varnames, *site.frame.code.co_freevars}
    names = {part.text for part in moved if frame.scope.name(part.text) is part.value}
    if frame is site.frame or frame.failed is None or not loops_around(frame.failed):
        return site
    if len(names) < len(moved) or names & local or any(map(in_own_scope, (p.node for p in moved))):
        return site
    return Site(Operation(Reader(frame), frame.failed, ()), site.odd, site.extra)


def _made_for(moved: list[Part], within: FailedFrame, frame: FailedFrame) -> list[Part]:
    """For a caller's ``x.f(g(y))``, return `x`, and `g(y)` if the result of `g` is an operand."""
    node: Any = frame.failed
    names = within.parameters[1:] if within.parameters[:1] == ("self",) else within.parameters
    if not isinstance(node, ast.Call):
        return []
    given = dict(zip(names, node.args, strict=False)) | {k.arg: k.value for k in node.keywords}
    kept = given.keys() - stored(function_of(within.failed or node) or node)
    calls = ((p, given[p.text]) for p in moved if p.text in kept and within.direct)
    made = (replace(p, node=call, text=frame.text(call), kind="made") for p, call in calls)
    of = [node.func.value] if isinstance(node.func, ast.Attribute) else []
    called = [Part(n, frame.text(n), "object", value=frame.scope.value(n)) for n in of]
    return [*called, *(part for part in made if isinstance(part.node, ast.Call))]


def _given(moved: list[Part], frame: FailedFrame, parts: Iterable[Part]) -> list[Part] | None:
    """Return the caller's expressions for the operands `moved`; None if one was not passed."""
    above = {id(part.value): part for part in reversed([*parts])}
    above.pop(id(None), None)
    found: list[Part] = []
    for part in moved:
        part = _made_of(part, frame)
        name, _, attribute = part.text.partition(".")
        value = frame.scope.name(name) if attribute else part.value
        owner = above.get(id(value))
        if owner is None or name not in frame.parameters or ran_mixed(frame, name):
            return None
        if attribute and (owner.kind != "object" or not attribute.isidentifier()):
            return None
        node: Any = ast.Attribute(owner.node, attribute, ast.Load())
        node.parent = getattr(owner.node, "parent", None)
        inner = replace(part, node=node, text=f"{owner.text}.{attribute}")
        found.append(inner if attribute else owner)
    return found


def _made_of(part: Part, frame: FailedFrame) -> Part:
    """Return the argument from which a function computed an operand; else the operand."""
    made = only_assignment(part.text, frame.failed or part.node)
    value = Reader(frame).part(made.value) if made and part.text not in frame.parameters else None
    named = named_in(replace(value, devices=part.devices) if value else part, Reader(frame))
    # For example, `x` for the operand `x[0]`.
    return named[0] if len(named) == 1 and named[0].kind == "tensor" else part


def written_device(site: Site, target: str, line: ast.stmt, *, inside: bool = False) -> str:
    """Return code for `target`, such as ``x.device``. `inside` allows a comprehension's names."""
    names = [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, inside))]
    unknown = _bound_later(line, site)
    if inside:
        within = (node for node in parents(site.at.node) if isinstance(node, ast.expr))
        unknown -= {name for node in within for name in stored(node)}
    # In a class, use only local names. In a function, also use globals that the function reads.
    in_class = any(isinstance(node, ast.ClassDef) for node in parents(site.at.node))
    if in_class or not site.frame.at_top:
        code = ast.walk(function_of(site.at.node) or line)
        used = {node.id for node in code if isinstance(node, ast.Name) and not in_class}
        unknown |= {*map(first_name, names)} - {*site.frame.scope.local, *used}
    names = [name for name in names if first_name(name) not in unknown]
    # As the last choice, a function names a global of the notebook that it does not read yet.
    names += [n for n in _DEVICE_NAMES[:3] if not in_class and n not in _bound_later(line, site)]
    for name in names:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    if trial_on.get() != target:
        return f'"{target}"'
    there = (p.text for p in site.at.parts if p.kind == "module" and p.devices == (target,))
    module = next((name for name in there if first_name(name) not in unknown), None)
    return f"next({module}.parameters()).device" if module else "torch.get_default_device()"


def _at_hand(site: Site, inside: bool) -> list[str]:
    """Return names of values whose `.device` may be the target, such as operands."""
    nodes = [n for part in [*site.at.parts, *site.odd] for n in ast.walk(part.node)]
    kinds = (ast.Name, ast.Attribute)
    nodes = [n for n in nodes if isinstance(n, kinds) and (inside or not in_own_scope(n))]
    layers = [part.text for part in site.at.parts if part.kind == "module"]
    layers = [f"{name}.weight" for name in layers if trial_on.get() or not site.frame.at_top]
    names = [*map(ast.unparse, nodes), *site.frame.parameters, *layers]
    return [name for name in names if not name.endswith((".grad", ".data"))]


def _bound_later(line: ast.stmt, site: Site) -> set[str]:
    """Return a function's local names that are unbound at `line`, or bound again before `site`."""
    bound = [n for n in ast.walk(function_of(line) or line) if isinstance(n, ast.Name)]
    bound = [n for n in bound if isinstance(n.ctx, ast.Store)]
    again = {n.id for n in bound if line.lineno <= n.lineno < site.at.node.lineno}
    known = {n.id for n in bound if n.lineno < line.lineno} - again | {*site.frame.parameters}
    return {n.id for n in bound} - known
