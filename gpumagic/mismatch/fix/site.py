"""Know where a fix goes, and write the device there as its user would."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part
from gpumagic.mismatch.read.operation import operation
from gpumagic.mismatch.read.syntax import function_of, in_own_scope, root, statement
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import device_of, full

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
    anchors: list[Part] = field(default_factory=list)  # one that stays may tell the device
    fixed: Part | None = None  # what is written to, of which a copy would not do


def parts_of(frame: FailedFrame, node: ast.AST) -> list[Part]:
    """The operands of a node."""
    done = operation(node, Reader(frame))
    return list(done.parts) if done else []


def written_device(site: Site, target: str, *, before: bool) -> str:
    """An expression for the device, as its user would write it there."""
    for name in [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, before))]:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target and _is_known(name, site):
            return name
    return f'"{target}"'


def _at_hand(site: Site, before: bool) -> Iterator[str]:
    """The names in the operands, and the arguments that the function is always called with."""
    for part in [*site.anchors, *site.odd]:
        for node in ast.walk(part.node):
            hidden = in_own_scope(node) and (before or not in_own_scope(part.node))
            if isinstance(node, (ast.Name, ast.Attribute)) and not hidden:
                yield ast.unparse(node)
    function = function_of(site.node)
    if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
        given = [*function.args.posonlyargs, *function.args.args]
        yield from [a.arg for a in given[: len(given) - len(function.args.defaults)]]


def _is_known(name: str, site: Site) -> bool:
    """Whether a name stands there for what it stood for where it failed."""
    stmt, function = statement(site.node), function_of(site.node)
    if stmt is None or function is None:
        return False
    first, last = sorted((stmt.lineno, site.frame.line))
    return not any(
        isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Store)
        and node.id == root(name)
        and first <= node.lineno < last
        for node in ast.walk(function)
    )


def moving(text: str, device: str) -> str:
    """`text` with what brings it to a device put after it."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"
