"""The operation that failed: its operands, and which of them cannot be the one to move."""

import ast
from dataclasses import dataclass, replace
from typing import Any

from torch.distributions import Distribution

from gpumagic.mismatch.read.expressions import Reader, arguments
from gpumagic.mismatch.read.messages import Message, agree
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.usercode.frames import Place, parents
from gpumagic.usercode.values import MISSING, Scope


@dataclass(frozen=True)
class Operation:
    """One operator or call of the user's code.

    Attributes
    ----------
    node : ast.AST
    parts : tuple of Part
        Its operands; groups not taken apart.
    fixed : Part or None
        The operand that is written to, and so stays where it is.
    calls_module : bool
        Whether it calls a module, or a method of one.
    indices : tuple of Part
        Operands that index another, which may be on the CPU.
    """

    node: ast.AST
    parts: tuple[Part, ...]
    fixed: Part | None = None
    calls_module: bool = False
    indices: tuple[Part, ...] = ()


def operation(node: ast.AST, reader: Reader) -> Operation | None:
    """A node as an operation, or None if it is none."""
    if isinstance(node, ast.BinOp):
        return _of(node, reader, [node.left, node.right])
    if isinstance(node, ast.AugAssign):
        return _of(node, reader, [node.target, node.value], fixed=0)
    if isinstance(node, ast.Compare):
        return _of(node, reader, [node.left, *node.comparators])
    if isinstance(node, ast.Call):
        return _call(node, reader)
    if isinstance(node, ast.Subscript):
        return _subscript(node, reader)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
        if isinstance(target, ast.Subscript):
            return _subscript(target, reader)
        if isinstance(target, ast.Attribute):
            return _of(node, reader, [target.value, node.value], fixed=0)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        parent = next(parents(node))
        if isinstance(parent, ast.Assign):
            return _of(parent, reader, [node.value, parent.value], fixed=0)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return _of(node, reader, [node])  # `for x in loader`: what is iterated
    return None


def _of(
    node: ast.AST, reader: Reader, operands: list[ast.expr], fixed: int | None = None
) -> Operation | None:
    parts = [reader.part(operand) for operand in operands]
    stays = parts[fixed] if fixed is not None else None
    found = tuple(part for part in parts if part is not None)
    return Operation(node, found, stays) if found else None


def _subscript(node: ast.Subscript, reader: Reader) -> Operation | None:
    index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    index = [element for element in index if not isinstance(element, ast.Slice)]
    operands: list[ast.expr] = [node.value, *index]
    parent = next(parents(node), None)
    if isinstance(node.ctx, ast.Store) and isinstance(parent, (ast.Assign, ast.AugAssign)):
        operands.append(parent.value)
    done = _of(node, reader, operands, fixed=0)
    if done is None:
        return None
    within = {id(element) for element in index}
    return replace(done, indices=tuple(p for p in done.parts if id(p.node) in within))


def _call(node: ast.Call, reader: Reader) -> Operation | None:
    parts: list[Part] = []
    fixed: Part | None = None
    calls_module = False
    owner = reader.part(node.func)
    if owner is not None and owner.kind == "module":
        parts.append(owner)
        calls_module = True
    elif isinstance(node.func, ast.Attribute):
        receiver = reader.part(node.func.value)
        known = receiver is not None and receiver.kind in _WITH_METHODS
        if receiver is not None and (known or issubclass(type(receiver.value), Distribution)):
            parts.append(receiver)
            calls_module = receiver.kind == "module"
            if node.func.attr.endswith("_") and not node.func.attr.endswith("__"):
                fixed = receiver
        elif receiver is not None and receiver.kind == "unknown":
            value = reader.scope.value(node.func.value)
            if not isinstance(node.func.value, ast.Name) or _may_be_tensor(value):
                parts.append(receiver)
    for argument in arguments(node):
        part = reader.part(argument)
        if part is not None:
            parts.append(part)
    for keyword in node.keywords:
        if keyword.arg == "out":
            fixed = next((part for part in parts if part.node is keyword.value), fixed)
    return Operation(node, tuple(parts), fixed, calls_module) if parts else None


def _may_be_tensor(value: Any) -> bool:
    return value is MISSING


def bound_again(fixed: Part, scope: Scope) -> bool:
    """Whether what is written to is an attribute or an item, which can be bound to a moved one."""
    node = fixed.node
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        node = node.func.value
    if isinstance(node, ast.Subscript):
        return type(scope.value(node.value)) in (dict, list)
    return isinstance(node, ast.Attribute)


@dataclass(frozen=True)
class Conflict:
    """Operands that are not on one device.

    Attributes
    ----------
    leaves : tuple of Part
        Every operand whose device is known, groups taken apart.
    """

    place: Place
    reader: Reader
    operation: Operation
    leaves: tuple[Part, ...]


def conflict(place: Place, message: Message, moved: dict[str, str | None]) -> Conflict | None:
    """The operands of a frame's failing expression, if they explain the message.

    None where that is not certain: fewer than two devices, other devices than the text names, or
    more than one operand that cannot be known.
    """
    reader = Reader(place.scope, place.text, moved)
    found = []
    for node in place.nodes():
        done = operation(node, reader)
        leaves = evidence(done, message, direct=place.direct) if done else None
        if done and leaves:
            found.append(Conflict(place, reader, done, leaves))
    # On Python 3.10 a line may hold several: only where one alone fits is it certain.
    return found[0] if len(found) == 1 else None


def evidence(done: Operation, message: Message, *, direct: bool) -> tuple[Part, ...] | None:
    """The operands that are on several devices, as the message has it; None if it is not so."""
    leaves = [p for p in flat(done.parts) if "meta" not in p.devices]  # has no data, moves nowhere
    if message.kind == "mixed":
        leaves = [p for p in leaves if p not in done.indices or p.device != "cpu"]
    meeting = [part for part in leaves if not part.scalar or part is done.fixed]
    # Scalars of the CPU may meet a GPU's tensors in arithmetic, but not in stack().
    if len({d for part in meeting for d in part.devices}) > 1 or "found at" in message.text:
        leaves = meeting
    known = {d for part in leaves for d in part.devices if part.kind in _WITH_DEVICE}
    unknown = [
        part
        for part in leaves
        if part.kind in ("unknown", "made", "module") and not part.devices and part.value is None
    ]
    if len(known) > 1:
        if not agree(message.devices, frozenset(known)):
            return None
        if not direct and not done.calls_module:
            return None
        return tuple(part for part in leaves if part.devices and part.kind in _WITH_DEVICE)
    if len(known) == 1 and len(unknown) == 1 and direct:
        rest = [d for d in message.devices if not agree(frozenset([d]), frozenset(known))]
        there = [d for d in message.devices if d not in rest]
        if len(rest) == 1 and there and (rest[0] == "cpu" or ":" in rest[0]):
            inferred = _inferred(unknown[0], rest[0])
            return tuple(
                inferred if part is unknown[0] else part
                for part in leaves
                if part is unknown[0] or (part.devices and part.kind in _WITH_DEVICE)
            )
    return None


_WITH_METHODS = ("tensor", "made", "module", "optimizer")
_WITH_DEVICE = ("tensor", "made", "module")


def _inferred(part: Part, device: str) -> Part:
    kind = part.kind if part.kind == "module" else "made"
    return replace(part, kind=kind, devices=(device,))
