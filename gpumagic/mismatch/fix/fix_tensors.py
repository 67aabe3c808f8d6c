"""Fixes that move tensors: by name for good, or where they stand."""

import ast
from collections import UserDict
from typing import Any

import torch
from torch import nn

from gpumagic.mismatch.check.later_uses import wants_one_device
from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.edits import (
    Edit,
    bracketed,
    can_precede,
    function_of,
    in_own_scope,
    statement,
)
from gpumagic.mismatch.fix.site import Site, moving, written_device
from gpumagic.mismatch.read.expressions import FACTORIES, Reader
from gpumagic.mismatch.read.operand import Part, bytes_of
from gpumagic.usercode.frames import parents
from gpumagic.usercode.values import full, own

_NEAR = 12


def move_tensors(site: Site, target: str, extra: list[Part], other: int | None) -> Fix | None:
    stmt = statement(site.node)
    if stmt is None:
        return None
    edit = Edit(site.place, stmt)
    may_precede = can_precede(site.place, stmt, site.node)
    names: list[str] = []
    moved_parts: list[Part] = []
    nbytes: list[int | None] = []
    whole: dict[str, str] = {}
    keys = [part.key for part in site.odd]
    together = _together([*site.odd, *extra], site)
    again = site.for_good or bool(extra) or len(set(keys)) < len(keys)
    whole_of = [p.source for p in site.odd if p.source and isinstance(p.node, ast.Attribute)]
    again = again or any(used_again(part, site.node) for part in [*site.odd, *whole_of])
    device_before = written_device(site, target, before=True)
    device_within = written_device(site, target, before=False)
    for part in [*site.odd, *extra]:
        written = part is site.fixed
        if part.source is not None and (again or written or _is_kept(part.source)):
            # Of a slice of an attribute, the attribute is moved, and once.
            kept = _how(part.source, site, may_precede, together)
            part = part.source if kept != "within" else part
        kept_name = again or _is_kept(part) or written
        how = _how(part, site, may_precede, together) if kept_name else "within"
        if how == "within" and (written or not hasattr(part.node, "lineno")):
            return None
        if site.for_good and how != "before":
            return None
        if how == "within" and again and part.kind == "tensor":
            uses = _uses_near(part, site)
            edit.replaced += [(n, moving(part.text, device_within)) for n in uses]
        if part in extra and how == "within":
            continue  # its use has been mended, or is explained when its own turn comes
        if how == "container":
            container, owner = _container_of(part, site)
            if container not in whole:
                nbytes += [bytes_of(t) for t in _tensors(owner) if full(t.device) != target]
            whole[container] = f"{container} = {_each(container, owner, device_before)}"
            continue
        moved_parts.append(part)
        if how == "data":
            edit.before.append(f"{part.text}.data = {moving(f'{part.text}.data', device_before)}")
        elif how == "before":
            names += [part.text] if part.text not in names else []
        else:
            edit.replaced += _within(part, site, device_within)
    names.sort(key=lambda name: _first_use(name, site.node))
    if names:
        moved = ", ".join(moving(name, device_before) for name in names)
        edit.before.append(f"{', '.join(names)} = {moved}")
    edit.before += whole.values()
    nbytes += {part.key: 0 if part.factory else part.nbytes for part in moved_parts}.values()
    total = None if None in nbytes else sum(n for n in nbytes if n is not None)
    once = not edit.replaced and all(_stays(part, site) for part in site.odd)
    return edit.fix(total, other, once=once) if edit.before or edit.replaced else None


def _uses_near(part: Part, site: Site) -> list[ast.AST]:
    """The uses, in the next few lines of the same code, of what cannot be moved for good."""
    scope, stmt = function_of(site.node), statement(site.node)
    if scope is None or stmt is None or isinstance(scope, ast.Lambda):
        return []
    own_node = {id(n) for n in ast.walk(part.node)} if part in site.odd else set()
    last = (stmt.end_lineno or stmt.lineno) + _NEAR
    reader = Reader(site.place.scope, site.place.text)
    return [
        node
        for node in ast.walk(scope)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
        and isinstance(node.ctx, ast.Load)
        and stmt.lineno <= node.lineno <= last
        and id(node) not in own_node
        and ast.unparse(node) == part.key
        and _is_operand(node, reader)
    ]


def _is_operand(node: ast.AST, reader: Reader) -> bool:
    parent = next(parents(node), None)
    if isinstance(parent, ast.keyword):
        parent = next(parents(parent), None)
    kinds = (ast.BinOp, ast.Compare, ast.Call)
    return isinstance(parent, kinds) and wants_one_device(parent, reader)


def _is_kept(part: Part) -> bool:
    """Whether moving it for good is better than each time: an attribute, an item of a batch."""
    return part.kind == "tensor" and (
        isinstance(part.node, (ast.Attribute, ast.Subscript))
        or (isinstance(part.node, ast.Name) and part.text != part.node.id)
    )


def _stays(part: Part, site: Site) -> bool:
    """Whether it is kept in what is the same each time: `self`, or a name that no loop binds."""
    if not _is_kept(part.source or part):
        return False
    text = (part.source or part).text
    names = [n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)]
    loops = [p for p in parents(site.node) if isinstance(p, (ast.For, ast.AsyncFor, ast.While))]
    bound = [n for loop in loops for n in ast.walk(loop) if isinstance(n, ast.Name)]
    bound = [n for n in bound if n.id in names and isinstance(n.ctx, ast.Store)]
    function = site.place.code.co_varnames if not site.place.at_top else ()
    return not bound and (names == ["self"] or not set(names) & set(function))


def _how(part: Part, site: Site, may_precede: bool, together: set[str]) -> str:
    """``"before"`` the statement for good, its ``"container"``, its ``"data"``, or ``"within"``."""
    if not may_precede or part.kind != "tensor" or in_own_scope(part.node):
        return "within"
    node, scope = part.node, site.place.scope
    leaf = part.value is not None and part.value.is_leaf and part.value.requires_grad
    if isinstance(node, ast.Name) and part.text == node.id:
        local = site.place.at_top or node.id in site.place.code.co_varnames
        cell = node.id in site.place.code.co_cellvars
        return "before" if (local or cell) and not leaf else "within"
    if isinstance(node, ast.Attribute) and part.text.rstrip().endswith(node.attr):
        owner = scope.value(node.value)
        if node.attr not in {**own(owner), **own(owner).get("_buffers", {})}:
            kept = own(owner).get("_parameters", {})
            return "data" if node.attr in kept else "within"
        return "before" if _sets_plainly(owner) and not leaf else "within"
    if "[" in part.text and not leaf:
        return _how_item(part, site, together)
    return "within"


def _together(parts: list[Part], site: Site) -> set[str]:
    """The containers of which several items move, or that are handed over as a whole."""
    held = [_container_of(part, site)[0] for part in parts if part.text.endswith("]")]
    whole = {ast.unparse(node) for node in ast.walk(site.node) if isinstance(node, ast.expr)}
    items = {ast.unparse(n.value) for n in ast.walk(site.node) if isinstance(n, ast.Subscript)}
    return {text for text in held if held.count(text) > 1 or text in whole - items}


def _how_item(part: Part, site: Site, together: set[str]) -> str:
    text, owner = _container_of(part, site)
    names = ast.parse(text, mode="eval").body
    away = [full(t.device) == part.device for t in _tensors(owner)]
    whole = (text in together and len(away) > 1 and all(away)) or type(owner) not in (dict, list)
    if whole and _can_bind(names, site):
        return "container"
    return "before" if type(owner) in (dict, list) else "within"


def _container_of(part: Part, site: Site) -> tuple[str, Any]:
    text = part.text[: part.text.rindex("[")]
    return text, site.place.scope.value(ast.parse(text, mode="eval").body)


def _can_bind(node: ast.expr, site: Site) -> bool:
    if isinstance(node, ast.Name):
        return site.place.at_top or node.id in site.place.code.co_varnames
    if isinstance(node, ast.Attribute):
        owner = site.place.scope.value(node.value)
        return node.attr in own(owner) and _sets_plainly(owner)
    return False


def _sets_plainly(owner: Any) -> bool:
    """Whether to assign an attribute runs no code of the user's: no frozen or guarded class."""
    setter: Any = type(owner).__setattr__
    return any(setter is known for known in (object.__setattr__, nn.Module.__setattr__))


def _tensors(owner: Any) -> list[torch.Tensor]:
    return [held for held in _contents(owner) if issubclass(type(held), torch.Tensor)]


def _contents(owner: Any) -> list[Any]:
    """The values of a dict, list or tuple, or of a class made from one; asks none of its own."""
    if issubclass(type(owner), UserDict):
        owner = own(owner).get("data")
    if issubclass(type(owner), dict):
        return list(dict.values(owner))
    return list(owner) if type(owner) in (list, tuple) else []


def _each(container: str, owner: Any, device: str) -> str:
    """A container's text with each of its tensors moved."""
    if type(owner) not in (dict, list, tuple) and hasattr(type(owner), "to"):
        return moving(container, device)
    mapping = issubclass(type(owner), (dict, UserDict))
    only = all(issubclass(type(v), torch.Tensor) for v in _contents(owner))
    name = "v" if mapping else "t"
    moved = moving(name, device)
    moved = moved if only else f'{moved} if hasattr({name}, "to") else {name}'
    if mapping:
        return f"{{k: {moved} for k, v in {container}.items()}}"
    inner = f"{moved} for t in {container}"
    return f"tuple({inner})" if type(owner) is tuple else f"[{inner}]"


def _within(part: Part, site: Site, device: str) -> list[tuple[ast.AST, str]]:
    """The edit of one operand where it stands."""
    node = part.node
    if part.factory and isinstance(node, ast.Call):
        return [(node, with_device(node, part.text, device))]
    whole = site.place.text(node)
    if whole != part.text and _contents(site.place.scope.value(node)):
        return [(node, _each(whole, site.place.scope.value(node), device))]
    return [(node, moving(bracketed(node, part.text), device))]


def with_device(node: ast.Call, text: str, device: str) -> str:
    """A call that makes a tensor, told where; where that is not possible, moved."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    given = {keyword.arg for keyword in node.keywords}
    known = name in FACTORIES or name.endswith("_like") or name.startswith("new_")
    if not known or given & {"device", "generator", "out", None} or not text.endswith(")"):
        return moving(text, device)
    inside = text[:-1].rstrip().rstrip(",")
    comma = "" if inside.endswith("(") else ", "
    return f"{inside}{comma}device={device})"


def used_again(part: Part, node: ast.AST) -> bool:
    """Whether the code after this, or the rest of a loop around it, uses the name again."""
    text = ast.unparse(part.node)
    if not isinstance(part.node, (ast.Name, ast.Attribute)):
        return False
    scope = function_of(node)
    loops = [p for p in parents(node) if isinstance(p, (ast.For, ast.AsyncFor, ast.While))]
    if scope is None:
        return False
    start = loops[-1].lineno if loops and _within_scope(loops[-1], scope) else 0
    here = getattr(node, "end_lineno", 0)
    uses = [
        n
        for n in ast.walk(scope)
        if isinstance(n, type(part.node)) and isinstance(n.ctx, ast.Load) and ast.unparse(n) == text
    ]
    later = [n for n in uses if n.lineno > here or (start and n.lineno >= start)]
    stmt = statement(node)
    later += [n for n in uses if stmt is not None and n in ast.walk(stmt) and n not in later]
    inside = {id(n) for n in ast.walk(node)}
    others = [n for n in later if id(n) not in inside]
    return bool(others) and not any(_on_host(n) for n in others)


def _first_use(name: str, node: ast.AST) -> tuple[int, int]:
    root = name.split(".")[0].split("[")[0]
    places = [
        (n.lineno, n.col_offset) for n in ast.walk(node) if isinstance(n, ast.Name) and n.id == root
    ]
    return min(places, default=(10**9, 0))


def _within_scope(loop: ast.AST, scope: ast.AST) -> bool:
    return any(parent is scope for parent in parents(loop))


def _on_host(node: ast.AST) -> bool:
    """Whether a name is used in a way that wants it on the CPU."""
    parent = next(parents(node), None)
    return isinstance(parent, ast.Attribute) and parent.attr in ("numpy", "pin_memory")
