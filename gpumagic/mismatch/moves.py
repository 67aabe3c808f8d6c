"""Move tensors, by name for good or where they are used; modules once; or create a tensor there.

The device is written as the user would write it at that line.
"""

import ast
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from gpumagic.mismatch.choose import Choice, maker, wants_one_device
from gpumagic.mismatch.explanation import Edit, Fix, bracketed, total
from gpumagic.mismatch.operand import (
    FACTORIES,
    Part,
    Reader,
    bytes_of,
    device_of,
    flat,
    full,
    tensors_of,
)
from gpumagic.mismatch.operation import named_in, operation
from gpumagic.usercode.frames import (
    FailedFrame,
    function_of,
    in_own_scope,
    loops_around,
    parents,
    root,
    statement,
    stored,
    uses,
)
from gpumagic.usercode.values import contents, own

_DEVICE_NAMES = ("device", "dev", "DEVICE", "self.device", "self.cfg.device", "args.device")
_NEAR = 12  # lines


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
        node = frame.failed
        if node is None or not all(_is_parameter(part, site.frame) for part in moved):
            break
        done = operation(node, Reader(frame))
        parts = list(done.parts) if done else []
        found = [next((p for p in flat(parts) if p.value is m.value), None) for m in moved]
        above = [part for part in found if part is not None]
        if len(above) < len(moved):
            break
        moved = above
        site = Site(frame, node, moved[:count], moved[count:], parts)
    names = {a.key: b.text for a, b in zip(first, moved, strict=True) if a.text != b.text}
    return site, names


def _is_parameter(part: Part, frame: FailedFrame) -> bool:
    known = part.kind in ("tensor", "object", "module") and part.value is not None
    return known and part.text in frame.parameters and not frame.at_top


def written_device(site: Site, target: str, *, before: bool, line: ast.stmt | None = None) -> str:
    """Return an expression for the device, as its user would write it in the failing statement.

    Or at an earlier `line`, where a name that is bound in between is not yet known.
    """
    names = [*_DEVICE_NAMES, *(f"{name}.device" for name in _at_hand(site, before))]
    names += [f"{name}.device" for name in site.frame.parameters]
    unknown = _bound_between(line, site.node) if line is not None else set()
    names = [name for name in names if root(name) not in unknown]
    # A variable of the notebook has no place in a class.
    if any(isinstance(node, ast.ClassDef) for node in parents(site.node)):
        names = [name for name in names if root(name) in site.frame.scope.local]
    for name in names:
        value = site.frame.scope.value(ast.parse(name, mode="eval").body)
        device = device_of(value) if type(value) is not int else None
        if device is not None and full(device) == target:
            return name
    return f'"{target}"'


def _bound_between(line: ast.stmt, node: ast.AST) -> set[str]:
    """Return the names that may be bound from a line on, until the statement of `node` runs."""
    stmt, scope = statement(node), function_of(node)
    if stmt is None or scope is None:
        return set()
    steps = (n for n in ast.walk(scope) if isinstance(n, ast.Name))
    between = {n.id for n in steps if line.lineno <= n.lineno < stmt.lineno and _is_store(n)}
    loops = (loop for loop in loops_around(stmt) if loop.lineno >= line.lineno)
    return between.union(*map(stored, loops))


def _is_store(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


def _at_hand(site: Site, before: bool) -> Iterator[str]:
    """Yield the names in the operands."""
    for part in [*site.anchors, *site.odd]:
        for node in ast.walk(part.node):
            hidden = in_own_scope(node) and (before or not in_own_scope(part.node))
            if isinstance(node, (ast.Name, ast.Attribute)) and not hidden:
                yield ast.unparse(node)


def _moving(text: str, device: str) -> str:
    """Return `text`, moved to a device."""
    return f"{text}.cpu()" if device == '"cpu"' else f"{text}.to({device})"


def can_precede(frame: FailedFrame, stmt: ast.stmt) -> bool:
    """Whether a line put before `stmt` runs each time just before its code."""
    line = frame.source.splitlines()[stmt.lineno - 1]
    if line.encode()[: stmt.col_offset].strip():
        return False  # `if ready: y = net(x)`, `a; b`
    if line.lstrip().startswith("elif") or isinstance(stmt, (ast.While, ast.ClassDef)):
        return False
    return not isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef))


# -- tensors that are better made there
def make_there(site: Site, target: str) -> Fix | None:
    """Return the fix in the one call that made the odd operand; None if another is better."""
    frame, reader = site.frame, Reader(site.frame)
    parts = {p.key: p for odd in site.odd for p in named_in(odd, reader) if p.kind == "tensor"}
    if len(parts) != 1 or len(site.odd) != 1:
        return None
    (part,) = parts.values()
    made = maker(part, frame, site.node, target, written=part is site.fixed)
    if made is None:
        return None
    device = written_device(site, target, before=True, line=made)
    return Edit(frame, made, replaced=_made_there(made.value, frame, device)).fix(0)


def _made_there(node: ast.expr, frame: FailedFrame, device: str) -> list[tuple[ast.AST, str]]:
    """Return the calls in an expression that make tensors, with the device added to each."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and _is_factory(n)]
    return [(call, _with_device(call, frame, device)) for call in calls]


def _is_factory(node: ast.Call) -> bool:
    name = ast.unparse(node.func).rpartition(".")[2]
    known = name in FACTORIES or name.endswith("_like") or name.startswith("new_")
    return known and all(keyword.arg != "device" for keyword in node.keywords)


def _with_device(node: ast.Call, frame: FailedFrame, device: str) -> str:
    """Return a call with `device=` added, or its result moved where that is not possible."""
    text, given = frame.text(node), {keyword.arg for keyword in node.keywords}
    if given & {"generator", "out", None} or not text.endswith(")"):
        return _moving(text, device)
    inside = text[:-1].rstrip().rstrip(",")
    comma = "" if inside.endswith("(") else ", "
    return f"{inside}{comma}device={device})"


# -- modules
def move_modules(site: Site, choice: Choice) -> Fix | None:
    """Return the fix for operands that are all modules; None if one is used on both devices."""
    stmt = statement(site.node)
    if stmt is None or any(_used_before(part.text, stmt) for part in site.odd):
        return None
    loops = loops_around(stmt)
    names = {root(part.text) for part in site.odd}
    if loops and can_precede(site.frame, loops[-1]) and not names & stored(loops[-1]):
        stmt = loops[-1]
    edit, nbytes = Edit(site.frame, stmt), 0
    for part in site.odd:
        if part.value is None or in_own_scope(part.node) or not can_precede(site.frame, stmt):
            device = written_device(site, choice.target, before=False)
            edit.replaced.append((part.node, _moving(bracketed(part.node, part.text), device)))
            continue
        device = written_device(site, choice.target, before=True, line=stmt)
        edit.before.append(_moving(part.text, device))
        tensors = [tensor for _, tensor in tensors_of(part.value)]
        nbytes += sum(bytes_of(t) or 0 for t in tensors if full(t.device) != choice.target)
    return edit.fix(None if edit.replaced else nbytes, choice.other_nbytes, once=True)


def _used_before(text: str, stmt: ast.stmt) -> bool:
    """Whether a loop uses the module earlier in its turn, where it must be as it is now."""
    return any(
        use.lineno < stmt.lineno and isinstance(getattr(use, "parent", None), ast.Call)
        for loop in loops_around(stmt)
        for use in uses(loop, text)
    )


# -- tensors
def move_tensors(site: Site, target: str, other_nbytes: int | None) -> Fix | None:
    """Return the fix for the odd operands and the ones that move with them; None if none is right.

    One line moves all operands that can be bound again.
    """
    stmt = statement(site.node)
    fixed = [p for p in site.odd if p.kind == "object" and not hasattr(type(p.value), "to")]
    given = site.frame.parameters
    # In a Function's forward it would not do: gradients must be where the inputs were.
    inputs = [p for p in site.odd if p.text in given] if given[:1] == ("ctx",) else []
    if stmt is None or fixed or inputs:
        return None
    moves = _Moves(site, Edit(site.frame, stmt), target)
    if not all(moves.add(part) for part in [*site.odd, *site.extra]):
        return None
    return moves.fix(other_nbytes)


class _Moves:
    """Collects the moves of tensors as changes to one statement."""

    def __init__(self, site: Site, edit: Edit, target: str) -> None:
        self.site, self.edit, self.target = site, edit, target
        self.before = written_device(site, target, before=True)
        self.within = written_device(site, target, before=False)
        self.may_precede = can_precede(site.frame, edit.stmt)
        self.once = not site.extra and not any(_used_again(p, site.node) for p in site.odd)
        self.names: dict[str, None] = {}
        self.lines: dict[str, None] = {}
        self.nbytes: dict[str, int | None] = {}

    def add(self, part: Part) -> bool:
        """Move one more tensor; return False if it cannot move."""
        may_stand = part is not self.site.fixed and hasattr(part.node, "lineno")
        how = "within" if self.once and may_stand else self._how(part)
        if how == "within":
            if not may_stand:
                return False
            self._where_it_stands(part)
        elif how == "data":
            data = f"{part.text}.data"
            self.lines[f"{data} = {_moving(data, self.before)}"] = None
            self.nbytes[part.key] = part.nbytes
        else:
            self.names[part.text] = None
            self.nbytes[part.key] = part.nbytes
        return True

    def fix(self, other_nbytes: int | None) -> Fix | None:
        """Return all moves as one fix."""
        edit = self.edit
        if self.names:
            moved = ", ".join(_moving(name, self.before) for name in self.names)
            edit.before.append(f"{', '.join(self.names)} = {moved}")
        edit.before += self.lines
        nbytes = total(self.nbytes.values())
        return edit.fix(nbytes, other_nbytes) if edit.before or edit.replaced else None

    def _where_it_stands(self, part: Part) -> None:
        site = self.site
        if part.kind == "tensor":
            near = _uses_near(part, site)
            self.edit.replaced += [(node, _moving(part.text, self.within)) for node in near]
        if part in site.extra and part.node not in ast.walk(site.node):
            return  # where it is used near, it moves; else its own turn comes
        if self._redirected(part):
            return
        self.nbytes[part.key] = 0 if part.factory else part.nbytes
        node, text = part.node, _moving(bracketed(part.node, part.text), self.within)
        whole = site.frame.text(node)
        if part.factory:
            self.edit.replaced += _made_there(node, site.frame, self.within)
            return
        if whole != part.text and _contents(site.frame.scope.value(node)):
            text = _each(whole, site.frame.scope.value(node), self.within)
        self.edit.replaced.append((node, text))

    def _redirected(self, part: Part) -> bool:
        """Drop or redirect the transfer that took an expression from the target: `a.cpu() + b`."""
        node, reader = part.node, Reader(self.site.frame)
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if reader.only_transfers(node):
                before, text = reader.part(owner), bracketed(owner, self.site.frame.text(owner))
                stays = before is not None and before.device == self.target
                self.nbytes[part.key] = 0 if stays else None
                self.edit.replaced.append((node, text if stays else _moving(text, self.within)))
                return True
            node = owner
        return False

    def _how(self, part: Part) -> str:
        """``"before"`` for good, its ``"data"``, or ``"within"``."""
        node, frame = part.node, self.site.frame
        if not self.may_precede or part.kind not in ("tensor", "object") or in_own_scope(node):
            return "within"
        tracked = part.kind == "tensor" and part.value is not None and part.value.requires_grad
        leaf = tracked and part.value.is_leaf
        if isinstance(node, ast.Attribute) and part.text.endswith(node.attr):
            owner = frame.scope.value(node.value)
            if node.attr in own(owner).get("_parameters", {}):
                return "data"
            return "within" if leaf or not _is_set(owner, node.attr) else "before"
        if leaf:
            return "within"
        if isinstance(node, ast.Name) and part.text == node.id:
            return "before" if _is_bound(node, frame) else "within"
        return "within"


def _used_again(part: Part, node: ast.AST) -> bool:
    """Whether the code around what failed uses the name elsewhere too."""
    scope, text = function_of(node), ast.unparse(part.node)
    return scope is not None and len(uses(scope, text)) > 1


def _uses_near(part: Part, site: Site) -> list[ast.expr]:
    """Return the uses, in the next few lines, of a tensor that cannot be bound again."""
    scope, stmt = function_of(site.node), statement(site.node)
    if scope is None or stmt is None or isinstance(scope, ast.Lambda):
        return []
    itself = {id(n) for n in ast.walk(part.node)} if part in site.odd else set()
    last = (stmt.end_lineno or stmt.lineno) + _NEAR
    reader = Reader(site.frame)
    near = [n for n in uses(scope, part.key) if stmt.lineno <= n.lineno <= last]
    return [n for n in near if id(n) not in itself and _is_operand(n, reader)]


def _is_operand(node: ast.AST, reader: Reader) -> bool:
    around = (n for n in parents(node) if not isinstance(n, ast.keyword))
    parent = next(around, None)
    kinds = (ast.BinOp, ast.Compare, ast.Call)
    return isinstance(parent, kinds) and wants_one_device(parent, reader)


def _is_bound(node: ast.Name, frame: Any) -> bool:
    """Whether a name is the code's own, so that it can be bound again."""
    return frame.at_top or node.id in (*frame.code.co_varnames, *frame.code.co_cellvars)


def _is_set(owner: Any, name: str) -> bool:
    """Whether an object has an attribute that can be set without running the user's code."""
    setter: Any = type(owner).__setattr__
    plain = any(setter is known for known in (object.__setattr__, nn.Module.__setattr__))
    return plain and name in {**own(owner), **own(owner).get("_buffers", {})}


def _contents(owner: Any) -> list[Any]:
    """The values of a dict, list or tuple, or of a class made from a dict."""
    plain = type(owner) in (list, tuple) or issubclass(type(owner), (dict, UserDict))
    return [held for _, held in contents(owner)] if plain else []


def _each(container: str, owner: Any, device: str) -> str:
    """A container's text with each of its tensors moved."""
    if type(owner) not in (dict, list, tuple) and hasattr(type(owner), "to"):
        return _moving(container, device)
    mapping = issubclass(type(owner), (dict, UserDict))
    name = "v" if mapping else "t"
    moved = _moving(name, device)
    if any(not issubclass(type(held), Tensor) for held in _contents(owner)):
        moved = f'{moved} if hasattr({name}, "to") else {name}'
    if mapping:
        return f"{{k: {moved} for k, v in {container}.items()}}"
    inner = f"{moved} for t in {container}"
    return f"tuple({inner})" if type(owner) is tuple else f"[{inner}]"
