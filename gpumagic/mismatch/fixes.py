"""Choose the operands that move and their device, and write the edit that moves them.

An operand that is written to stays; data goes to a module's GPU; otherwise everything goes where
most bytes are, a GPU before the CPU. A tensor that a function makes, or a loop adds to, is made on
its device, not moved each time. The rest of the code is followed by the same rules: to move `x`
alone brings the next error, at `loss(net(x), y)`.
"""

import ast
from collections import UserDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from gpumagic.mismatch.explanation import Edit, Fix, bracketed, total
from gpumagic.mismatch.operand import (
    FACTORIES,
    NAMED,
    Part,
    Reader,
    bytes_of,
    device_of,
    full,
    is_torch,
    tensors_of,
    words,
)
from gpumagic.mismatch.operation import Conflict, Message, named_in, operation
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.syntax import (
    function_of,
    in_own_scope,
    loops_around,
    parents,
    root,
    statement,
    stored,
    uses,
)
from gpumagic.usercode.values import contents, of_function, own

_OPERATIONS = (ast.BinOp, ast.Compare, ast.Call, ast.AugAssign)
# Functions that accept tensors of several devices.
_ANYWHERE = words(
    "copy_ to type_as set_ save load tensor as_tensor is_tensor typename register_hook backward "
    "from_numpy load_state_dict set_default_device manual_seed get_device device index_put_ "
    "index_put ctc_loss pack_padded_sequence split tensor_split"
)
_DEVICE_NAMES = ("device", "dev", "DEVICE", "self.device", "self.cfg.device", "args.device")
_NEAR = 12  # lines


# -- the rest of the code
def also_needed(frame: FailedFrame, node: ast.AST, odd: Iterable[Part], target: str) -> list[Part]:
    """Return the named tensors on the device of `odd` that later code combines with moved ones."""
    odd = list(odd)
    moved: dict[str, str | None] = {part.key: target for part in odd}
    found: dict[str, Part] = {}
    for reader, clashing in _clashes(frame, node, odd, moved, target):
        for named in (named for part in clashing for named in named_in(part, reader)):
            if named.kind == "tensor" and named.key not in moved:
                found[named.key] = named
                moved[named.key] = target
    return list(found.values())


def result_clashes(outer: list[FailedFrame], odd: Iterable[Part], target: str) -> bool:
    """Whether what a function returns, made on `target`, then meets what is where `odd` was.

    In the code that called it: what moves within the function does not move there.
    """
    for frame in outer:
        if (node := frame.failed) is None:
            return False
        if _meets_others(frame, node, list(odd), {ast.unparse(node): target}, target):
            return True
        if not isinstance(statement(node), ast.Return):
            break
    return False


def _meets_others(
    frame: FailedFrame, node: ast.AST, odd: list[Part], moved: dict[str, str | None], target: str
) -> bool:
    return any(clashing for _, clashing in _clashes(frame, node, odd, moved, target))


def _clashes(
    frame: FailedFrame, node: ast.AST, odd: list[Part], moved: dict[str, str | None], target: str
) -> Iterator[tuple[Reader, list[Part]]]:
    """Yield a later operation's operands on the device of `odd`, if it has others on `target`."""
    scope, stmt = function_of(node), statement(node)
    if scope is None or stmt is None:
        return
    sources = {part.device for part in odd} - {target}
    reader, ran = Reader(frame, moved), set(ast.walk(node)) - {node}
    kinds = (*_OPERATIONS, ast.Assign)
    steps: list[Any] = [n for n in ast.walk(scope) if isinstance(n, kinds)]
    steps = [n for n in steps if n.lineno >= stmt.lineno and function_of(n) is scope]
    # By their ends: inner ones first.
    steps.sort(key=lambda n: (n.end_lineno, n.end_col_offset, -n.lineno, -n.col_offset))
    for step in steps:
        if isinstance(step, ast.Assign):
            part = reader.part(step.value)
            for name in (n for target_ in step.targets for n in ast.walk(target_)):
                if isinstance(name, NAMED):
                    moved[ast.unparse(name)] = part.device if part else None
        elif step not in ran and _wants_one_device(step, reader):
            done = operation(step, reader)
            leaves = [p for p in done.parts if not p.scalar] if done else []
            if any(p.device == target for p in leaves):
                yield reader, [p for p in leaves if p.device in sources]


def _wants_one_device(node: ast.AST, reader: Reader) -> bool:
    """Whether an operation surely fails with tensors of several devices: torch's own."""
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


# -- what moves
@dataclass(frozen=True)
class Choice:
    """The operands that move, their device, and the bytes that the other way would move."""

    target: str
    odd: tuple[Part, ...]
    other_nbytes: int | None = None
    to_host: bool = False  # copied for code of the host, where they are used


def choose(found: Conflict, message: Message) -> Choice | None:
    """Return what moves, by three rules; None if it is not certain."""
    leaves, indexed = found.leaves, message.kind == "index"
    if message.kind in ("numpy", "host"):
        read = _read_on_host(found.operation.node, leaves)
        return Choice("cpu", read, to_host=True) if read else None
    target = _table_on(found) if indexed else None
    target = target or _written_on(found) or _gpu_of_modules(found) or _most(leaves)
    # An index may be on the CPU, wherever its table is.
    stay = leaves[1:] if indexed else ()
    odd = tuple(
        p for p in leaves if p.devices != (target,) and (p.device != "cpu" or p not in stay)
    )
    on_purpose = any(own(part.value).get("hf_device_map") for part in odd)  # spread by accelerate
    if target is None or not odd or on_purpose:
        return None
    return Choice(target, odd, _bytes(part for part in leaves if part not in odd))


def _read_on_host(node: ast.AST, leaves: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the operands that must be on the host: of `pack_padded_sequence` the lengths."""
    if not isinstance(node, ast.Call) or "pack" not in ast.unparse(node.func):
        return leaves
    lengths = [word.value for word in node.keywords if word.arg == "lengths"] or node.args[1:2]
    return tuple(part for part in leaves if part.node in lengths)


def _table_on(found: Conflict) -> str | None:
    """Return the device of an indexed tensor, where its index goes.

    None if the tensor itself is to move, because its items then meet tensors of a GPU.
    """
    device, node = found.operation.parts[0].device, found.operation.node
    meets = device == "cpu" and also_needed(found.frame, node, found.leaves[1:], device)
    return None if meets else device


def _written_on(found: Conflict) -> str | None:
    """Return the device of the tensor that is written to, which a copy cannot replace."""
    fixed = found.operation.fixed
    if fixed is None:
        return None
    others = {part.device for part in found.leaves if part.key != fixed.key}
    if fixed.device == "cpu" and len(others) == 1:
        (gpu,) = others
        if gpu and _maker(fixed, found.frame, found.operation.node, gpu, written=True):
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


# -- where a fix goes, and how it names the device
@dataclass
class Site:
    """A frame, the failing node there, and the operands by their names there."""

    frame: FailedFrame
    node: ast.AST
    odd: list[Part]
    extra: list[Part] = field(default_factory=list)  # meets the result later, and moves too
    anchors: list[Part] = field(default_factory=list)  # operands that may name the device
    fixed: Part | None = None  # the operand that is written to, which a copy cannot replace


def climb(site: Site, outer: list[FailedFrame]) -> tuple[Site, dict[str, str]]:
    """Return the outermost site whose operands are the very objects that move here.

    And the names of the operands there, by their names here, if they differ.
    """
    first = moved = [*site.odd, *site.extra]
    count = len(site.odd)
    for frame in outer:
        given, node = site.frame.parameters if not site.frame.at_top else (), frame.failed
        if node is None or any(part.value is None or part.text not in given for part in moved):
            break
        done = operation(node, Reader(frame))
        parts = list(done.parts) if done else []
        above = [next((p for p in parts if p.value is m.value), None) for m in moved]
        if None in above:
            break
        moved = [part for part in above if part is not None]
        site = Site(frame, node, moved[:count], moved[count:], parts)
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return site, names


def written_device(site: Site, target: str, *, before: bool, line: ast.stmt | None = None) -> str:
    """Return an expression for the device, as its user would write it in the failing statement.

    Or at an earlier `line`, where names that are bound from there on are not yet known.
    """
    names = [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, before))]
    names += [f"{name}.device" for name in site.frame.parameters]
    if line is not None:
        nodes = [n for n in ast.walk(function_of(line) or line) if isinstance(n, ast.Name)]
        bound = [n for n in nodes if isinstance(n.ctx, ast.Store)]
        known = {n.id for n in bound if n.lineno < line.lineno} | {*site.frame.parameters}
        later = {n.id for n in bound} - known
        names = [name for name in names if root(name) not in later]
    # A variable of the notebook has no place in a class.
    if any(isinstance(node, ast.ClassDef) for node in parents(site.node)):
        names = [name for name in names if root(name) in site.frame.scope.local]
    for name in names:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    return f'"{target}"'


def _at_hand(site: Site, before: bool) -> Iterator[str]:
    """Yield the names in the operands."""
    for part in [*site.anchors, *site.odd]:
        for node in ast.walk(part.node):
            hidden = in_own_scope(node) and (before or not in_own_scope(part.node))
            if isinstance(node, (ast.Name, ast.Attribute)) and not hidden:
                yield ast.unparse(node)


def can_precede(frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether a line put before `stmt` runs each time just before its code."""
    line = frame.source.splitlines()[stmt.lineno - 1]
    if line.encode()[: stmt.col_offset].strip() or line.lstrip().startswith("elif"):
        return False  # `if ready: y = net(x)`, `a; b`
    return not isinstance(stmt, (ast.While, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


# -- the edits
def write_fix(site: Site, above: Site, choice: Choice) -> Fix | None:
    """Return the edit, in the outermost frame that has the operands; None if none is right."""
    if all(part.kind == "module" for part in choice.odd):
        return _move_modules(above, choice)
    if choice.to_host:
        given = [part for part in above.anchors if part.devices and part.device != "cpu"]
        return _move_tensors(site if above is site else replace(above, odd=given), choice)
    fix = _make_there(site, choice.target)
    if fix is None and above is not site:
        moved = [*above.odd, *above.extra]
        more = also_needed(above.frame, above.node, moved, choice.target)
        fix = _move_tensors(replace(above, extra=[*above.extra, *more]), choice)
    return fix or _move_tensors(site, choice)


def _make_there(site: Site, target: str) -> Fix | None:
    """Return the fix in the one call that made the odd operand; None if another is better."""
    frame, reader = site.frame, Reader(site.frame)
    parts = {p.key: p for odd in site.odd for p in named_in(odd, reader) if p.kind == "tensor"}
    if len(parts) != 1 or len(site.odd) != 1:
        return None
    (part,) = parts.values()
    made = _maker(part, frame, site.node, target, written=part is site.fixed)
    if made is None:
        return None
    device = written_device(site, target, before=True, line=made)
    return Edit(frame, made, replaced=_made_there(made.value, frame, device)).fix(0)


def _maker(
    part: Part, frame: FailedFrame, node: ast.AST, target: str, *, written: bool
) -> ast.Assign | None:
    """Return the statement whose call needs `device=`; None if it is better to move the tensor."""
    scope, reader = function_of(node), Reader(frame)
    stmts = [s for s in ast.walk(scope or node) if isinstance(s, ast.Assign)]
    stmts = [s for s in stmts if ast.unparse(s.targets[0]) == part.text and function_of(s) is scope]
    made = [s for s in stmts if not uses(s.value, part.text)]
    call = reader.part(made[0].value) if len(made) == 1 else None
    if call is None or not call.factory:
        return None
    deeper = len(loops_around(node)) > len(loops_around(made[0]))
    adds = written or (deeper and statement(node) in stmts)
    if frame.at_top and not adds:
        return None
    for start, odd in ((call.node, replace(call, devices=part.devices)), (node, part)):
        if _meets_others(frame, start, [odd], {odd.key: target}, target):
            return None
    return made[0]


def _made_there(node: ast.AST, frame: FailedFrame, device: str) -> list[tuple[ast.AST, str]]:
    """Return the calls in an expression that make tensors, with the device added to each."""
    found: list[tuple[ast.AST, str]] = []
    for call in (n for n in ast.walk(node) if isinstance(n, ast.Call)):
        name, given = ast.unparse(call.func).rpartition(".")[2], {k.arg for k in call.keywords}
        if (name not in FACTORIES and not name.endswith("_like")) or "device" in given:
            continue
        text = frame.text(call)
        inside = text[:-1].rstrip().rstrip(",")
        comma = "" if inside.endswith("(") else ", "
        on_host = given & {"generator", "out", None}
        found.append(
            (call, moving(text, device) if on_host else f"{inside}{comma}device={device})")
        )
    return found


def _move_modules(site: Site, choice: Choice) -> Fix | None:
    """Return the fix for operands that are all modules; None if one is used on both devices."""
    stmt = statement(site.node)
    if stmt is None or any(_used_before(part.text, stmt) for part in site.odd):
        return None
    stmt, nbytes = before_loops(site.frame, stmt, [part.text for part in site.odd]), 0
    edit, may_precede = Edit(site.frame, stmt), can_precede(site.frame, stmt)
    for part in site.odd:
        if part.value is None or in_own_scope(part.node) or not may_precede:
            device = written_device(site, choice.target, before=False)
            edit.replaced.append((part.node, moving(bracketed(part.node, part.text), device)))
            continue
        device = written_device(site, choice.target, before=True, line=stmt)
        edit.before.append(moving(part.text, device))
        tensors = [tensor for _, tensor in tensors_of(part.value)]
        nbytes += sum(bytes_of(t) or 0 for t in tensors if full(t.device) != choice.target)
    return edit.fix(None if edit.replaced else nbytes, choice.other_nbytes)


def before_loops(frame: FailedFrame, stmt: ast.stmt, texts: list[str]) -> ast.stmt:
    """Return the outermost loop around a statement, if a line before it may use `texts`."""
    loops = loops_around(stmt)
    names = {root(text) for text in texts}
    once = loops and can_precede(frame, loops[-1]) and not names & stored(loops[-1])
    return loops[-1] if once else stmt


def _used_before(text: str, stmt: ast.stmt) -> bool:
    """Whether a loop uses the module earlier in its turn, where it must be as it is now."""
    return any(
        use.lineno < stmt.lineno and isinstance(getattr(use, "parent", None), ast.Call)
        for loop in loops_around(stmt)
        for use in uses(loop, text)
    )


def _move_tensors(site: Site, choice: Choice) -> Fix | None:
    """Return the fix for the odd operands and the ones that move with them; None if none is right.

    One line moves all operands that can be bound again.
    """
    stmt, given = statement(site.node), site.frame.parameters
    # In a Function's forward it would not do: gradients must be where the inputs were.
    stays = [p for p in site.odd if given[:1] == ("ctx",) and p.text in given]
    stays += [p for p in site.odd if p.kind == "object" and not hasattr(type(p.value), "to")]
    if stmt is None or stays:
        return None
    edit, names, nbytes = Edit(site.frame, stmt), list[Part](), dict[str, int | None]()
    within = written_device(site, choice.target, before=False)
    scope = function_of(site.node) or stmt
    again = any(len(uses(scope, part.key)) > 1 for part in site.odd)
    once = choice.to_host or (not site.extra and not again)
    for part in [*site.odd, *site.extra]:
        may_stand = part is not site.fixed and hasattr(part.node, "lineno")
        if not (once and may_stand) and _can_be_bound(part, site.frame, stmt):
            names.append(part)
            nbytes[part.key] = part.nbytes
        elif not may_stand:
            return None
        else:
            edit.replaced += _uses_near(part, site, within) if not choice.to_host else []
            if part in site.odd or part.node in ast.walk(site.node):
                nbytes[part.key] = 0 if part.factory else part.nbytes
                edit.replaced += _moved(part, site.frame, within, to_host=choice.to_host)
    if names:
        device = written_device(site, choice.target, before=True)
        moved = ", ".join(moving(part.text, device) for part in names)
        edit.before.append(f"{', '.join(part.text for part in names)} = {moved}")
    changes = edit.before or edit.replaced
    return edit.fix(total(nbytes.values()), choice.other_nbytes) if changes else None


def moving(text: str, device: str) -> str:
    """Return `text`, moved to a device."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def _can_be_bound(part: Part, frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether a line above can bind the operand's name again, without running the user's code."""
    node, value = part.node, part.value
    if part.kind not in ("tensor", "object") or in_own_scope(node) or not can_precede(frame, stmt):
        return False
    if part.kind == "tensor" and value is not None and value.requires_grad and value.is_leaf:
        return False
    if isinstance(node, ast.Attribute):
        owner: Any = frame.scope.value(node.value)
        plain = type(owner).__setattr__ in (object.__setattr__, nn.Module.__setattr__)
        return plain and node.attr in {**own(owner), **own(owner).get("_buffers", {})}
    own_names = (*frame.code.co_varnames, *frame.code.co_cellvars)
    named = isinstance(node, ast.Name) and part.text == node.id
    return named and (frame.at_top or part.text in own_names)


def _uses_near(part: Part, site: Site, device: str) -> list[tuple[ast.AST, str]]:
    """Return the uses, in the next few lines, of a tensor that cannot be bound again, moved."""
    scope, stmt = function_of(site.node), statement(site.node)
    if part.kind != "tensor" or scope is None or stmt is None:
        return []
    itself = {id(n) for n in ast.walk(part.node)} if part in site.odd else set()
    last, reader = (stmt.end_lineno or stmt.lineno) + _NEAR, Reader(site.frame)
    near = [n for n in uses(scope, part.key) if stmt.lineno <= n.lineno <= last]
    around = [(n, next(p for p in parents(n) if not isinstance(p, ast.keyword))) for n in near]
    return [
        (n, moving(part.text, device))
        for n, parent in around
        if id(n) not in itself and isinstance(parent, _OPERATIONS)
        if _wants_one_device(parent, reader)
    ]


def _moved(
    part: Part, frame: FailedFrame, device: str, *, to_host: bool
) -> list[tuple[ast.AST, str]]:
    """Return the operand moved where it stands; each item of a container."""
    if part.factory:
        return _made_there(part.node, frame, device)
    whole, value = frame.text(part.node), part.value
    tracked = to_host and (value.requires_grad if value is not None else "detach(" not in part.text)
    detached = ".detach()" if tracked else ""
    owner = frame.scope.value(part.node)
    mapping = issubclass(type(owner), (dict, UserDict))
    held = [each for _, each in contents(owner)]
    if not (mapping or type(owner) in (list, tuple)):
        return [(part.node, moving(bracketed(part.node, part.text) + detached, device))]
    if type(owner) not in (dict, list, tuple) and hasattr(type(owner), "to"):
        return [(part.node, moving(whole, device))]
    name = "v" if mapping else "t"
    text = moving(name + detached, device)
    if whole in frame.parameters or any(not issubclass(type(each), Tensor) for each in held):
        text = f'{text} if hasattr({name}, "to") else {name}'
    if mapping:
        return [(part.node, f"{{k: {text} for k, v in {whole}.items()}}")]
    inner = f"{text} for t in {whole}"
    return [(part.node, f"tuple({inner})" if type(owner) is tuple else f"[{inner}]")]
