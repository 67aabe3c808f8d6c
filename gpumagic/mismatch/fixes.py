"""Choose the operands to move and their target device, and write the edit.

The target is usually a module's GPU, or else the GPU with most bytes of operands. An operand that
the operation changes in place moves only if an edit can create or rebind it on the target. If a
call such as `torch.zeros(3)` made an operand, the edit adds a device to the call. Later operations
are checked too. For example, if `x` moves, then `y` must also move for `loss(net(x), y)`.
"""

import ast
import sys
from collections import UserDict
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from torch import Tensor

from gpumagic.mismatch import sources
from gpumagic.mismatch.callers import (
    Site,
    climb,
    is_transfer,
    made_by_call,
    moved_itself,
    own_nodes,
)
from gpumagic.mismatch.explanation import (
    Edit,
    Fix,
    around,
    before_loops,
    bracketed,
    total,
    trial_on,
)
from gpumagic.mismatch.operand import Part, Reader, device_of, full
from gpumagic.mismatch.operation import (
    Message,
    Operation,
    also_needed,
    clashes_later,
    learns,
    named_in,
    nodes_around,
    operation,
    read_on_host,
    storages_in,
)
from gpumagic.usercode.frames import (
    FailedFrame,
    first_name,
    function_of,
    in_own_scope,
    loops_around,
    parents,
    statement,
    stored,
    uses,
)
from gpumagic.usercode.values import own

_DEVICE_NAMES = ("device", "dev", "DEVICE", "self.device", "self.cfg.device", "args.device")


@dataclass(frozen=True)
class Choice:
    """Record which operands to move to which device."""

    target: str  # the device
    odd: tuple[Part, ...]  # the operands to move
    to_host: bool = False  # whether the operation needs these operands on the CPU


def choose(found: Operation, message: Message, target: str) -> Choice | None:
    """Choose the operands to move, and the best device unless `target` is given; or return None."""
    leaves, indexed = found.parts, message.kind == "index"
    tensors = tuple(part for part in leaves if part.kind != "array")
    if tensors and tensors != leaves and _needs_torch(found, tensors):
        arrays = tuple(part for part in leaves if part.kind == "array")
        return Choice(target or _heaviest(found), arrays)
    if message.kind in ("numpy", "host") or tensors != leaves:
        read = read_on_host(found.node, tensors)
        return Choice("cpu", read, to_host=True) if read else None
    first = f"cuda:{leaves[0].value.device_ids[0]}" if message.kind == "replicas" else None
    first = _of_indexed(found) if indexed else first
    scope, fixed = function_of(found.node) or found.node, found.fixed
    first = fixed.device if fixed and sources.read_on_cpu(fixed.key, scope) else first
    target = target or first or _heaviest(found)
    odd = [part for part in leaves if part.devices != (target,)]
    odd = [part for part in odd if not part.scalar] or odd  # CPU scalars stay if others are odd
    moving = [part for part in odd if part.kind != "object" or hasattr(type(part.value), "to")]
    return Choice(target, tuple(moving or odd)) if odd else None


def _needs_torch(found: Operation, tensors: tuple[Part, ...]) -> bool:
    """Whether an array must become a tensor, because later code needs a tensor as the result."""
    # In `(x == array).float()`, arrays have no method `float`.
    method = getattr(getattr(found.node, "parent", None), "attr", "ndim")
    if not hasattr(sys.modules["numpy"].ndarray, method):
        return True
    name = found.reader.frame.scope.name
    calls = [each for each in parents(found.node) if isinstance(each, ast.Call)]
    if any(name(first_name(ast.unparse(each.func))) is sys.modules["numpy"] for each in calls):
        return False
    inner = [each for part in tensors for each in named_in(part, found.reader) or [part]]
    tracked = any(learns(each) or getattr(each.value, "requires_grad", False) for each in inner)
    is_number = isinstance(found.node, ast.BinOp)
    return (is_number and tracked) or clashes_later(found, tensors, "cpu")


def _of_indexed(found: Operation) -> str | None:
    """Return the target for `x[i]`: the device of the tensor `x`, or the GPU of the indices."""
    # Choose the indices' GPU if the function made `x`, or if later code needs the indices there.
    (indexed, *indices), frame = found.parts, found.reader.frame
    gpus = [part for part in indices if part.device not in ("cpu", None)]
    if not gpus or indexed.device != "cpu" or indexed is found.fixed:
        return indexed.device
    names = () if frame.at_top else {*frame.code.co_varnames} - {*frame.parameters}
    masked = indexed.text in names and any("bool[" in part.about for part in gpus)
    made = masked or indexed.factory or sources.maker_of(indexed, found)
    return gpus[0].device if made or also_needed(frame, found.node, gpus, "cpu") else "cpu"


def _heaviest(found: Operation) -> str:
    """Return the best target. Prefer GPUs, then devices of modules, then the most bytes."""

    def weight(device: str) -> tuple[bool, bool, int, int, int]:
        here = [part for part in found.parts if device in part.devices]
        away = [part for part in found.parts if part.devices and part not in here]
        # An attribute that stayed here when its module moved must follow the module.
        left = [(part, sources.unregistered(part, found.reader.frame)) for part in here]
        stayed = all(each and device not in each.homes for _, each in left)
        # Instead of a result, count the variables in its expression. A module counts twice if it
        # is an operand, and once if it is in the expression of a result.
        named = [each for part in here for each in named_in(part, found.reader) or [part]]
        sizes = {part.key: part.nbytes for part in named}
        made = (sources.only_assignment(part.text, found.node) for part in named)
        calls = (getattr(stmt.value, "func", None) for stmt in made if stmt is not None)
        by = [found.reader.part(call) for call in calls if call is not None]
        model = sum(any(map(learns, filter(None, parts))) for parts in (here, named, by))
        # Later code may combine the result with values that must follow it to the target.
        more = len(also_needed(found.reader.frame, found.node, away, device))
        return not stayed, device != "cpu", model, -more, total(sizes.values()) or 0

    return max(dict.fromkeys(d for part in found.parts for d in part.devices), key=weight)


def _move_owners(choice: Choice, frames: list[FailedFrame]) -> Fix | None:
    """Return the fix that moves the one module that owns all of `choice.odd`; or None."""
    owners = [sources.owner_of(part, frames, choice.target) for part in choice.odd]
    found = {each[1].text: each for each in owners if each}
    if choice.target == "cpu" or None in owners or len(found) != 1:
        return None
    frame, part = next(iter(found.values()))
    at = operation(frame.failed, Reader(frame)) if frame.failed else None
    at = at or Operation(Reader(frame), frame.failed, (part,))
    above, _ = climb(Site(at, [part], []), frames[frames.index(frame) + 1 :])
    return _make_there(above, choice.target) or _move(above, choice)


def elsewhere(clash: Operation, choice: Choice, outer: list[FailedFrame]) -> Fix | None:
    """Return a fix of the code that made the operands, or one that moves their module; or None."""
    wanted = [storages_in(part, clash.reader) for part in choice.odd]
    frames = [clash.reader.frame, *outer]
    for frame in frames if choice.target != "cpu" else ():
        at = Operation(Reader(frame), frame.failed or ast.Pass(), ())
        if fix := made_by_call(wanted, at, choice.target):
            return fix
    # A cell that compares two models' parameters must not split a model over two devices.
    compares = all(sources.is_leaf(p) and isinstance(p.node, ast.Attribute) for p in clash.parts)
    return None if compares and frames[0].at_top else _move_owners(choice, frames)


def write_fix(site: Site, above: Site, choice: Choice) -> Fix | None:
    """Return the fix at `site`, or at `above` in the outermost caller; None if neither works."""
    if all(part.kind == "module" for part in choice.odd):
        return _move(above, choice)
    if choice.to_host:
        given = _read_above(site, above)
        # Copy in the caller only if no other line of the function needs the argument on the GPU.
        climbed = above is not site and _used_once(site) and all(p in given for p in above.odd)
        return _move(replace(above, odd=given) if climbed else site, choice)
    made = _make_there(site, choice.target) or _make_there(above, choice.target)
    return made or _move(above, choice) or _move(site, choice)


def sent_too(site: Site) -> Fix | None:
    """Return the fix of a function that moves only some of the tensors that it returns, or None."""
    frame, odd = site.frame, [n for part in site.odd for n in named_in(part, site.at.reader)]
    for made in nodes_around(site.at.node, ast.Assign):
        code, body = sources.body_of(frame.scope.value(getattr(made.value, "func", made)))
        nodes = own_nodes(body)
        sent = [node for node in nodes if is_transfer(node)]
        left = _returned(nodes, made.targets[0], odd, frame)
        hows = {ast.unparse(n).removeprefix(ast.unparse(n.func.value)) for n in sent}
        # All transfers must be alike and name only a device: no dtype, and not the CPU.
        how = hows.pop() if len(hows) == 1 and not any(map(is_transfer, left)) else ""
        if sources.TO_DEVICE.fullmatch(how) and len(left) == len(odd):
            where = frame.in_file(code.co_filename)
            edits: Any = [(each, bracketed(each, where.text(each)) + how) for each in left]
            return around(where, edits, total(part.nbytes for part in site.odd))
    return None


def _returned(nodes: list[Any], to: Any, odd: list[Part], frame: FailedFrame) -> list[ast.expr]:
    """Return the items of a function's only `return x, y` that are assigned to odd names."""
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    items = getattr(values[0], "elts", []) if len(values) == 1 else []
    wanted = {id(part.value) for part in odd}
    pairs = zip(getattr(to, "elts", []), items, strict=False)
    return [item for name, item in pairs if id(frame.scope.value(name)) in wanted]


def _read_above(site: Site, above: Site) -> list[Part]:
    """Return the operands that the caller must copy to the CPU."""
    # If all GPU operands at `site` are copied, all GPU operands in the caller are copied too.
    ats = (site.at.parts, above.at.parts)
    here, there = ([p for p in parts if p.devices and p.device != "cpu"] for parts in ats)
    if here == site.odd:
        return [p for p in there if p in above.odd or p.kind not in ("object", "module")]
    return [part for part in above.odd if above.frame.text(part.node) == part.text]


def _make_there(site: Site, target: str) -> Fix | None:
    """Return the fix of the assignments that made the operands and extra values, or None."""
    frame, reader, moved = site.frame, Reader(site.frame), [*site.odd, *site.extra]
    named = [[p for p in named_in(each, reader) if p.kind == "tensor"] for each in moved]
    if any(len(parts) != 1 for parts in named) or any(part.factory for part in site.odd):
        return None
    parts = {part.key: part for (part,) in named}
    made = [sources.maker_of(part, site.at) for part in parts.values()]
    stmts = sorted(filter(None, made), key=lambda stmt: stmt.lineno)
    if len(stmts) < len(made):
        return None
    device, edits = written_device(site, target, stmts[0]), list[tuple[ast.AST, str]]()
    copied = 0
    for stmt in stmts:
        created = sources.with_device(stmt.value, frame, device)
        edits += created or [(stmt.value, sources.moved(stmt.value, reader, target, device, ""))]
        whole = (part.nbytes or 0 for part in parts.values() if sources.assigns(stmt, part.text))
        copied += 0 if created else sum(whole)
    return around(frame, edits, copied)


def _move(site: Site, choice: Choice) -> Fix | None:
    """Return the fix that moves the operands and the extra values of `site`, or None."""
    frame, to_host = site.frame, choice.to_host
    stmt = _before(site, once=not to_host)
    ways = _split(site, stmt, to_host=to_host) if stmt is not None else None
    if stmt is None or ways is None:
        return None
    above, inline = ways
    device = '"cpu"' if to_host else written_device(site, choice.target, stmt, inside=not above)
    # A line above a comprehension cannot use the comprehension's variables.
    in_place = not above or not in_own_scope(site.at.node)
    device = device if to_host or not in_place else _loop_module_device(site) or device
    edits = [(part, _moved(part, site, device, choice)) for part in inline]
    # An operand without edits is used only in later lines, so its bytes are not counted.
    moved = [*above, *(part for part, found in edits if found)]
    nbytes = {part.key: part.to_move(choice.target) for part in moved}
    replaced = [e for _, found in edits for e in found]
    edit = Edit(frame, stmt, _lines(above, device), replaced)
    return edit.fix(total(nbytes.values())) if moved else None


def written_device(site: Site, target: str, line: ast.stmt, *, inside: bool = False) -> str:
    """Return code for the device `target`, such as ``x.device``.
    If `inside`, the code may use the variables of a comprehension around the operation."""
    names = [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, inside))]
    in_class = any(isinstance(node, ast.ClassDef) for node in parents(site.at.node))
    unknown = _unknown(names, line, site, inside, in_class)
    names = [name for name in names if first_name(name) not in unknown]
    # As the last choice, use a global such as `device`, even if the function does not read it yet.
    names += [n for n in _DEVICE_NAMES[:3] if not in_class and n not in _bound_later(line, site)]
    for name in names:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    trial = trial_on.get() == target
    there = (p.text for p in site.at.parts if p.kind == "module" and p.devices == (target,))
    module = next((name for name in there if first_name(name) not in unknown), None)
    # Code of a function may run on another device for its next caller.
    if module and (trial or not site.frame.at_top):
        return f"next({module}.parameters()).device"
    return "torch.get_default_device()" if trial else f'"{target}"'


def _unknown(
    names: list[str], line: ast.stmt, site: Site, inside: bool, in_class: bool
) -> set[str]:
    """Return the variables, such as `self` in `self.device`, that code at `line` cannot read."""
    unknown = _bound_later(line, site)
    if inside:
        unknown -= sources.bound_inside(site.at.node)
    if not (in_class or not site.frame.at_top):
        return unknown
    # In a class, use only local names. In a function, also globals that it already reads.
    code = ast.walk(function_of(site.at.node) or line)
    used = {node.id for node in code if isinstance(node, ast.Name) and not in_class}
    return unknown | ({*map(first_name, names)} - {*site.frame.scope.local, *used})


def _at_hand(site: Site, inside: bool) -> list[str]:
    """Return expressions, such as operands, whose `.device` may be the target device."""
    every = [*chain.from_iterable(ast.walk(part.node) for part in [*site.at.parts, *site.odd])]
    nodes = [n for n in every if isinstance(n, (ast.Name, ast.Attribute))]
    nodes = [n for n in nodes if inside or not in_own_scope(n)]
    layers = [f"{part.text}.weight" for part in site.at.parts if part.kind == "module"]
    layers = layers if trial_on.get() or not site.frame.at_top else []
    names = [*map(ast.unparse, nodes), *site.frame.parameters, *layers]
    return [name for name in names if not name.endswith((".grad", ".data"))]


def _bound_later(line: ast.stmt, site: Site) -> set[str]:
    """Return a function's local names that are unbound at `line`, or bound again before `site`."""
    bound = [n for n in ast.walk(function_of(line) or line) if isinstance(n, ast.Name)]
    bound = [n for n in bound if isinstance(n.ctx, ast.Store)]
    again = {n.id for n in bound if line.lineno <= n.lineno < site.at.node.lineno}
    known = ({n.id for n in bound if n.lineno < line.lineno} | {*site.frame.parameters}) - again
    return {n.id for n in bound} - known


def _loop_module_device(site: Site) -> str | None:
    """Return code for a module's device, if each pass of a loop may call another module."""
    for part in site.at.parts if site.at.calls_module else ():
        turns = {name for loop in loops_around(part.node) for name in stored(loop)}
        a_turns = in_own_scope(part.node) or first_name(part.text) in turns
        if part.kind == "module" and part not in site.odd and a_turns:
            return f"next({part.text}.parameters()).device"
    return None


def _before(site: Site, *, once: bool) -> ast.stmt | None:
    """Return the statement above which a line can move the operands, or None."""
    stmt, moved = statement(site.at.node), [*site.odd, *site.extra]
    if stmt is None or any(_stays(part, site.frame, stmt) for part in site.odd):
        return None
    start = before_loops(site.frame, stmt, [ast.unparse(part.node) for part in moved])
    frame, fixed = site.frame, site.at.fixed
    goes = any(moved_itself(part, frame)[1] for part in moved if part.kind == "module")
    start = stmt if goes or _loop_module_device(site) else start
    if once and all(sources.can_be_bound(part, frame, start, part is fixed) for part in moved):
        return start
    return stmt


def _split(site: Site, stmt: ast.stmt, *, to_host: bool) -> tuple[list[Part], list[Part]] | None:
    """Return the operands to move by a new line, and those to move in the expression; or None."""
    above, inline = list[Part](), list[Part]()
    once = (to_host or _used_once(site)) and stmt is statement(site.at.node)
    for part in [*site.odd, *site.extra]:
        may_inline = part is not site.at.fixed and hasattr(part.node, "lineno")
        is_whole = part.kind == "module" or (sources.is_leaf(part) and not to_host)
        is_whole |= part.text.removeprefix("self.").isidentifier() and "." in part.text
        is_inline = once and may_inline and not is_whole
        if not is_inline and sources.can_be_bound(part, site.frame, stmt, part is site.at.fixed):
            above.append(part)
        elif may_inline:
            inline.append(part)
        else:
            return None
    return above, inline


def _lines(above: list[Part], device: str) -> list[str]:
    """Return lines that move operands: one per module or leaf, and one for all other tensors."""
    above = [*{part.key: part for part in above}.values()]  # `attention(x, x, x)` moves x once
    lines = [sources.moving(part.text, device) for part in above if part.kind == "module"]
    leaves = [f"{part.text}.data" for part in above if sources.is_leaf(part)]
    lines += [f"{leaf} = {sources.moving(leaf, device)}" for leaf in leaves]
    if names := [p.text for p in above if p.kind != "module" and not sources.is_leaf(p)]:
        moved = ", ".join(sources.moving(name, device) for name in names)
        lines.append(f"{', '.join(names)} = {moved}")
    return lines


def _used_once(site: Site) -> bool:
    """Whether each operand is used only once, so that the expression itself can move it."""
    scope = function_of(site.at.node) or site.at.node
    return not site.extra and all(len(uses(scope, part.key)) < 2 for part in site.odd)


def _stays(part: Part, frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether an operand cannot be moved, or moving it may break other code."""
    if part.kind == "module":  # an earlier call in the loop may need the module here
        earlier = [use for loop in loops_around(stmt) for use in uses(loop, part.text)]
        earlier = [use for use in earlier if use.lineno < stmt.lineno]
        on_both = any(isinstance(next(parents(use), None), ast.Call) for use in earlier)
        return on_both or bool(own(part.value).get("hf_device_map"))  # placed by accelerate
    if part.kind == "object":
        return not hasattr(type(part.value), "to")
    # An autograd.Function must return gradients on its inputs' devices, so the inputs stay.
    return frame.parameters[:1] == ("ctx",) and part.text in frame.parameters


def _moved(part: Part, site: Site, device: str, choice: Choice) -> list[tuple[ast.AST, str]]:
    """Return the edits that move an operand in the failing expression."""
    if not (part in site.odd or part.factory or part.node in ast.walk(site.at.node)):
        return []
    if part.factory:
        return sources.with_device(part.node, site.frame, device)
    if part.kind == "array":
        floats = (each.text for each in site.at.parts if "float32" in each.about)
        dtype = next((f"dtype={text}.dtype, " for text in floats if "float64" in part.about), "")
        return [(part.node, f"torch.as_tensor({part.text}, {dtype}device={device})")]
    owner = site.frame.scope.value(part.node)
    made_of = [each.value for each in named_in(part, site.at.reader)]
    tracked = any(not issubclass(type(t), Tensor) or t.requires_grad for t in made_of or [None])
    tracked = tracked and "detach(" not in part.text and not part.text.endswith(".data")
    detached = ".detach()" if choice.to_host and tracked else ""
    if issubclass(type(owner), (dict, UserDict)) or type(owner) in (list, tuple):
        text = sources.moving_each(part.node, owner, site.frame, device, detached)
    elif isinstance(node := part.node, (ast.ListComp, ast.GeneratorExp)):
        each = bracketed(node.elt, site.at.reader.text(node.elt))
        return [(node.elt, sources.moving(each + detached, device))]
    else:
        text = sources.moved(node, site.at.reader, choice.target, device, detached)
    compares = isinstance(site.at.node, ast.Compare)
    if compares and any(each.kind == "array" for each in site.at.parts):
        text += ".numpy()"
    return [(part.node, text)]
