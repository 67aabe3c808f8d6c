"""Parse the message of a device error, the failed operation, and the operations after it.

The patterns match messages of PyTorch 2.6 to 2.15. A message gives the type of error and often the
devices, but never the operand to move.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.mismatch.explanation import NEAR
from gpumagic.mismatch.operand import NAMED, Part, Reader, full, is_torch, tensors_of, words
from gpumagic.usercode.frames import FailedFrame, function_of, parents, statement
from gpumagic.usercode.values import of_function


@dataclass(frozen=True)
class Message:
    """The type of an error, and the devices that its text names."""

    # mixed (several devices), index, numpy, generator, load (a file from a missing GPU), ordinal
    # (the GPU does not exist), host (an argument must be on the CPU), worker or pin (workers or
    # `pin_memory` of a DataLoader read a GPU), or replicas (a DataParallel module is not on the
    # first of its GPUs)
    kind: str
    devices: frozenset[str] = frozenset()  # "cuda:0", "cpu", or "cuda" if the text has no number


_DEVICE = re.compile(r"\b(?:cuda|xpu|mps)(?::\d+)?\b|\bcpu\b")
_TYPES = re.compile(r"(?:Input|input) type \((\S+?)\) and (?:weight|bias) type \((\S+?)\)")
_KINDS = {
    "numpy": r"can't convert \S+ device type tensor to numpy",
    "index": r"indices should be either on .{1,20} or on the same device as the indexed tensor",
    "generator": r"Expected an? '\S+' (?:device type for generator|generator device) but found",
    "load": r"Attempting to deserialize object on (?:a )?CUDA device",
    "replicas": r"must have its parameters and buffers on device",
    "ordinal": r"CUDA error: invalid device ordinal",
    "host": r"'lengths' argument should be a 1D CPU int64 tensor, but got 1D (?!cpu)"
    r"|legacy constructor expects device type: cpu but device type: \w+ was passed"
    r"|RNG state must be a torch\.ByteTensor",
    "mixed": r"\bsame devices?\b|\bsame device type\b|\bsame GPU\b|\bsame type of device\b"
    r"|\w+ must be a CUDA tensor|found two different devices|\bon different devices\b"
    r"|on a different device|Expected object of (?:device type|backend) \w+ but got"
    r"|to be on (?:GPU|CPU) \(while checking|but expected (?:it|them) to be on (?:GPU|CPU)"
    r"|^invalid gradient at index \d+ - expected device \S+ but got"
    r"|Tensor on device \S+ is not on the expected device",
}
_WORKER = re.compile(
    r"in DataLoader worker process.*(?:Cannot re-initialize CUDA in forked subprocess"
    r"|CUDA error: initialization error|Storage device not recognized: cuda)"
    r"|only dense CPU tensors can be pinned",
    re.DOTALL,
)


def read(error: BaseException) -> Message | None:
    """Return the message of an error; None if it is not about devices."""
    if not isinstance(error, (RuntimeError, TypeError, ValueError, AssertionError)):
        return None
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  a user's `__str__` may raise anything
        return None
    if found := _WORKER.search(text):
        return Message("pin" if found[0].endswith("pinned") else "worker")
    # If the text quotes an error of another thread or process, the failed frame is not available.
    if len(text) > 20_000 or "Original Traceback" in text:
        return None
    if found := _TYPES.search(text):
        kinds = {_device_of_type(name) for name in found.groups()}
        return Message("mixed", frozenset(kinds)) if len(kinds) > 1 else None
    for kind, pattern in _KINDS.items():
        if found := re.search(pattern, text):
            # The "cpu" in "either on cpu or …" is not a tensor's device.
            told = text[found.end() :] if kind == "index" else text
            return Message(kind, frozenset(_DEVICE.findall(told)))
    return None


def _device_of_type(name: str) -> str:
    """Return ``"cuda"`` for ``"torch.cuda.FloatTensor"``, ``"mps"`` for ``"MPSFloatType"``."""
    parts = name.split(".")
    plain = "mps" if name.startswith("MPS") else "cpu"
    return parts[1] if len(parts) == 3 else plain


def agree(named: frozenset[str], seen: frozenset[str]) -> bool:
    """Whether each device that a message names is in `seen`; "cuda" alone matches any GPU."""
    return all(any(d == s or s.startswith(f"{d}:") for s in seen) for d in named)


OPERATIONS = (ast.BinOp, ast.Compare, ast.Call, ast.AugAssign)
_STEPS = (*OPERATIONS, ast.Assign)
# Functions that accept tensors on several devices.
_ANYWHERE = words(
    "copy_ to type_as set_ save load tensor as_tensor is_tensor typename register_hook backward "
    "from_numpy load_state_dict set_default_device manual_seed get_device device index_put_ "
    "index_put ctc_loss pack_padded_sequence split tensor_split"
)


@dataclass(frozen=True)
class Operation:
    """One operator or call of the user's code."""

    reader: Reader
    node: Any
    parts: tuple[Part, ...]  # the operands
    fixed: Part | None = None  # the operand that the operation changes in place
    calls_module: bool = False  # whether a module, or a module's method, is called


def operation(node: ast.AST, reader: Reader) -> Operation | None:
    """Return a syntax node as an operation; None for one without operands, or for a magic."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("get_ipython()."):
        return None
    if isinstance(node, ast.Call):
        return _call(node, reader)
    if isinstance(node, ast.Assign):
        node = node.targets[0]
    writes = isinstance(node, ast.AugAssign) or isinstance(getattr(node, "ctx", None), ast.Store)
    read = [reader.parts(operand) for operand in _operands(node, writes)]
    parts = tuple(part for each in read for part in each)
    fixed = next(iter(read[0]), None) if writes and parts else None
    return Operation(reader, node, parts, fixed) if read else None


def _operands(node: Any, writes: bool) -> list[ast.expr]:
    """Return a node's operands as expressions. An operand that is written to comes first."""
    parent = next(parents(node), None)
    values = [parent.value] if writes and isinstance(parent, (ast.Assign, ast.AugAssign)) else []
    if isinstance(node, (ast.BinOp, ast.Compare, ast.AugAssign)):
        return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
    if isinstance(node, ast.Subscript):
        index = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return [node.value, *(each for each in index if not isinstance(each, ast.Slice)), *values]
    if isinstance(node, ast.Attribute) and writes:
        return [node.value, *values]
    # A lone name or attribute is an operand if a loop iterates over it, as in `for x in loader`.
    return [node] * (isinstance(node, (ast.Name, ast.Attribute)) and not writes)


def _call(node: ast.Call, reader: Reader) -> Operation | None:
    owner = reader.part(node.func)
    out = [part for k in node.keywords if k.arg == "out" for part in reader.parts(k.value)]
    # A called object such as a `functools.partial` may contain tensors, which are operands too.
    called = ("module", "object") if isinstance(node.func, ast.Name) else ("module",)
    if owner is not None and owner.kind in called:
        receiver = [owner]
    else:
        written = _writes(node)
        of: Any = node.func.value if isinstance(node.func, ast.Attribute) else None
        while written and _writes(of):  # `x.mul_(2).add_(y)` writes to `x`
            of = of.func.value
        receiver = reader.parts(of) if of is not None else []
        out += receiver if written else []
    parts = (*receiver, *reader.given(node))
    fixed = next((part for part in parts if part in out), None)
    calls_module = any(part.kind == "module" for part in receiver)
    return Operation(reader, node, parts, fixed, calls_module) if parts else None


def _writes(node: ast.AST) -> bool:
    """Whether a node calls a method that writes to its tensor, such as ``x.add_(1)``."""
    name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
    return name.endswith("_") and not name.endswith("__")


def conflict(frame: FailedFrame, message: Message, *, certain: bool = False) -> Operation | None:
    """Return a frame's failing operation with the operands that explain the message."""
    # The message may name a device that no known operand is on. Unless `certain`, assume that
    # temporary results are on that device. Return None if this does not explain the message.
    reader = Reader(frame)
    within = storages(dict(frame.library))
    found = []
    for node in frame.candidates:
        done = operation(node, reader)
        direct = done is not None and not certain and (frame.direct or done.calls_module)
        parts = _evidence(done, message, direct, within) if done else ()
        if done and parts:
            found.append(replace(done, parts=parts))
    # If only the failed line is known, it may have several operations. Exactly one must match.
    return found[0] if len(found) == 1 else None


def storages(value: Any) -> set[Any]:
    """Return a key for each storage of a value's tensors."""
    found = set()
    for _, tensor in tensors_of(value):
        # A sparse tensor or a subclass may have no storage.
        with suppress(RuntimeError, NotImplementedError):
            found.add(tensor.untyped_storage()._cdata)
    return found


def storages_in(part: Part, reader: Reader) -> set[Any]:
    """Return the storages of an operand's tensors, or of the tensors in a result's expression."""
    # For example, `x.detach()` shares the storage of `x`.
    return storages([part.value, *(named.value for named in named_in(part, reader))])


def _evidence(
    done: Operation, message: Message, direct: bool, within: set[Any]
) -> tuple[Part, ...]:
    """Return the operands if they are on several devices and agree with the message; else empty."""
    # `within` has the storages of the tensors in the library function that failed. An operand with
    # another storage did not cause the error, because the library failed on other tensors.
    if message.kind == "replicas":
        return tuple(part for part in done.parts if part.kind == "module" and part.devices)
    # Tensors on "meta" never move. An index on the CPU is always allowed.
    indices = [*ast.walk(getattr(done.node, "slice", ast.Pass()))]
    leaves = [p for p in done.parts if "meta" not in p.devices]
    leaves = [p for p in leaves if p.device != "cpu" or p.node not in indices]
    located = [part for part in leaves if part.kind != "generator" and part.devices]
    seen = [part for part in located if storages_in(part, done.reader) & within]
    if message.kind in ("numpy", "host"):
        found = _for_host(leaves, located, bool(seen), message.devices - {"cpu"})
        operator = isinstance(done.node, (ast.BinOp, ast.Compare))
        arrays = (part for part in leaves if part.kind == "array" and operator and found)
        return (*found, *arrays)
    if direct or done.calls_module:
        options = [located, *[_with_gone(leaves, located, message.devices)] * direct]
    else:
        # The library's arguments that no named operand holds are the user's temporary results.
        named, given = storages([part.value for part in leaves]), done.reader.frame.given
        gone = [t for t in given if issubclass(type(t), Tensor) and not storages(t) & named]
        on = frozenset(full(tensor.device) for tensor in gone)
        sure = [p for p in located if p in seen or (p.kind == "made" and p.device in on)]
        # An object may hold the tensors without being an operand, so it is the last choice.
        tensors = [part for part in sure if part.kind != "object"]
        options = [_with_gone(leaves, tensors, on), tensors, sure]
    explained = (parts for parts in options if agree(message.devices, _devices(parts)))
    return next((tuple(parts) for parts in explained if len(_devices(parts)) > 1), ())


def _for_host(
    leaves: list[Part], located: list[Part], seen: bool, named: frozenset[str]
) -> tuple[Part, ...]:
    """Return the operands to move to the CPU. `named` has the GPUs that the message names."""
    made = [p for p in leaves if p.factory and not p.devices]
    if (default := full(torch.get_default_device())) != "cpu":
        located += [replace(p, devices=(default,)) for p in made]
        made = []
    unknown = [p for p in leaves if p.kind == "unknown"] or made * bool(named)
    if len(unknown) == 1 and all(part.device == "cpu" for part in located):
        return (replace(unknown[0], devices=tuple(named)),)
    return _on_a_gpu(located, named) if seen or not unknown else ()


def _devices(parts: Iterable[Part]) -> frozenset[str]:
    return frozenset(device for part in parts for device in part.devices)


def _on_a_gpu(parts: list[Part], named: frozenset[str]) -> tuple[Part, ...]:
    """Return the GPU operands if they match the named devices. A container is one operand."""
    found: list[Part] = []
    for node, group in groupby(parts, key=lambda part: part.node):
        items, text = list(group), ast.unparse(node)
        nbytes, devices = sum(part.nbytes or 0 for part in items), tuple(_devices(items))
        if [part.key for part in items] != [text]:
            items = [Part(node, text, "group", devices, nbytes, f"{len(items)} tensors")]
        found += [part for part in items if part.device != "cpu"]
    return tuple(found) if agree(named, _devices(found)) else ()


def _with_gone(leaves: list[Part], located: list[Part], named: frozenset[str]) -> list[Part]:
    """Return operands; assume temporary results are on the named device that no operand is on."""
    gone = [part for part in leaves if not part.devices and part.value is None]
    if any(part.factory for part in gone):  # a module such as `nn.MSELoss()` has no tensors
        gone = [part for part in gone if part.kind != "module"]
    rest = [d for d in named if not agree(frozenset([d]), _devices(located))] or [*named]
    called = {ast.unparse(getattr(part.node, "func", part.node)) for part in gone}
    alike = len(called) == 1 or all(part.factory for part in gone)  # created without `device=`
    if not (located and gone and alike and len(rest) == 1):
        return []
    kinds = {"module": "module"}  # a module keeps its kind; any other result is "made"
    there = {p: replace(p, kind=kinds.get(p.kind, "made"), devices=(*rest,)) for p in gone}
    return [there.get(part, part) for part in leaves if part in there or part in located]


def named_in(part: Part, reader: Reader) -> list[Part]:
    """Return the tensors and modules in a result's expression that are on the result's device."""
    # `self.net(x)` gives `self.net` and `x`, but not `self`. A tensor `x` gives `x`.
    if part.kind != "made":
        return [part] if part.kind == "tensor" else []
    found: dict[str, Part] = {}
    queue: list[ast.AST] = [part.node]
    for node in queue:
        inner = reader.part(node) if isinstance(node, NAMED) else None
        if inner is not None and inner.kind in ("tensor", "module"):
            if inner.device == part.device and not inner.scalar:
                found[inner.key] = inner
        elif isinstance(node, ast.Subscript) and part.device == "cpu":
            queue.append(node.value)  # an index on the CPU need not move
        else:
            queue += ast.iter_child_nodes(node)
    return list(found.values())


def nodes_around(node: ast.AST, kinds: Any) -> list[Any]:
    """Return the nodes of `kinds` in a node's function, but not in nested functions."""
    scope = function_of(node)
    found = ast.walk(scope) if scope is not None else ()
    return [each for each in found if isinstance(each, kinds) and function_of(each) is scope]


def also_needed(frame: FailedFrame, node: ast.AST, odd: Iterable[Part], target: str) -> list[Part]:
    """Return further tensors that must move, because later code combines them with `odd`."""
    odd = list(odd)
    # Skip calls such as `torch.zeros(3)`, because a later call of the same text makes a new tensor.
    moved: dict[str, str | None] = {part.key: target for part in odd if not part.factory}
    found: dict[str, Part] = {}
    for reader, clashing in _clashes(frame, node, odd, moved, target):
        found |= {f"{part.key}, line {part.node.lineno}": part for part in clashing if part.factory}
        for named in (named for part in clashing for named in named_in(part, reader)):
            if named.kind == "tensor" and named.key not in moved:
                found[named.key] = named
                moved[named.key] = target
    return list(found.values())


def clashes_later(found: Operation, odd: Iterable[Part], target: str) -> bool:
    """Whether later code combines moved operands with tensors or modules on their old device."""
    odd = list(odd)
    moved: dict[str, str | None] = {part.key: target for part in odd}
    return any(there for _, there in _clashes(found.reader.frame, found.node, odd, moved, target))


def _clashes(
    frame: FailedFrame, node: ast.AST, odd: list[Part], moved: dict[str, str | None], target: str
) -> Iterator[tuple[Reader, list[Part]]]:
    """For each later operation on `target`, yield a reader, and operands on devices of `odd`."""
    sources = {part.device for part in odd} - {target}
    reader, ran = Reader(frame, moved), set(ast.walk(node)) - {node}
    for step in _steps(node):
        if isinstance(step, ast.Assign):
            nodes = [node for to in step.targets for node in ast.walk(to)]
            names = [ast.unparse(node) for node in nodes if isinstance(node, NAMED)]
            moved |= dict.fromkeys(names, getattr(reader.part(step.value), "device", None))
        elif step not in ran and wants_one_device(step, reader):
            leaves = _leaves(step, reader)
            if any(part.device == target for part in leaves):
                # If `odd` are calls such as `torch.zeros(3)`, edit such calls just below them too.
                alike = NEAR * all(part.factory for part in odd)
                made = "cpu" if step.lineno < frame.line + alike else None
                there = [p for p in leaves if (made if p.factory else p.device) in sources]
                yield reader, there


def _leaves(step: ast.AST, reader: Reader) -> list[Part]:
    """Return an operation's operands except CPU scalars, which torch accepts on any device."""
    done = operation(step, reader)
    return [part for part in done.parts if not part.scalar] if done else []


def _steps(node: ast.AST) -> list[Any]:
    """Return the operations and assignments from a node's statement on, in execution order."""
    stmt = statement(node)
    first = stmt.lineno if stmt is not None else 0
    found = [step for step in nodes_around(node, _STEPS) if step.lineno >= first]
    return sorted(found, key=lambda n: (n.end_lineno, n.end_col_offset, -n.lineno, -n.col_offset))


def ran_mixed(frame: FailedFrame, name: str) -> bool:
    """Whether an earlier call accepted `name` together with tensors on another device."""
    reader, node = Reader(frame), frame.failed or ast.Pass()
    calls = [call for call in nodes_around(node, ast.Call) if call.end_lineno < frame.line]
    named = (of_function(reader.scope.value(call.func), "__name__") for call in calls)
    taken = [_leaves(c, reader) for c, its in zip(calls, named, strict=True) if its in _ANYWHERE]
    return any(name in {p.text for p in parts} and len(_devices(parts)) > 1 for parts in taken)


def wants_one_device(node: ast.AST, reader: Reader) -> bool:
    """Whether an operation certainly fails if its tensors are on several devices."""
    if not isinstance(node, ast.Call):
        return True
    function = reader.scope.value(node.func)
    if is_torch(function):
        return of_function(function, "__name__") not in _ANYWHERE
    if issubclass(type(function), nn.Module):
        return type(function).__module__.startswith("torch.nn.")
    owner = reader.part(node.func.value) if isinstance(node.func, ast.Attribute) else None
    of_tensor = owner is not None and owner.kind in ("tensor", "made")
    return of_tensor and node.func.attr not in _ANYWHERE  # type: ignore[attr-defined]


def read_on_host(node: ast.AST, leaves: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the operands that must be on the CPU; of `pack_padded_sequence`, only the lengths."""
    lengths = _lengths(node)
    return leaves if lengths is None else tuple(part for part in leaves if part.node in lengths)


def _lengths(node: ast.AST) -> list[ast.expr] | None:
    """Return the argument `lengths` of a call of `pack_padded_sequence`; None for other code."""
    if not isinstance(node, ast.Call) or "pack" not in ast.unparse(node.func):
        return None
    return [word.value for word in node.keywords if word.arg == "lengths"] or node.args[1:2]


def without_lengths(call: Operation, within: FailedFrame) -> Operation:
    """Return a call without the arguments that the called function passes on as `lengths`."""
    calls = nodes_around(within.failed or ast.Pass(), ast.Call)
    read = [within.scope.value(node) for each in calls for node in _lengths(each) or ()]
    kept = (part for part in call.parts if not any(part.value is value for value in read))
    return replace(call, parts=tuple(kept))


def learns(part: Part) -> bool:
    """Whether an operand is a module with parameters. Loss functions have buffers only."""
    known = part.kind == "module" and part.value is not None
    return any(True for _ in nn.Module.parameters(part.value)) if known else part.kind == "module"
