"""Read the operation that failed: its message, its operands, and which one is written to.

Messages are those of PyTorch 2.6 to 2.15. They tell the type of error and often the devices; who is
to blame is never taken from them.
"""

import ast
import re
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import Tensor

from gpumagic.mismatch.explanation import Operand
from gpumagic.mismatch.operand import (
    NAMED,
    Part,
    Reader,
    arguments,
    describe,
    flat,
    held_by,
    tensors_of,
)
from gpumagic.usercode.frames import FailedFrame, parents


@dataclass(frozen=True)
class Message:
    """The type of an error, and the devices that its text names."""

    # mixed, index, numpy, generator, load, host (an argument that must be on the CPU), steps (an
    # optimizer's counters) or worker (of a loader, whose dataset is on a GPU)
    kind: str
    # "cuda:0", "cpu", or "cuda" where it has no number
    devices: frozenset[str] = frozenset()
    text: str = field(default="", repr=False)


_DEVICE = re.compile(r"\b(?:cuda|xpu|mps)(?::\d+)?\b|\bcpu\b|\bcpu(?::0)\b")
_TYPES = re.compile(r"(?:Input|input) type \((\S+?)\) and (?:weight|bias) type \((\S+?)\)")
_KINDS = (
    ("numpy", r"can't convert \S+ device type tensor to numpy"),
    ("index", r"indices should be either on .{1,20} or on the same device as the indexed tensor"),
    ("generator", r"Expected an? '\S+' (?:device type for generator|generator device) but found"),
    ("load", r"Attempting to deserialize object on (?:a )?CUDA device"),
    ("host", r"'lengths' argument should be a 1D CPU int64 tensor, but got 1D (?!cpu)"),
    ("host", r"legacy constructor expects device type: cpu but device type: \w+ was passed"),
    ("steps", r"state_steps should not be CUDA tensors"),
    ("mixed", r"\bsame devices?\b|\bsame device type\b|\bsame GPU\b|\bsame type of device\b"),
    ("mixed", r"\w+ must be a CUDA tensor"),  # torchvision's
    ("mixed", r"found two different devices|\bon different devices\b|on a different device"),
    ("mixed", r"must have its parameters and buffers on device"),
    ("mixed", r"Expected object of (?:device type|backend) \w+ but got"),
    (
        "mixed",
        r"to be on (?:GPU|CPU) \(while checking|but expected (?:it|them) to be on (?:GPU|CPU)",
    ),
    ("mixed", r"^invalid gradient at index \d+ - expected device \S+ but got"),
    ("mixed", r"Tensor on device \S+ is not on the expected device"),
)
_WORKER = re.compile(
    r"in DataLoader worker process.*(?:Cannot re-initialize CUDA in forked subprocess"
    r"|CUDA error: initialization error|Storage device not recognized: cuda)",
    re.DOTALL,
)
_COMPILED = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)


def read(error: BaseException) -> Message | None:
    """Return the message of an error; None if it is not about devices."""
    if not isinstance(error, (RuntimeError, TypeError, ValueError, AssertionError)):
        return None
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  an exception class of the user's own
        return None
    if _WORKER.search(text):
        return Message("worker")
    # Another thread's or process's words: its frames are not this error's.
    if len(text) > 20_000 or "Original Traceback" in text:
        return None
    if found := _TYPES.search(text):
        kinds = {_device_of_type(name) for name in found.groups()}
        return Message("mixed", frozenset(kinds)) if len(kinds) > 1 else None
    for kind, pattern in _COMPILED:
        if found := pattern.search(text):
            # "either on cpu or …" speaks of no tensor.
            told = text[found.end() :] if kind == "index" else text
            return Message(kind, frozenset(_DEVICE.findall(told)), text)
    return None


def _device_of_type(name: str) -> str:
    parts = name.split(".")
    return parts[1] if len(parts) == 3 else "cpu"


def agree(named: frozenset[str], seen: frozenset[str]) -> bool:
    """Whether every device that a message names is one that was seen."""
    return all(any(d == s or s.startswith(f"{d}:") for s in seen) for d in named)


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
    """Return a node as an operation, or None if it is none."""
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
    writes = isinstance(node.ctx, ast.Store)
    if writes and isinstance(parent, (ast.Assign, ast.AugAssign)):
        operands.append(parent.value)
    done = _of(node, reader, operands, writes=writes)
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


def conflict(frame: FailedFrame, message: Message, *, certain: bool = False) -> Conflict | None:
    """Return the operands of a frame's failing expression, if they explain the message.

    None where that is not certain: fewer than two devices, other devices than the text names, or
    more than one operand that cannot be known; if it must be `certain`, one.
    """
    reader = Reader(frame)
    within = {_storage(tensor) for _, tensor in held_by(dict(frame.library))}
    found = []
    for node in frame.candidates:
        done = operation(node, reader)
        leaves = _evidence(done, message, frame.direct and not certain, within) if done else ()
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
    """Return the operands that are on several devices, if the message agrees; else none.

    `within` has the storages that a library's failing function sees. Tensors that the library moved
    or made itself are not blamed.
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
    if any(part.factory for part in unknown):  # as with `nn.MSELoss()`, which has no tensors yet
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
    """Return the operands that must be on one device, groups taken apart."""
    leaves = [p for p in flat(done.parts) if "meta" not in p.devices]  # has no data, moves nowhere
    if message.kind == "mixed":
        leaves = [p for p in leaves if p not in done.indices or p.device != "cpu"]
    meeting = [part for part in leaves if not part.scalar or part is done.fixed]
    # Scalars of the CPU may meet a GPU's tensors in arithmetic, but not in stack().
    if len({d for part in meeting for d in part.devices}) > 1 or "found at" in message.text:
        return meeting
    return leaves


_SHOWN = 3


def listed(parts: list[tuple[Part, bool]]) -> list[tuple[Part, bool]]:
    """Return parts and whether each is odd; for a long list of tensors the first few odd ones."""
    shown = []
    for _, group in groupby(parts, key=lambda pair: id(pair[0].node)):
        pairs = list(group)
        if len(pairs) > 2 * _SHOWN:
            pairs = [p for p in pairs if p[1]][:_SHOWN] + [p for p in pairs if not p[1]][:1]
        shown += pairs
    return shown


def row(part: Part, odd: bool) -> Operand:
    """Return a part as an operand of the explanation."""
    return Operand(part.text, part.devices, part.nbytes, part.about, odd=odd)


def named(part: Part, reader: Reader, odd: bool) -> list[tuple[Part, bool]]:
    """Return a result that has gone by the names of the tensors that it was made from.

    If only operators, indices and methods made it, those tensors replace it; a call's result is
    shown itself, followed by the names in it.
    """
    found = named_in(part, reader)
    if part.kind != "made":
        return [(part, odd)]
    calls = (node for node in ast.walk(part.node) if isinstance(node, ast.Call))
    if found and all(_is_method(call, reader) for call in calls):
        return [(leaf, odd) for leaf in found]
    return [(part, odd), *((leaf, False) for leaf in found)]


def named_in(part: Part, reader: Reader) -> list[Part]:
    """Return the tensors and modules with a name that a result was made from, on its device.

    Of `self.net(x)` these are `self.net` and `x`, not `self`. A tensor is its own.
    """
    if part.kind != "made":
        return [part] if part.kind == "tensor" else []
    found: dict[str, Part] = {}
    queue: list[ast.AST] = [part.node]
    for node in queue:
        inner = reader.part(node) if isinstance(node, NAMED) else None
        if inner is not None and inner.kind in ("tensor", "module"):
            if inner.device == part.device and not inner.scalar:
                found[inner.key] = inner
        else:
            queue += ast.iter_child_nodes(node)
    return list(found.values())


def _is_method(node: ast.Call, reader: Reader) -> bool:
    """Whether it calls a tensor's method that leaves the tensor's data where it is."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr in ("to", "cuda", "cpu"):
        return False
    owner = reader.part(node.func.value)
    return owner is not None and owner.kind in ("tensor", "made")


def inside(part: Part, target: str) -> list[Operand]:
    """Return the first tensors of a module on several devices that are not on `target`."""
    if part.kind != "module" or part.value is None or len(part.devices) < 2:
        return []
    tensors = tensors_of(part.value)
    parts = [describe(tensor, part.node, f"{part.text}.{path}") for path, tensor in tensors]
    return [row(p, True) for p in parts if p is not None and p.device != target][:_SHOWN]
