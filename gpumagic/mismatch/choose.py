"""Choose the operands that move, and their device, or the tensor that is better made there.

An operand that is written to stays; data goes to a module's GPU; otherwise everything goes where
most bytes are, a GPU before the CPU. If that is uncertain, nothing is chosen. A tensor that a
function makes, or a loop adds to, is made on its device, not moved each time. The rest of the code
is followed by the same rules: to move `x` alone brings the next error, at `loss(net(x), y)`.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gpumagic.mismatch.explanation import total
from gpumagic.mismatch.operand import NAMED, Part, Reader, flat, is_torch, words
from gpumagic.mismatch.operation import Conflict, Message, named_in, operation
from gpumagic.usercode.frames import (
    FailedFrame,
    function_of,
    loops_around,
    parents,
    statement,
    uses,
)
from gpumagic.usercode.values import of_function, own

_OPERATIONS = (ast.BinOp, ast.Compare, ast.Call, ast.AugAssign)
_STEPS = (*_OPERATIONS, ast.Assign, ast.AnnAssign, ast.For, ast.AsyncFor)
_MOST = 4000  # steps
# Functions that accept tensors of several devices.
_ANYWHERE = words(
    "copy_ to type_as set_ save load tensor as_tensor is_tensor typename register_hook backward "
    "from_numpy load_state_dict set_default_device manual_seed get_device device index_put_ "
    "index_put ctc_loss pack_padded_sequence split tensor_split"
)


def also_needed(frame: FailedFrame, node: ast.AST, odd: Iterable[Part], target: str) -> list[Part]:
    """Return the named tensors on the device of `odd` that later code combines with moved ones."""
    odd = list(odd)
    moved: dict[str, str | None] = {part.key: target for part in odd}
    found: dict[str, Part] = {}
    for reader, clashing in _clashes(frame, node, odd, moved, target):
        for part in clashing:
            for named in named_in(part, reader):
                if named.kind == "tensor" and named.key not in moved:
                    found[named.key] = named
                    moved[named.key] = target
    return list(found.values())


def result_clashes(outer: list[FailedFrame], odd: Iterable[Part], target: str) -> bool:
    """Whether what a function returns, made on `target`, then meets what is where `odd` was.

    In the code that called it: what moves within the function does not move there.
    """
    odd = list(odd)
    for frame in outer:
        node = frame.failed
        if node is None:
            return False
        moved: dict[str, str | None] = {ast.unparse(node): target}
        if any(clashing for _, clashing in _clashes(frame, node, odd, moved, target)):
            return True
        if not isinstance(statement(node), ast.Return):
            break
    return False


def meets_others(frame: FailedFrame, node: ast.AST, part: Part, target: str) -> bool:
    """Whether a value, on `target` from `node` on, then meets what is where it was."""
    found = _clashes(frame, node, [part], {part.key: target}, target)
    return any(clashing for _, clashing in found)


def _clashes(
    frame: FailedFrame, node: ast.AST, odd: list[Part], moved: dict[str, str | None], target: str
) -> Iterator[tuple[Reader, list[Part]]]:
    """Yield a later operation's operands on the device of `odd`, if it has others on `target`."""
    scope, stmt = function_of(node), statement(node)
    if scope is None or stmt is None or isinstance(scope, ast.Lambda):
        return
    sources = {part.device for part in odd} - {target}
    reader = Reader(frame, moved)
    ran = set(ast.walk(node)) - {node}
    for step in _steps(scope, stmt):
        if not isinstance(step, _OPERATIONS):
            _assign(step, reader, moved)
        elif step not in ran and wants_one_device(step, reader):
            done = operation(step, reader)
            leaves = [p for p in flat(done.parts) if not p.scalar and p.device] if done else []
            if done is not None and any(p.device == target for p in leaves):
                clashing = [p for p in leaves if p.device in sources and p is not done.fixed]
                yield reader, clashing


def wants_one_device(node: ast.AST, reader: Reader) -> bool:
    """Whether an operation surely fails with tensors of several devices: torch's own."""
    if not isinstance(node, ast.Call):
        return True
    function = reader.scope.value(node.func)
    if is_torch(function):
        return of_function(function, "__name__") not in _ANYWHERE
    part = reader.part(node.func)
    if part is not None and part.kind == "module":
        return part.value is not None and type(part.value).__module__.startswith("torch.nn.")
    if isinstance(node.func, ast.Attribute):
        owner = reader.part(node.func.value)
        of_tensor = owner is not None and owner.kind in ("tensor", "made")
        return of_tensor and node.func.attr not in _ANYWHERE
    return False


def _steps(scope: ast.AST, stmt: ast.stmt) -> Sequence[ast.AST]:
    """The operations and assignments of a scope from `stmt` on, in the order of their ends."""
    found = [n for n in ast.walk(scope) if isinstance(n, _STEPS) and n.lineno >= stmt.lineno]
    return sorted((n for n in found if function_of(n) is scope), key=_order)[:_MOST]


def _order(node: Any) -> tuple[Any, ...]:
    """Sort by the end, inner nodes first; a loop binds its names at its head."""
    end = node.iter if isinstance(node, (ast.For, ast.AsyncFor)) else node
    return end.end_lineno, end.end_col_offset, -node.lineno, -node.col_offset


def _assign(stmt: ast.AST, reader: Reader, moved: dict[str, str | None]) -> None:
    """Record the devices of the names that a statement assigns."""
    if isinstance(stmt, (ast.Assign, ast.AnnAssign)) and stmt.value is not None:
        part = reader.part(stmt.value)
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        for node in (n for target in targets for n in ast.walk(target)):
            if isinstance(node, NAMED) and isinstance(node.ctx, ast.Store):
                moved[ast.unparse(node)] = part.device if part else None
    elif isinstance(stmt, (ast.For, ast.AsyncFor)):
        for node in ast.walk(stmt.target):
            if isinstance(node, ast.Name):
                moved.setdefault(node.id, None)


@dataclass(frozen=True)
class Choice:
    """The operands that move, their device, and the bytes that the other way would move."""

    target: str
    odd: tuple[Part, ...]
    other_nbytes: int | None = None


def choose(found: Conflict, message: Message) -> Choice | None:
    """Return what moves, by three rules; None if it is not certain."""
    leaves, indexed = found.leaves, message.kind == "index"
    spread = [part for part in leaves if len(part.devices) > 1]
    if spread:
        return _spread(spread, leaves)
    target = _table_on(found) if indexed else None
    target = target or _written_on(found) or _gpu_of_modules(found) or _most(leaves)
    # An index may be on the CPU, wherever its table is.
    stay = {part.key for part in leaves[1:] if indexed and part.device == "cpu"}
    odd = tuple(part for part in leaves if part.device != target and part.key not in stay)
    if target is None or not odd:
        return None
    return Choice(target, odd, _bytes(part for part in leaves if part not in odd))


def _table_on(found: Conflict) -> str | None:
    """Return the device of an indexed tensor, where its index goes.

    None if the tensor itself is to move, because its items then meet tensors of a GPU.
    """
    odd = [part for part in found.leaves[1:] if part.device != "cpu"]
    device = found.operation.parts[0].device
    meets = device == "cpu" and also_needed(found.frame, found.operation.node, odd, device)
    return None if meets else device


def _written_on(found: Conflict) -> str | None:
    """Return the device of the tensor that is written to, which a copy cannot replace."""
    stmt, fixed = statement(found.operation.node), found.operation.fixed
    if isinstance(stmt, ast.AugAssign) and stmt is not found.operation.node:
        part = found.reader.part(stmt.target)
        fixed = part if part is not None and part.kind in ("tensor", "made") else fixed
    devices = {d for part in found.leaves for d in part.devices}
    if fixed is None or fixed.device not in devices:
        return None
    on_gpu = [d for d in devices if d != "cpu"]
    if fixed.device == "cpu" and len(on_gpu) == 1:
        node, others = found.operation.node, [p for p in found.leaves if p.key != fixed.key]
        alone = all(part.device != "cpu" for part in others)
        if alone and maker(fixed, found.frame, node, on_gpu[0], written=True):
            return None  # better made on the GPU than added to on the host
    return fixed.device


def _gpu_of_modules(found: Conflict) -> str | None:
    """Return the one GPU that has the modules or parameters of the expression."""
    weights = [p for p in found.leaves if p.kind == "module" or type(p.value) is nn.Parameter]
    devices = {d for part in weights for d in part.devices if d != "cpu"}
    return devices.pop() if len(devices) == 1 else None


def _most(leaves: tuple[Part, ...]) -> str | None:
    """Return the device with most bytes, a GPU before the CPU."""
    devices = dict.fromkeys(d for part in leaves for d in part.devices)
    count = {d: _bytes(p for p in leaves if p.device == d) or 0 for d in devices}
    return max(devices, key=lambda d: (d != "cpu", count[d]), default=None)


def _bytes(parts: Iterable[Part]) -> int | None:
    return total({part.key: part.nbytes for part in parts}.values())


def _spread(spread: list[Part], leaves: tuple[Part, ...]) -> Choice | None:
    """Move a module whose own tensors are on several devices to the device of the data."""
    data = {p.device for p in leaves if len(p.devices) == 1}
    if len(spread) > 1 or len(data) > 1 or spread[0].value is None:
        return None
    if own(spread[0].value).get("hf_device_map"):
        return None  # spread on purpose
    (part,) = spread
    device = next(iter(data)) if data and next(iter(data)) in part.devices else part.devices[0]
    return Choice(device, (part,)) if device else None


def maker(
    part: Part, frame: FailedFrame, node: ast.AST, target: str, *, written: bool
) -> ast.Assign | None:
    """Return the statement whose call needs `device=`; None if it is better to move the tensor."""
    scope, reader = function_of(node), Reader(frame)
    if scope is None or part.device != "cpu" or part.text in frame.parameters:
        return None
    stmts = [s for s in ast.walk(scope) if isinstance(s, ast.Assign) and function_of(s) is scope]
    stmts = [s for s in stmts if ast.unparse(s.targets[0]) == part.text]
    made = [s for s in stmts if not uses(s.value, part.text)]
    call = reader.part(made[0].value) if len(made) == 1 else None
    if call is None or not call.factory:
        return None
    deeper = len(loops_around(node)) > len(loops_around(made[0]))
    adds = written or (deeper and statement(node) in stmts)
    host = any(_goes_to_numpy(use) for use in uses(scope, part.text))
    if host or (frame.at_top and not adds):
        return None
    starts = ((call.node, replace(call, devices=part.devices)), (node, part))
    return None if any(meets_others(frame, *start, target) for start in starts) else made[0]


def _goes_to_numpy(node: ast.expr) -> bool:
    names = [n.attr for n in parents(node) if isinstance(n, ast.Attribute)]
    return "numpy" in names and "cpu" not in names
