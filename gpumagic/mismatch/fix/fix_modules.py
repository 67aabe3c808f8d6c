"""Fixes that move a module: once, and where it is known whole."""

import ast
from typing import Any

import torch
from torch import nn

from gpumagic.mismatch.check.loops import names_of
from gpumagic.mismatch.explanation import Fix
from gpumagic.mismatch.fix.choose import Choice, registered
from gpumagic.mismatch.fix.edits import Edit, bracketed, can_precede, in_own_scope, statement
from gpumagic.mismatch.fix.site import Site, moving, parts_of, written_device
from gpumagic.mismatch.read.expressions import Reader
from gpumagic.mismatch.read.operand import Part, bytes_of, modules_of, tensors_of
from gpumagic.mismatch.read.operation import operation
from gpumagic.usercode.frames import Place, parents
from gpumagic.usercode.values import full, own


def move_modules(site: Site, outer: list[Place], choice: Choice) -> Fix | None:
    for part in site.odd:
        lifted = _caller_with(part, outer)
        if lifted is not None and len(site.odd) == 1:
            place, node, named = lifted
            site = Site(place, node, [named], parts_of(place, node))
    stmt = statement(site.node)
    if stmt is None:
        return None
    edit = Edit(site.place, stmt)
    bindable = can_precede(site.place, stmt, site.node)
    for part in site.odd:
        if part.value is not None and bindable and not _bound_within(part.node):
            device = written_device(site, choice.target, before=True)
            edit.before.append(_siblings(part, site, device) or moving(part.text, device))
            edit.before += _plain_tensors(part, device, choice.target)
        else:
            device = written_device(site, choice.target, before=False)
            edit.replaced.append((part.node, moving(bracketed(part.node, part.text), device)))
    every = [module for part in site.odd for module in _alike(part, site)]
    return edit.fix(_away_from(every, choice.target), choice.other_nbytes, once=True)


def _siblings(part: Part, site: Site, device: str) -> str | None:
    """A loop over the plain list or dict that holds this module and others."""
    if not isinstance(part.node, ast.Subscript) or len(_alike(part, site)) < 2:
        return None
    mapping = type(site.place.scope.value(part.node.value)) is dict
    text = site.place.text(part.node.value) + ".values()" * mapping
    return f"for module in {text}: {moving('module', device)}"


def _alike(part: Part, site: Site) -> list[Any]:
    """The modules of a plain list or dict that move alike, by a loop or one by one; or the one."""
    held = [part.node.value] if isinstance(part.node, ast.Subscript) else []
    loops = [p for p in parents(site.node) if isinstance(p, (ast.For, ast.comprehension))]
    held += [loop.iter for loop in loops if part.text in names_of(loop.target)]
    for node in held:
        owner = site.place.scope.value(node)
        modules = list(owner.values()) if type(owner) is dict else owner
        plain = type(modules) is list and all(issubclass(type(m), nn.Module) for m in modules)
        if plain and any(m is part.value for m in modules):
            return list(modules)
    return [part.value]


def _away_from(modules: list[Any], target: str) -> int | None:
    """The bytes of modules that are not on `target`."""
    if None in modules:
        return None
    tensors = [t for module in modules for _, t in tensors_of(module)]
    return sum(bytes_of(t) or 0 for t in tensors if full(t.device) != target)


def _plain_tensors(part: Part, device: str, target: str) -> list[str]:
    """Lines for the module's tensors that `.to()` does not reach."""
    lines = []
    for path, child in modules_of(part.value):
        for name, held in own(child).items():
            if issubclass(type(held), torch.Tensor) and full(held.device) != target:
                steps = "".join(
                    f"[{step}]" if step.isdigit() else f".{step}"
                    for step in path.split(".")
                    if step
                )
                text = f"{part.text}{steps}.{name}"
                lines.append(f"{text} = {moving(text, device)}")
    return lines


def _bound_within(node: ast.AST) -> bool:
    """Whether a name is bound by the comprehension or lambda around it."""
    if not in_own_scope(node):
        return False
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    for parent in parents(node):
        if isinstance(parent, ast.stmt):
            return False
        if isinstance(parent, ast.Lambda):
            names_in = {a.arg for a in ast.walk(parent.args) if isinstance(a, ast.arg)}
        else:
            names_in = {
                n.id
                for g in getattr(parent, "generators", [])
                for n in ast.walk(g.target)
                if isinstance(n, ast.Name)
            }
        if names & names_in:
            return True
    return False


def _holds(module: nn.Module, thing: Any) -> bool:
    if issubclass(type(thing), nn.Module):
        return any(child is thing for _, child in modules_of(module))
    return any(tensor is thing for tensor in registered(module))


def _caller_with(part: Part, outer: list[Place]) -> tuple[Place, ast.AST, Part] | None:
    """The outermost call of a module that holds this module or tensor."""
    best = None
    for place in outer:
        for node in place.nodes()[:1]:
            done = operation(node, Reader(place.scope, place.text))
            for named in done.parts if done else ():
                module = named.value if named.kind == "module" else None
                if module is not None and _holds(module, part.value):
                    best = (place, node, named)
    return best


def module_of(odd: tuple[Part, ...], outer: list[Place]) -> tuple[Place, ast.AST, Part] | None:
    """The module to move where what is odd are parameters of one that was left behind."""
    odd = tuple(part.source or part for part in odd)
    if not odd or not all(type(part.value) is nn.Parameter for part in odd):
        return None
    found = [_caller_with(part, outer) for part in odd]
    if any(f is None for f in found) or len({id(f[2].value) for f in found if f}) != 1:
        return None
    return found[0]
