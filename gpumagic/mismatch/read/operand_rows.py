"""Parts as the rows of an explanation: words and numbers, no tensors."""

import ast

from gpumagic.mismatch.explanation import Operand
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part, bytes_of, tensors_of
from gpumagic.usercode.frames import Place, label
from gpumagic.usercode.values import full

_SHOWN = 3


def expression(place: Place, node: ast.AST) -> tuple[str, int, str, str]:
    """What an explanation begins with: the expression, its line and its file."""
    filename = place.filename
    return place.text(node), getattr(node, "lineno", place.line), filename, label(filename)


def listed(parts: list[tuple[Part, bool]]) -> list[tuple[Part, bool]]:
    """Parts and whether each is odd; of a long list of tensors the first few, odd ones first."""
    groups: dict[int, list[tuple[Part, bool]]] = {}
    for part, odd in parts:
        groups.setdefault(id(part.node), []).append((part, odd))
    shown = []
    for group in groups.values():
        if len(group) > 2 * _SHOWN:
            few = [pair for pair in group if pair[1]][:_SHOWN]
            few += [pair for pair in group if not pair[1]][:1]
            group = [pair for pair in group if pair in few]
        shown += group
    return shown


def row(part: Part, odd: bool) -> Operand:
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
    leaves = [p for p in found.values() if not _is_part_of_another(p, found)]
    if plain and leaves:
        return [(leaf, odd) for leaf in leaves]
    return [(part, odd), *((leaf, False) for leaf in leaves)]


def _is_method(node: ast.Call, reader: Reader) -> bool:
    if not isinstance(node.func, ast.Attribute):
        return False
    owner = reader.part(node.func.value)
    moves = node.func.attr in ("to", "cuda", "cpu")
    return owner is not None and owner.kind in ("tensor", "made") and not moves


def _is_part_of_another(part: Part, found: dict[str, Part]) -> bool:
    return any(
        key != part.key and key.startswith((f"{part.key}.", f"{part.key}[")) for key in found
    )


def inside(part: Part, target: str) -> list[Operand]:
    """The tensors of a module that are not where the others are."""
    if part.kind != "module" or part.value is None or len(part.devices) < 2:
        return []
    rows = []
    for path, tensor in tensors_of(part.value):
        device = full(tensor.device)
        if device != target:
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(int(n) for n in tensor.shape)
            about = f"{dtype}[{', '.join(map(str, shape))}]"
            name = f"{part.text}.{path}"
            rows.append(Operand(name, (device,), bytes_of(tensor), dtype, shape, about, odd=True))
    return rows[:_SHOWN]
