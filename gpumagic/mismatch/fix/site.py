"""Where a fix goes, and the device as its user would write it there."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

from torch import Tensor

from gpumagic.mismatch.fix.edits import SCOPES, function_of, in_own_scope, statement
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operation import operation
from gpumagic.usercode.frames import Place, parents
from gpumagic.usercode.values import MISSING, device_of, full

_PLAIN = ("device", "dev", "DEVICE", "DEV", "dst", "self.device", "self.dev")
_DEVICE_NAMES = (
    *_PLAIN,
    *(f"{c}.device" for c in ("self.cfg", "self.config", "cfg", "config", "args")),
)


@dataclass
class Site:
    """A place, the failing node there, and the operands by their names there."""

    place: Place
    node: ast.AST
    odd: list[Part]
    anchors: list[Part] = field(default_factory=list)
    for_good: bool = False  # the names are moved, never where they stand
    fixed: Part | None = None  # what is written to, of which a copy would not do


def written_device(site: Site, target: str, *, before: bool) -> str:
    """An expression for the device, as its user would write it there."""
    for name in _DEVICE_NAMES:
        value = site.place.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if value is not MISSING and type(value) is not int else None
        if device is not None and full(device) == target and _is_known(name, site):
            return name
    for anchor in site.anchors:
        part = anchor.source or anchor
        plain = isinstance(part.node, (ast.Name, ast.Attribute)) and part.text.isidentifier()
        plain = plain or (part.kind == "tensor" and isinstance(part.node, ast.Attribute))
        hidden = before and in_own_scope(part.node)
        known = _is_known(part.text, site)
        if part.kind == "tensor" and part.device == target and plain and known and not hidden:
            return f"{part.text}.device"
    for name in _at_hand(site, before):
        value = site.place.scope.value(ast.parse(name, mode="eval").body)
        there = issubclass(type(value), Tensor) and full(value.device) == target
        if there and _is_known(name, site):
            return f"{name}.device"
    return f'"{target}"'


def _at_hand(site: Site, before: bool) -> Iterator[str]:
    """The names in the operands, and the arguments that the function is always called with."""
    for part in [*site.anchors, *site.odd]:
        for node in ast.walk(part.node):
            nested = any(isinstance(p, SCOPES) for p in _between(node, part.node))
            hidden = nested or (before and in_own_scope(node))
            if isinstance(node, (ast.Name, ast.Attribute)) and not hidden:
                yield ast.unparse(node)
    function = function_of(site.node)
    if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = [*function.args.posonlyargs, *function.args.args]
        yield from [a.arg for a in given[: len(given) - len(function.args.defaults)]]


def _between(node: ast.AST, outer: ast.AST) -> Iterator[ast.AST]:
    if node is not outer:
        yield from takewhile(lambda parent: parent is not outer, parents(node))


def _is_known(name: str, site: Site) -> bool:
    """Whether a name stands there for what it stood for where it failed."""
    root = name.split(".")[0].split("[")[0]
    stmt, function = statement(site.node), function_of(site.node)
    if stmt is None or function is None:
        return False
    first, last = sorted((stmt.lineno, site.place.line))
    return not any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id == root
        and first <= node.lineno < last
        for node in ast.walk(function)
    )


def moving(text: str, device: str) -> str:
    """`text` with what brings it to a device put after it."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def parts_of(place: Place, node: ast.AST) -> list[Part]:
    done = operation(node, Reader(place.scope, place.text))
    return list(done.parts) if done else []
