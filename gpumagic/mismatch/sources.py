"""Find the code that made an operand of a failed operation, and edit the code there.

There are three cases: an assignment made the operand, the operand belongs to a module that was not
moved, or the operand is a module's attribute that `.to()` does not move.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gpumagic.mismatch import explanation, operand
from gpumagic.mismatch.explanation import RERUN, Fix, Operand, around, bracketed, can_precede
from gpumagic.mismatch.operation import Operation, named_in, nodes_around, storages
from gpumagic.usercode.files import is_users
from gpumagic.usercode.frames import (
    OWN_SCOPES,
    FailedFrame,
    definition,
    first_name,
    function_of,
    loops_around,
    parents,
    statement,
    stored,
    uses,
)
from gpumagic.usercode.values import MISSING, contents, of_function, own
from gpumagic.usercode.variables import names_read

# Statements that register a value with a module. Their fields are the module, the name, the value.
# The buffer is not persistent, so that checkpoints do not change.
_BUFFER = '{}.register_buffer("{}", {}, persistent=False)'
_REGISTERED = "{}.{} = nn.%s({})"  # %s is a class such as Parameter or ModuleList
PERMANENTLY = "; to fix it permanently, "
_ON_CPU = re.compile(r"\.cpu\(\)|\.numpy\(|pack_padded")
# A transfer that names only a device, and no dtype, as in ``.to(self.device)``
TO_DEVICE = re.compile(r"(?i)\.(cuda\(\)|to\(([\w.]*dev(ice)?|[\"']cuda(:\d)?[\"'])\))")
_PARAMETER = re.compile(r"[\w.]*\bParameter(?=\()")


@dataclass(frozen=True)
class Unregistered:
    """A module's attribute that `.to()` does not move, and the statement that registers it."""

    cls: str
    name: str
    registered: str
    reason: str  # why `.to()` did not move the attribute, and the code to write
    homes: set[str]  # devices of the module's parameters and buffers
    module: nn.Module

    def others(self, frame: FailedFrame, target: str) -> "Iterator[Unregistered]":
        """Yield the module's other floating-point attributes that are not on `target`."""
        for name, held in own(self.module).items():
            parts = [held, *(item for _, item in contents(held))]
            tensors = ((id(part), t) for part in parts for _, t in operand.tensors_of(part))
            away = {n for n, t in tensors if t.is_floating_point() and str(t.device) != target}
            better = _registered(held, away)
            follows = read_on_cpu(f"self.{name}", frame.tree or ast.Pass()) is False
            if better and follows and name != self.name and not name.startswith("_"):
                yield replace(self, name=name, registered=better)

    def edit(self, frame: FailedFrame, target: str) -> tuple[ast.AST, str] | None:
        """Return the attribute's only assignment, in `__init__`, and its new code; else None."""
        nodes, text = ast.walk(frame.tree) if frame.tree is not None else (), f"self.{self.name}"
        classes = [n for n in nodes if isinstance(n, ast.ClassDef) and n.name == self.cls]
        inner: list[Any] = [node for each in classes for node in ast.walk(each)]
        made = [node for node in inner if assigns(node, text) and not uses(node.value, text)]
        where = [getattr(function_of(stmt), "name", "") for stmt in made]
        # If the target is the CPU, register an attribute only if its module is on the CPU.
        stays = target == "cpu" and self.homes != {target}
        # A constant such as `None` is a placeholder that other code replaces.
        if stays or where != ["__init__"] or isinstance(made[0].value, ast.Constant):
            return None
        value = ast.get_source_segment(frame.source, made[0].value) or ""
        if self.registered == _REGISTERED % "Parameter":  # the value may call Parameter already
            value = ast.unparse(ast.parse(_PARAMETER.sub("", value), mode="eval"))
        return made[0], self.registered.format("self", self.name, value)


def read_on_cpu(text: str, tree: ast.AST) -> bool | None:
    """Whether code reads an expression on the CPU, as in ``x.numpy()``; None if nothing does."""
    read = [ast.unparse(stmt) for use in uses(tree, text) if (stmt := statement(use)) is not None]
    return any(map(_ON_CPU.search, read)) if read else None


def unregistered(part: operand.Part, frame: FailedFrame) -> Unregistered | None:
    """Return the unregistered attribute that is or contains the operand; None if there is none."""
    nodes = [node for node in ast.walk(part.node) if isinstance(node, ast.Attribute)]
    odd = {id(frame.scope.value(node)) for node in nodes} | {id(part.value)}
    odd |= {id(each.value) for each in named_in(part, operand.Reader(frame))}
    owners = {ast.unparse(node.value): frame.scope.value(node.value) for node in nodes}
    owners["self"] = frame.scope.local.get("self", MISSING)
    every = nodes_around(frame.failed or part.node, ast.Attribute)
    assigned = [ast.unparse(node) for node in every if isinstance(node.ctx, ast.Store)]
    for owner, module in owners.items():
        attributes = own(module) if issubclass(type(module), nn.Module) else {}
        for name, held in attributes.items():
            better = None if name.startswith("_") else _registered(held, odd)
            if better:
                a_tensor = issubclass(type(held), Tensor)
                # A function cannot assign a tensor to the name of a Parameter.
                better = _BUFFER if a_tensor and f"{owner}.{name}" in assigned else better
                code = better.format(owner, name, "…")
                kind = "attribute" if a_tensor else type(held).__name__
                does = "moves parameters and buffers only" if a_tensor else "skips its contents"
                why = f"{owner}.{name} is a plain {kind}, and .to() {does}"
                why += f"{PERMANENTLY}write {code} in __init__, {RERUN}"
                homes = {operand.full(tensor.device) for tensor in moving_tensors(module)}
                return Unregistered(type(module).__name__, name, better, why, homes, module)
    return None


def _registered(held: Any, odd: set[int]) -> str | None:
    """Return the statement that registers `held`, if `odd` has the id of `held` or of an item."""
    if issubclass(type(held), Tensor):
        better = _REGISTERED % "Parameter" if held.requires_grad else _BUFFER
        return better if id(held) in odd else None
    items = contents(held)
    if not any(id(item) in odd for _, item in items):
        return None
    # Keys become names of submodules or parameters. Such names must not contain a dot.
    keys = next(zip(*items, strict=True), ())
    texts = set(map(type, keys)) == {str} and all(map(str.isidentifier, keys))
    named = type(held) is not dict or texts
    for kind in (nn.Module, nn.Parameter):
        if named and all(issubclass(type(item), kind) for _, item in items):
            return _REGISTERED % f"{kind.__name__}{'Dict' if type(held) is dict else 'List'}"
    return None


def register(parts: list[operand.Part], frame: FailedFrame, target: str) -> Fix | None:
    """Return one fix that registers all these operands; None if there is no such fix."""
    found = [unregistered(part, frame) for part in parts]
    edits: Any = [each.edit(frame, target) if each else None for each in found]
    if not all(edits):
        return None
    others = (other for each in found if each for other in each.others(frame, target))
    more = [edit for each in others if (edit := each.edit(frame, target)) and edit not in edits]
    return around(frame, [*edits, *more], 0) or around(frame, edits, 0)


def owner_of(
    part: operand.Part, frames: list[FailedFrame], target: str
) -> tuple[FailedFrame, operand.Part] | None:
    """Return the outermost frame that names the operand's module, and the module; or None."""
    # If the outermost frame names a leaf operand, return the operand in place of a module.
    top = frames[-1]
    if is_leaf(part) and top is not frames[0] and top.scope.name(part.text) is part.value:
        return top, part
    named = [part] if part.kind == "module" else named_in(part, operand.Reader(frames[0]))
    mine = all(each is part or each.kind == "tensor" for each in named)  # False for module outputs
    wanted = set[Any]().union(*(storages(each.value) for each in named)) if mine else set()
    every = [(each, node) for each in frames for node in _names_around(each, part)]
    for frame in reversed(frames if wanted else []):
        for within, node in every:
            # The cell can move a module that a function names, unless it is the function's own.
            if within is not frame and first_name(ast.unparse(node)) in within.scope.local:
                continue
            module = frame.scope.value(node)
            tensors = moving_tensors(module) if issubclass(type(module), nn.Module) else []
            # Skip modules with tensors on a third device, because `.to(target)` would move these.
            devices = {operand.full(tensor.device) for tensor in tensors}
            if wanted <= storages(tensors) and devices <= {*part.devices, target}:
                return frame, operand.describe(module, node, ast.unparse(node))[0]
    return None


def _names_around(frame: FailedFrame, part: operand.Part) -> list[ast.expr]:
    """Return names in the failed statement and its loops' iterables, and the module's own name."""
    failed = frame.failed or ast.Pass()
    loops = [loop.iter for loop in loops_around(failed) if isinstance(loop, ast.For)]
    trees: list[ast.AST] = [statement(failed) or failed, *loops]
    nodes: list[Any] = [node for tree in trees for node in ast.walk(tree)]
    found = [n for n in nodes if isinstance(n, operand.NAMED) and isinstance(n.ctx, ast.Load)]
    # A function may read a global module, so try the module's name in the cell too.
    a_module = part.kind == "module" and part.text.isidentifier()
    return [*found, *[ast.Name(part.text, ast.Load())] * a_module]


def moving_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors of a module that `.to()` moves."""
    return [*nn.Module.parameters(module), *nn.Module.buffers(module)]


def maker_of(part: operand.Part, at: Operation) -> ast.Assign | None:
    """Return the assignment that created an operand, if a fix can edit the assignment; or None."""
    node, frame = at.node, at.reader.frame
    made = only_assignment(part.text, node)
    call = operand.Reader(frame).part(made.value) if made is not None else None
    always = function_of(node) is getattr(made, "parent", None)
    # If the assignment is conditional, a function's parameter may still have the caller's value.
    if made is None or call is None or (part.text in frame.parameters and not always):
        return None
    if isinstance(made.value, ast.Subscript) and len(whole := named_in(call, at.reader)) == 1:
        return maker_of(whole[0], at)
    from_numpy = ast.unparse(getattr(made.value, "func", made)).endswith("from_numpy")
    created = with_device(made.value, frame, "")
    # An index that is created on a GPU, and is read once, may be created on the CPU instead.
    an_index = isinstance(node, ast.Subscript) and part.device != "cpu"
    once = an_index and len(uses(function_of(node) or node, part.text)) == 1
    words = getattr(made.value, "keywords", []) if once else []
    asked = any(word.value is node for node, _ in created for word in words)
    # `.cuda()` without a number may name another GPU than the one that is needed.
    value: Any = made.value
    on_default = getattr(getattr(value, "func", None), "attr", "") == "cuda"
    movable = created and (is_leaf(part) or (on_default and not operand.arguments(value)))
    # `self.device` may be out of date, because a module's `.to()` does not change it. A function
    # that names a GPU, such as "cuda:0", may get its arguments on another GPU.
    words = [word.value for word in getattr(value, "keywords", ())]
    given = [n for n, _ in created if n in words]
    stale = part.device == "cpu" and any(ast.unparse(n).startswith("self.") for n in given)
    named = any("cuda" in str(getattr(n, "value", "")) for n in given)
    named &= isinstance(function_of(made), ast.FunctionDef)
    movable = movable or stale or named
    sent = moves_to_device(value, at.reader) and part.device != "cpu" and not is_leaf(part)
    return made if call.factory or from_numpy or asked or movable or sent else None


def body_of(function: Any) -> tuple[Any, Any]:
    """Return the code of a user's function, and its syntax node; (None, None) for other values."""
    code = of_function(function, "__code__")
    is_own = is_users(getattr(code, "co_filename", None))
    return (code, definition(code)) if is_own else (None, None)


def in_method(called: ast.AST, frame: FailedFrame, target: str) -> Fix | None:
    """Return a fix of a module's method so that it creates its results on the module's device."""
    function: Any = frame.scope.value(called)
    function = function.forward if issubclass(type(function), nn.Module) else function
    code, body = body_of(function)
    owner: Any = function.__self__ if type(function) is MethodType else None
    if body is None or not issubclass(type(owner), nn.Module):
        return None
    where, device = frame.in_file(code.co_filename), "next(self.parameters()).device"
    edits = [edit for value in _results(body) for edit in with_device(value, where, device)]
    there = {operand.full(parameter.device) for parameter in nn.Module.parameters(owner)}
    # If the function creates other tensors too, these may have to move with the results.
    whole = there == {target} and len(with_device(body, where, device)) == len(edits)
    return around(where, edits, 0) if whole else None


def _results(function: ast.AST) -> list[ast.expr]:
    """Return the expressions that a function returns, directly or by a local name."""
    body = [*ast.walk(function)]
    values = [n.value for n in body if isinstance(n, ast.Return) and n.value]
    names = {*names_read(ast.Tuple(values, ast.Load()))}
    return values + [n.value for n in body if isinstance(n, ast.Assign) and stored(n) & names]


def moved(node: Any, reader: operand.Reader, target: str, device: str, detached: str) -> str:
    """Return code to move an expression: ``x.cuda()`` or ``x.to(y)`` becomes ``x.to(device)``."""
    moves = (target != "cpu" or explanation.trial_on.get()) and moves_to_device(node, reader)
    whole = node.func.value if moves else node
    whole_text = bracketed(whole, reader.text(whole)) + detached
    there = moves and getattr(reader.part(whole), "device", None) == target
    return whole_text if there and not explanation.trial_on.get() else moving(whole_text, device)


def moves_to_device(node: Any, reader: operand.Reader) -> bool:
    """Whether code such as ``x.cuda()`` or ``x.to(device)`` moves a value and does no more."""
    named = getattr(getattr(node, "func", None), "attr", "")
    given = [*node.args, *(k.value for k in node.keywords)] if named == "to" else []
    only_device = len(given) == 1 and reader.device(given[0], "") not in ("", None)
    return named in ("cuda", "cpu") or only_device


def is_leaf(part: operand.Part) -> bool:
    """Whether an operand is a leaf that requires a gradient. A moved copy would not be a leaf."""
    return part.kind == "tensor" and part.value.requires_grad and part.value.is_leaf


def only_assignment(text: str, node: Any) -> ast.Assign | None:
    """Return the only assignment to `text` in a node's function, unless it is below the node."""
    # Statements such as `x = x + 1` do not count, unless the last one is `x = x.to(device)`.
    every = chain.from_iterable(map(_for_each_name, nodes_around(node, ast.Assign)))
    stmts = [stmt for stmt in every if assigns(stmt, text)]
    sent = [stmt for stmt in stmts if _sends(text, stmt.value)]
    made = [stmt for stmt in stmts if not uses(stmt.value, text)]
    made = sent if sent == stmts[-1:] else made
    return made[0] if len(made) == 1 and made[0].lineno <= node.lineno else None


def _sends(text: str, value: ast.expr) -> bool:
    """Whether code `value` moves `text` to a device, as ``x.to(device)`` moves `x`."""
    return TO_DEVICE.fullmatch(ast.unparse(value).removeprefix(text)) is not None


def _for_each_name(stmt: ast.Assign) -> list[ast.Assign]:
    """Return ``x, y = x.to(z), y.to(z)`` as two assignments; other statements unchanged."""
    names, values = (getattr(node, "elts", []) for node in (stmt.targets[0], stmt.value))
    pairs = [*zip(names, values, strict=False)] if len(names) == len(values) else []
    if not pairs or not all(_sends(ast.unparse(name), value) for name, value in pairs):
        return [stmt]
    each: list[Any] = [ast.Assign([name], value) for name, value in pairs]
    for one in each:
        one.lineno, one.parent = stmt.lineno, next(parents(stmt))
    return each


def assigns(stmt: ast.AST | None, text: str) -> bool:
    """Whether a statement assigns this name, attribute or item."""
    return isinstance(stmt, ast.Assign) and ast.unparse(stmt.targets[0]) == text


def with_device(node: Any, frame: FailedFrame, device: str) -> list[tuple[ast.AST, str]]:
    """Return edits that add `device` to the outermost calls that create tensors or generators."""
    function = frame.scope.value(node.func) if isinstance(node, ast.Call) else None
    # Consider only torch's functions, because NumPy has functions of the same names.
    name = str(of_function(function, "__name__")) if operand.is_torch(function) else ""
    given = {keyword.arg: keyword.value for keyword in getattr(node, "keywords", ())}
    makes = name in operand.FACTORIES or name.endswith("_like")
    if isinstance(node, ast.Call) and (edit := _special_maker(node, function, frame, device)):
        return [edit]
    if makes and "device" in given:
        return [(given["device"], device)]
    if makes and given.keys() & {"generator", "out", None}:
        return [(node, moving(frame.text(node), device))]
    if makes:
        return [with_keyword(node, frame, f"device={device}")]
    edits = [e for n in ast.iter_child_nodes(node) for e in with_device(n, frame, device)]
    if edits and moves_to_device(node, operand.Reader(frame)):
        # Drop `.cuda()` in `torch.zeros(3).cuda()`, because the tensor is created on the device.
        whole = bracketed(node.func.value, frame.text(node.func.value))
        return [(node, edits[0][1] if edits[0][0] is node.func.value else moving(whole, device))]
    return edits


def _special_maker(
    node: ast.Call, function: Any, frame: FailedFrame, device: str
) -> tuple[ast.AST, str] | None:
    """Return the edit of a call that does not take its device as ``device=``, or None."""
    if function is torch.load:
        where = [word.value for word in node.keywords if word.arg == "map_location"]
        return (where[0], device) if where else with_keyword(node, frame, f"map_location={device}")
    if function is torch.Generator:
        return node, f"{frame.text(node.func)}({device})"
    if dtype := operand.cpu_dtype(node, frame.scope):
        return node, f"{frame.text(node.func).removesuffix('.type')}.to({device}, {dtype})"
    if function is torch.manual_seed:  # it returns the CPU's generator
        return node, f"torch.Generator({device}).{frame.text(node).removeprefix('torch.')}"
    return None


def with_keyword(node: ast.Call, frame: FailedFrame, keyword: str) -> tuple[ast.AST, str]:
    """Return a call, and its text with `keyword` appended to the arguments."""
    inside = frame.text(node)[:-1].rstrip().rstrip(",")
    return node, f"{inside}{'' if inside.endswith('(') else ', '}{keyword})"


def can_be_bound(
    part: operand.Part, frame: FailedFrame, stmt: ast.stmt, written: bool = False
) -> bool:
    """Whether a line above `stmt` can rebind the operand without running the user's setters."""
    # An item of a list or dict is rebound only if the operation writes to the item (`written`).
    node, value = part.node, part.value
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    if names & bound_inside(node) or not can_precede(frame, stmt):
        return False
    targets = [getattr(loop, "target", ast.Pass()) for loop in loops_around(stmt)]
    if written and isinstance(node, ast.Name) and names & set[str]().union(*map(stored, targets)):
        return False  # the operation would change a copy, and not the item of the loop
    if part.kind == "module":
        return value is not None
    if is_leaf(part):
        turns = {name for loop in loops_around(stmt) for name in stored(loop)}
        return frame.at_top and isinstance(node, ast.Name) and node.id not in turns
    if part.kind not in ("tensor", "object"):
        return False
    if isinstance(node, ast.Attribute):
        return _can_be_set(frame.scope.value(node.value), node.attr)
    if isinstance(node, ast.Subscript) and written:
        return type(frame.scope.value(node.value)) in (list, dict)
    own_names = (*frame.code.co_varnames, *frame.code.co_cellvars)
    named = isinstance(node, ast.Name) and part.text == node.id
    return named and (frame.at_top or part.text in own_names)


def bound_inside(node: ast.AST) -> set[str]:
    """Return the names that comprehensions and lambdas around a node bind."""
    within = takewhile(lambda parent: not isinstance(parent, ast.stmt), parents(node))
    inner = [n for each in within if isinstance(each, OWN_SCOPES) for n in ast.walk(each)]
    return {n.arg for n in inner if isinstance(n, ast.arg)}.union(*map(stored, inner))


def _can_be_set(owner: Any, name: str) -> bool:
    setter: Any = type(owner).__setattr__
    plain = setter in (object.__setattr__, nn.Module.__setattr__)
    return plain and name in {**own(owner), **own(owner).get("_buffers", {})}


def row(part: operand.Part, odd: bool) -> Operand:
    return Operand(part.text, part.devices, part.nbytes, part.about, odd=odd)


def moving(text: str, device: str) -> str:
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def moving_each(node: ast.expr, owner: Any, frame: FailedFrame, device: str, detached: str) -> str:
    """Return the code that moves a container's tensors; `detached` is ``".detach()"`` or empty."""
    whole, mapping = frame.text(node), type(owner) not in (list, tuple)
    if type(owner) is not dict and hasattr(type(owner), "to"):
        return moving(whole, device)
    name = "v" if mapping else "t"
    text = moving(name + detached, device)
    if not all(issubclass(type(each), Tensor) for _, each in contents(owner)):
        text = f'{text} if hasattr({name}, "to") else {name}'
    if mapping:
        return f"{{k: {text} for k, v in {whole}.items()}}"
    inner = f"{text} for t in {whole}"
    return f"tuple({inner})" if type(owner) is tuple else f"[{inner}]"
