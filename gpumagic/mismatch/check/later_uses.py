"""What else must move: after the failing expression, its result meets other tensors.

A step forward through the rest of the function or cell, by the same rules as for what failed:
moving `x` alone would bring the next error, at `loss(net(x), y)`.
"""

import ast
from collections.abc import Iterable, Iterator

from gpumagic.mismatch.fix.edits import function_of, statement
from gpumagic.mismatch.read.expressions import Reader, is_torch, words
from gpumagic.mismatch.read.operand import Part, flat
from gpumagic.mismatch.read.operation import bound_again, operation
from gpumagic.usercode.frames import Place
from gpumagic.usercode.values import of_function

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_STATEMENTS = 400
# What takes tensors of several devices.
_ANYWHERE = words(
    "copy_ to type_as set_ save load tensor as_tensor is_tensor typename register_hook backward "
    "from_numpy set_default_device manual_seed get_device device index_put_ index_put ctc_loss "
    "pack_padded_sequence split tensor_split"
)


def also_needed(
    place: Place, node: ast.AST, odd: Iterable[Part], moved: dict[str, str | None], target: str
) -> list[Part]:
    """The named tensors that the rest of the code brings together with tensors on `target`.

    Parameters
    ----------
    place, node
        Where it failed.
    odd : iterable of Part
        What moves anyway: only what is where that was is thought of.
    moved : dict
        Expressions that are taken to be elsewhere than they are; is added to.
    target : str
    """
    found: dict[str, Part] = {}
    for reader, clashing in _clashes(place, node, odd, moved, target):
        for part in clashing:
            for named in _named(part, reader):
                if named.device == part.device and named.key not in moved:
                    found[named.key] = named
                    moved[named.key] = target
    return list(found.values())


def meets_another(place: Place, node: ast.AST, odd: Iterable[Part], target: str) -> bool:
    """Whether the result, made on `target`, then meets what is where `odd` was."""
    odd = list(odd)
    moved: dict[str, str | None] = {part.key: target for part in odd}
    return any(clashing for _, clashing in _clashes(place, node, odd, moved, target))


def _clashes(
    place: Place, node: ast.AST, odd: Iterable[Part], moved: dict[str, str | None], target: str
) -> Iterator[tuple[Reader, list[Part]]]:
    """For each later operation with operands on `target`, those that are where `odd` was."""
    scope, stmt = function_of(node), statement(node)
    if scope is None or stmt is None or isinstance(scope, ast.Lambda):
        return
    sources = {part.device for part in odd} - {target}
    reader = Reader(place.scope, place.text, moved)
    for step in _from(scope, stmt):
        for inner in operations(step):
            if isinstance(inner, ast.Subscript):
                continue
            done = operation(inner, reader) if wants_one_device(inner, reader) else None
            leaves = [p for p in flat(done.parts) if not p.scalar and p.device] if done else []
            if done is None or not any(p.device == target for p in leaves):
                continue
            stays = done.fixed is not None and not bound_again(done.fixed, reader.scope)
            clashing = [p for p in leaves if p.device in sources]
            yield reader, [p for p in clashing if p is not done.fixed or not stays]
        assign(step, reader, moved)


def wants_one_device(node: ast.AST, reader: Reader) -> bool:
    """Whether an operation surely fails with tensors of several devices: torch's own."""
    if not isinstance(node, ast.Call):
        return True
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    function = reader.scope.value(node.func)
    if is_torch(function):
        return of_function(function, "__name__") not in _ANYWHERE
    part = reader.part(node.func)
    if part is not None and part.kind == "module":
        return part.value is not None and type(part.value).__module__.startswith("torch.nn.")
    if isinstance(node.func, ast.Attribute):
        owner = reader.part(node.func.value)
        return owner is not None and owner.kind in ("tensor", "made") and name not in _ANYWHERE
    return False


def _named(part: Part, reader: Reader) -> list[Part]:
    """The tensors with a name that an operand is, or was made from."""
    if part.kind == "tensor":
        return [part]
    if part.kind != "made":
        return []
    inner = (
        reader.part(node)
        for node in ast.walk(part.node)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    )
    return [p for p in inner if p is not None and p.kind == "tensor" and not p.scalar]


def _from(scope: ast.AST, stmt: ast.stmt) -> list[ast.stmt]:
    """The statements of a scope from `stmt` on, in the order of the text."""
    every = [s for s in statements(scope) if s.lineno >= stmt.lineno]
    return every[:_STATEMENTS]


def statements(scope: ast.AST) -> Iterator[ast.stmt]:
    for field in ("body", "orelse", "finalbody", "handlers"):
        for child in getattr(scope, field, []):
            if isinstance(child, ast.stmt):
                yield child
            if not isinstance(child, _FUNCTIONS):
                yield from statements(child)


def operations(stmt: ast.stmt) -> Iterator[ast.AST]:
    """The operations of a statement's own expressions, the innermost first."""
    if isinstance(stmt, _FUNCTIONS):
        return
    for child in ast.iter_child_nodes(stmt):
        if isinstance(child, ast.expr):
            yield from _inside_out(child)
    if isinstance(stmt, ast.AugAssign):
        yield stmt


def _inside_out(node: ast.expr) -> Iterator[ast.AST]:
    if isinstance(node, _FUNCTIONS):
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.expr, ast.keyword)):
            inner = child.value if isinstance(child, ast.keyword) else child
            yield from _inside_out(inner)
    if isinstance(node, (ast.BinOp, ast.Compare, ast.Call, ast.Subscript)):
        yield node


def assign(stmt: ast.stmt, reader: Reader, moved: dict[str, str | None]) -> None:
    """Note where what a statement assigns will be."""
    if isinstance(stmt, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and stmt.value is not None:
        part = reader.part(stmt.value)
        device = part.device if part else None
        targets = stmt.targets if isinstance(stmt, ast.Assign) else [stmt.target]
        for target in targets:
            for node in ast.walk(target):
                if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
                    continue
                if isinstance(node.ctx, ast.Store):
                    if isinstance(stmt, ast.AugAssign):
                        continue
                    moved[ast.unparse(node)] = device if part else None
    elif isinstance(stmt, (ast.For, ast.AsyncFor)):
        for node in ast.walk(stmt.target):
            if isinstance(node, ast.Name) and node.id not in moved:
                moved[node.id] = None
