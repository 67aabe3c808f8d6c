"""Where a fix goes, and the device as its user would write it there."""

import ast
from dataclasses import dataclass, field

from gpumagic.tensors.explain.edits import in_own_scope
from gpumagic.tensors.explain.frames import Place
from gpumagic.tensors.explain.operations import operation
from gpumagic.tensors.explain.parts import Part
from gpumagic.tensors.explain.reader import Reader
from gpumagic.tensors.explain.values import MISSING, device_of, full

_DEVICE_NAMES = ("device", "dev", "DEVICE", "DEV", "dst")


@dataclass
class Site:
    """A place, the failing node there, and the operands by their names there."""

    place: Place
    node: ast.AST
    odd: list[Part]
    anchors: list[Part] = field(default_factory=list)
    for_good: bool = False  # the names are moved, never where they stand


def written_device(site: Site, target: str, *, before: bool) -> str:
    """An expression for the device, as its user would write it there."""
    for name in _DEVICE_NAMES:
        value = site.place.scope.name(name)
        device = device_of(value) if value is not MISSING and type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    for anchor in site.anchors:
        part = anchor.source or anchor
        plain = isinstance(part.node, (ast.Name, ast.Attribute)) and part.text.isidentifier()
        plain = plain or (part.kind == "tensor" and isinstance(part.node, ast.Attribute))
        hidden = before and in_own_scope(part.node)
        if part.kind == "tensor" and part.device == target and plain and not hidden:
            return f"{part.text}.device"
    return f'"{target}"'


def moving(text: str, device: str) -> str:
    """`text` with what brings it to a device put after it."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def parts_of(place: Place, node: ast.AST) -> list[Part]:
    done = operation(node, Reader(place.scope, place.text))
    return list(done.parts) if done else []
