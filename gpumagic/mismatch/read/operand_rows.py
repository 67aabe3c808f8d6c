"""Describe parts as the rows of an explanation: words and numbers, no tensors."""

import ast
from itertools import groupby

from gpumagic.mismatch.explanation import Operand
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part, describe, tensors_of
from gpumagic.usercode.files import label
from gpumagic.usercode.frames import FailedFrame

_SHOWN = 3


def expression(frame: FailedFrame, node: ast.AST) -> tuple[str, int, str, str]:
    """What an explanation begins with: the expression, its line and its file."""
    line, filename = getattr(node, "lineno", frame.line), frame.filename
    return frame.text(node), line, filename, label(filename)


def listed(parts: list[tuple[Part, bool]]) -> list[tuple[Part, bool]]:
    """Parts and whether each is odd; of a long list of tensors the first few, odd ones first."""
    shown = []
    for _, group in groupby(parts, key=lambda pair: id(pair[0].node)):
        pairs = list(group)
        if len(pairs) > 2 * _SHOWN:
            pairs = [p for p in pairs if p[1]][:_SHOWN] + [p for p in pairs if not p[1]][:1]
        shown += pairs
    return shown


def row(part: Part, odd: bool) -> Operand:
    """A part as an operand of the explanation."""
    return Operand(
        part.text, part.devices, part.nbytes, part.dtype, part.shape, part.about, odd=odd
    )


def named(part: Part, reader: Reader, odd: bool) -> list[tuple[Part, bool]]:
    """A result that has gone, by the names of the tensors that it was made from.

    Where operators, indices and methods made it, those tensors stand for it; a call's result is
    shown itself, and then what has a name in it.
    """
    if part.kind != "made":
        return [(part, odd)]
    found: dict[str, Part] = {}
    plain = True
    for node in ast.walk(part.node):
        if isinstance(node, ast.Call) and not _is_method(node, reader):
            plain = False
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            inner = reader.part(node)
            known = inner is not None and inner.kind in ("tensor", "module")
            if inner is not None and known and inner.device == part.device and not inner.scalar:
                found[inner.key] = inner
    if plain and found:
        return [(leaf, odd) for leaf in found.values()]
    return [(part, odd), *((leaf, False) for leaf in found.values())]


def _is_method(node: ast.Call, reader: Reader) -> bool:
    """Whether it calls a tensor's method that leaves the tensor's data where it is."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr in ("to", "cuda", "cpu"):
        return False
    owner = reader.part(node.func.value)
    return owner is not None and owner.kind in ("tensor", "made")


def inside(part: Part, target: str) -> list[Operand]:
    """The first tensors of a module on several devices that are not where the others are."""
    if part.kind != "module" or part.value is None or len(part.devices) < 2:
        return []
    tensors = tensors_of(part.value)
    parts = [describe(tensor, part.node, f"{part.text}.{path}") for path, tensor in tensors]
    return [row(p, True) for p in parts if p is not None and p.device != target][:_SHOWN]
