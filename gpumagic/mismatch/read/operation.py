"""Read the operation that failed: its operands, and which of them is written to."""

import ast
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gpumagic.mismatch.read.expressions import Reader, arguments
from gpumagic.mismatch.read.messages import Message, agree
from gpumagic.mismatch.read.operand import Part, flat, held_by
from gpumagic.mismatch.read.syntax import parents
from gpumagic.usercode.frames import FailedFrame

_WITH_METHODS = ("tensor", "made", "module", "optimizer")
_WITH_DEVICE = ("tensor", "made", "module", "object")


@dataclass(frozen=True)
class Operation:
    """One operator or call of the user's code."""

    node: ast.AST
    parts: tuple[Part, ...]  # its operands; groups not taken apart
    fixed: Part | None = None  # what is written to, and so stays where it is
    calls_module: bool = False  # or a method of one
    indices: tuple[Part, ...] = ()  # operands that index another, which may be on the CPU


def operation(node: ast.AST, reader: Reader) -> Operation | None:
    """A node as an operation, or None if it is none."""
    if isinstance(node, ast.BinOp):
        return _of(node, reader, [node.left, node.right])
    if isinstance(node, ast.AugAssign):
        return _of(node, reader, [node.target, node.value], writes=True)
    if isinstance(node, ast.Compare):
        return _of(node, reader, [node.left, *node.comparators])
    if isinstance(node, ast.Call):
        return _call(node, reader)
    if isinstance(node, ast.Subscript):
        return _subscript(node, reader)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        return _assignment(node, node.targets[0], reader)
    if isinstance(node, (ast.Name, ast.Attribute)):
        parent = next(parents(node), None)
        if isinstance(node.ctx, ast.Store) and isinstance(parent, ast.Assign):
            return _assignment(parent, node, reader)
        return _of(node, reader, [node])  # `for x in loader`: what is iterated
    return None


def _of(
    node: ast.AST, reader: Reader, operands: list[ast.expr], *, writes: bool = False
) -> Operation | None:
    parts = [reader.part(operand) for operand in operands]
    found = tuple(part for part in parts if part is not None)
    return Operation(node, found, parts[0] if writes else None) if found else None


def _assignment(node: ast.Assign, target: ast.expr, reader: Reader) -> Operation | None:
    if isinstance(target, ast.Subscript):
        return _subscript(target, reader)
    if isinstance(target, ast.Attribute):
        return _of(node, reader, [target.value, node.value], writes=True)
    return None


def _subscript(node: ast.Subscript, reader: Reader) -> Operation | None:
    index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    index = [element for element in index if not isinstance(element, ast.Slice)]
    operands: list[ast.expr] = [node.value, *index]
    parent = next(parents(node), None)
    if isinstance(node.ctx, ast.Store) and isinstance(parent, (ast.Assign, ast.AugAssign)):
        operands.append(parent.value)
    done = _of(node, reader, operands, writes=True)
    within = {id(element) for element in index}
    found = tuple(p for p in done.parts if id(p.node) in within) if done else ()
    return replace(done, indices=found) if done else None


def _call(node: ast.Call, reader: Reader) -> Operation | None:
    owner = reader.part(node.func)
    receiver: Part | None = None
    if owner is not None and owner.kind == "module":
        receiver = owner
    elif isinstance(node.func, ast.Attribute):
        receiver = reader.part(node.func.value)
    given = [part for argument in arguments(node) if (part := reader.part(argument))]
    parts = (*([receiver] if receiver is not None else []), *given)
    out = [keyword.value for keyword in node.keywords if keyword.arg == "out"]
    fixed = next((part for part in given if part.node in out), None)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if receiver is not owner and name.endswith("_") and not name.endswith("__"):
        fixed = fixed or receiver
    calls_module = receiver is not None and receiver.kind == "module"
    return Operation(node, parts, fixed, calls_module) if parts else None


@dataclass(frozen=True)
class Conflict:
    """Operands that are not on one device."""

    frame: FailedFrame
    reader: Reader
    operation: Operation
    leaves: tuple[Part, ...]  # every operand whose device is known, groups taken apart


def conflict(frame: FailedFrame, message: Message) -> Conflict | None:
    """The operands of a frame's failing expression, if they explain the message.

    None where that is not certain: fewer than two devices, other devices than the text names, or
    more than one operand that cannot be known.
    """
    reader = Reader(frame)
    within = {_storage(tensor) for _, tensor in held_by(dict(frame.library))}
    found = []
    for node in frame.candidates:
        done = operation(node, reader)
        leaves = _evidence(done, message, frame.direct, within) if done else ()
        if done and leaves:
            found.append(Conflict(frame, reader, done, leaves))
    # Where only the line is known, it may hold several: only where one alone fits is it certain.
    return found[0] if len(found) == 1 else None


def _storage(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # sparse, or a subclass without one
        return None


def _evidence(
    done: Operation, message: Message, direct: bool, within: set[Any]
) -> tuple[Part, ...]:
    """The operands that are on several devices, as the message has it; none if it is not so.

    `within` has what a library's failing function sees: what it moved or made itself is not blamed.
    """
    leaves = _leaves(done, message)
    located = [part for part in leaves if part.kind in _WITH_DEVICE and part.devices]
    if not direct and not done.calls_module:
        seen = [{_storage(t) for _, t in held_by(p.value)} - {None} for p in located]
        located = [part for part, storages in zip(located, seen, strict=True) if storages & within]
    known = frozenset(d for part in located for d in part.devices)
    if len(known) > 1 and agree(message.devices, known):
        return tuple(located)
    unknown = [part for part in leaves if not part.devices and part.value is None]
    unknown = [part for part in unknown if part.kind in ("unknown", "made", "module")]
    if any(part.factory for part in unknown):  # beside `nn.MSELoss()`, which has no tensors yet
        unknown = [part for part in unknown if part.kind != "module"]
    if len(known) < 1 or len(unknown) != 1 or not direct:
        return ()
    # The one that has gone is where the text says that one must be.
    rest = [d for d in message.devices if not agree(frozenset([d]), known)]
    if len(rest) != 1 or len(message.devices) < 2 or not (rest[0] == "cpu" or ":" in rest[0]):
        return ()
    (part,) = unknown
    kind = part.kind if part.kind == "module" else "made"
    there = replace(part, kind=kind, devices=(rest[0],))
    return tuple(there if p is part else p for p in leaves if p is part or p in located)


def _leaves(done: Operation, message: Message) -> list[Part]:
    """The operands that must be on one device, groups taken apart."""
    leaves = [p for p in flat(done.parts) if "meta" not in p.devices]  # has no data, moves nowhere
    if message.kind == "mixed":
        leaves = [p for p in leaves if p not in done.indices or p.device != "cpu"]
    meeting = [part for part in leaves if not part.scalar or part is done.fixed]
    # Scalars of the CPU may meet a GPU's tensors in arithmetic, but not in stack().
    if len({d for part in meeting for d in part.devices}) > 1 or "found at" in message.text:
        return meeting
    return leaves
