"""Know where a fix goes, write the device there as its user would, and edit the source."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpumagic.mismatch.expressions import Reader
from gpumagic.mismatch.operand import Part, device_of, flat, full
from gpumagic.mismatch.operation import operation
from gpumagic.mismatch.syntax import function_of, in_own_scope, parents, root
from gpumagic.usercode.frames import FailedFrame

_DEVICE_NAMES = (
    *("device", "dev", "DEVICE", "DEV", "dst", "self.device", "self.dev"),
    *("self.cfg.device", "self.config.device", "cfg.device", "config.device", "args.device"),
)


@dataclass
class Site:
    """A frame, the failing node there, and the operands by their names there."""

    frame: FailedFrame
    node: ast.AST
    odd: list[Part]
    extra: list[Part] = field(default_factory=list)  # what meets the result, and moves along
    anchors: list[Part] = field(default_factory=list)  # one that stays may tell the device
    fixed: Part | None = None  # what is written to, of which a copy would not do


def climb(site: Site, outer: list[FailedFrame]) -> tuple[Site, dict[str, str]]:
    """The site as far out as every operand that moves is the very object that a caller handed over.

    And the operands' names there, by those where it failed, where they differ.
    """
    first = moved = [*site.odd, *site.extra]
    count = len(site.odd)
    for frame in outer:
        node = frame.failed
        if node is None or not all(_is_parameter(part, site.frame) for part in moved):
            break
        done = operation(node, Reader(frame))
        parts = list(done.parts) if done else []
        found = [next((p for p in flat(parts) if p.value is m.value), None) for m in moved]
        above = [part for part in found if part is not None]
        if len(above) < len(moved):
            break
        moved = above
        site = Site(frame, node, moved[:count], moved[count:], parts)
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return site, names


def _is_parameter(part: Part, frame: FailedFrame) -> bool:
    known = part.kind in ("tensor", "object", "module") and part.value is not None
    return known and part.text in frame.parameters and not frame.at_top


def written_device(site: Site, target: str, *, before: bool) -> str:
    """An expression for the device, as its user would write it there."""
    names = [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, before))]
    if isinstance(site.node, ast.stmt):  # a line above: what is bound from there on is not known
        nodes = ast.walk(function_of(site.node) or site.node)
        later = [n for n in nodes if isinstance(n, ast.Name) and n.lineno >= site.node.lineno]
        unknown = {n.id for n in later if isinstance(n.ctx, ast.Store)}
        names = [name for name in names if root(name) not in unknown]
    # A variable of the notebook has no place in a class.
    if any(isinstance(node, ast.ClassDef) for node in parents(site.node)):
        names = [name for name in names if root(name) in site.frame.scope.local]
    for name in names:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    return f'"{target}"'


def _at_hand(site: Site, before: bool) -> Iterator[str]:
    """The names in the operands."""
    for part in [*site.anchors, *site.odd]:
        for node in ast.walk(part.node):
            hidden = in_own_scope(node) and (before or not in_own_scope(part.node))
            if isinstance(node, (ast.Name, ast.Attribute)) and not hidden:
                yield ast.unparse(node)


def moving(text: str, device: str) -> str:
    """`text` with what brings it to a device put after it."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def can_precede(frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether a line put before `stmt` runs each time just before what is in it."""
    line = frame.source.splitlines()[stmt.lineno - 1]
    if line.encode()[: stmt.col_offset].strip():
        return False  # `if ready: y = net(x)`, `a; b`
    if line.lstrip().startswith("elif") or isinstance(stmt, (ast.While, ast.ClassDef)):
        return False
    return not isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef))
