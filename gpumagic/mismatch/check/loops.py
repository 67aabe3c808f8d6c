"""What a loop gives that has not run yet: on which device its names will be."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data import default_collate as collate

from gpumagic.mismatch.read.operand import Part, describe
from gpumagic.usercode.frames import parents
from gpumagic.usercode.values import Scope, own

_DEPTH = 3
_CHANGES = ("to", "cuda", "cpu", "load_state_dict")
_DEFS = (ast.FunctionDef, ast.AsyncFunctionDef)
_NOWHERE = ast.Name("_")
Loop = ast.For | ast.AsyncFor | ast.comprehension


def names_of(target: ast.AST) -> list[str]:
    """The names that a loop binds."""
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name)]


def bind(loop: Loop, scope: Scope, moved: dict[str, str | None], given: set[str]) -> None:
    """Note where the names of a loop will be.

    Parameters
    ----------
    moved : dict
        Expressions taken to be elsewhere than they are; is changed.
    given : set of str
        The names of the loops that failed: another loop with the same names gives the like.
    """
    names = names_of(loop.target)
    if ast.unparse(loop.target) in given:
        for name in names:
            moved.pop(name, None)
        return
    target, iterated = loop.target, loop.iter
    counted = isinstance(iterated, ast.Call) and ast.unparse(iterated.func) == "enumerate"
    if counted and isinstance(iterated, ast.Call) and isinstance(target, ast.Tuple):
        if len(target.elts) != 2 or not iterated.args:
            return
        target, iterated = target.elts[1], iterated.args[0]
    loaded = set(names_of(target)) if _loads_on_the_cpu(scope.value(iterated)) else set()
    for name in names:
        if name in moved or name in loaded:
            moved[name] = "cpu" if name in loaded else None


@contextmanager
def bound_within(
    stmt: ast.stmt, scope: Scope, moved: dict[str, str | None], given: set[str]
) -> Iterator[None]:
    """The same for the comprehensions of a statement, as long as it is looked at."""
    inner = (n for e in ast.iter_child_nodes(stmt) if isinstance(e, ast.expr) for n in ast.walk(e))
    loops = [node for node in inner if isinstance(node, ast.comprehension)]
    before = dict(moved)
    for loop in loops:
        bind(loop, scope, moved, given)
    yield
    for name in {name for loop in loops for name in names_of(loop.target)}:
        moved.pop(name, None)
        if name in before:
            moved[name] = before[name]


def around(node: ast.AST) -> list[ast.stmt]:
    """The loops around a node in its own function, the innermost first."""
    inner = takewhile(lambda p: not isinstance(p, _DEFS), parents(node))
    return [p for p in inner if isinstance(p, (ast.For, ast.AsyncFor, ast.While))]


def stored(tree: ast.AST) -> set[str]:
    """The names that are bound in a piece of code."""
    nodes = ast.walk(tree)
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def changed(tree: ast.AST) -> set[str]:
    """The names that are bound in a piece of code, or whose items, attributes or place change."""
    nodes = list(ast.walk(tree))
    held = [n for n in nodes if isinstance(n, (ast.Attribute, ast.Subscript))]
    held = [
        n
        for n in held
        if not isinstance(n.ctx, ast.Load) or (isinstance(n, ast.Attribute) and n.attr in _CHANGES)
    ]
    roots = {n.id for h in held for n in ast.walk(h.value) if isinstance(n, ast.Name)}
    return stored(tree) | roots


def before_loops(stmt: ast.stmt, scope: Scope) -> ast.stmt:
    """The outermost loop around a statement, unless optimizers or modules change in it."""
    loops = around(stmt)
    for node in ast.walk(loops[-1]) if loops else ():
        changed: ast.AST | None = None
        if isinstance(node, ast.Attribute) and node.attr in _CHANGES:
            changed = node.value
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            changed = node
        held = scope.value(changed) if changed is not None else None
        if issubclass(type(held), (nn.Module, Optimizer)):
            return stmt
    return loops[-1] if loops else stmt


def _loads_on_the_cpu(loader: Any) -> bool:
    """Whether it is a `DataLoader` whose batches torch puts together on the CPU."""
    held = own(loader)
    if not issubclass(type(loader), DataLoader) or held.get("collate_fn") is not collate:
        return False
    if torch.get_default_device().type != "cpu":
        return False
    return all(part.devices == ("cpu",) for part in _held(held.get("dataset"), _DEPTH))


def _held(value: Any, depth: int) -> Iterator[Part]:
    """The tensors that a data set holds."""
    part = describe(value, _NOWHERE, "")
    if part is not None:
        yield part
    elif depth:
        for inner in own(value).values():
            yield from _held(inner, depth - 1)
