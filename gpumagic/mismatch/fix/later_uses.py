"""Find what else must move: after the failing expression, its result meets other tensors.

A step forward through the rest of the function or cell, by the same rules as for what failed:
moving `x` alone would bring the next error, at `loss(net(x), y)`.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gpumagic.mismatch.read.expressions import Reader, is_torch, words
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.mismatch.read.operation import operation
from gpumagic.mismatch.read.syntax import function_of, statement
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.values import of_function

_OPERATIONS = (ast.BinOp, ast.Compare, ast.Call, ast.AugAssign)
_STEPS = (*_OPERATIONS, ast.Assign, ast.AnnAssign, ast.For, ast.AsyncFor)
_MOST = 4000  # steps
# What takes tensors of several devices.
_ANYWHERE = words(
    "copy_ to type_as set_ save load tensor as_tensor is_tensor typename register_hook backward "
    "from_numpy load_state_dict set_default_device manual_seed get_device device index_put_ "
    "index_put ctc_loss pack_padded_sequence split tensor_split"
)


def also_needed(frame: FailedFrame, node: ast.AST, odd: Iterable[Part], target: str) -> list[Part]:
    """The named tensors, where `odd` was, that the rest of the code brings to those on `target`."""
    odd = list(odd)
    moved: dict[str, str | None] = {part.key: target for part in odd}
    found: dict[str, Part] = {}
    for reader, clashing in _clashes(frame, node, odd, moved, target):
        for part in clashing:
            for named in named_in(part, reader):
                if named.device == part.device and named.key not in moved:
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
    """For each later operation with operands on `target`, those that are where `odd` was."""
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


def named_in(part: Part, reader: Reader) -> list[Part]:
    """The tensors with a name that an operand is, or was made from."""
    if part.kind == "tensor":
        return [part]
    if part.kind != "made":
        return []
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    inner = (reader.part(node) for node in ast.walk(part.node) if isinstance(node, kinds))
    return [p for p in inner if p is not None and p.kind == "tensor" and not p.scalar]


def _steps(scope: ast.AST, stmt: ast.stmt) -> Sequence[ast.AST]:
    """The operations and assignments of a scope from `stmt` on, in the order of their ends."""
    found = [n for n in ast.walk(scope) if isinstance(n, _STEPS) and n.lineno >= stmt.lineno]
    return sorted((n for n in found if function_of(n) is scope), key=_order)[:_MOST]


def _order(node: Any) -> tuple[Any, ...]:
    """By the end, and of what ends together the inner first; a loop binds its names at its head."""
    end = node.iter if isinstance(node, (ast.For, ast.AsyncFor)) else node
    return end.end_lineno, end.end_col_offset, -node.lineno, -node.col_offset


def _assign(stmt: ast.AST, reader: Reader, moved: dict[str, str | None]) -> None:
    """Note where what a statement assigns will be."""
    if isinstance(stmt, (ast.Assign, ast.AnnAssign)) and stmt.value is not None:
        part = reader.part(stmt.value)
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        kinds = (ast.Name, ast.Attribute, ast.Subscript)
        for node in (n for target in targets for n in ast.walk(target)):
            if isinstance(node, kinds) and isinstance(node.ctx, ast.Store):
                moved[ast.unparse(node)] = part.device if part else None
    elif isinstance(stmt, (ast.For, ast.AsyncFor)):
        for node in ast.walk(stmt.target):
            if isinstance(node, ast.Name):
                moved.setdefault(node.id, None)
