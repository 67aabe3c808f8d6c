"""Read what is still to run of code that failed: which names it needs, which it makes anew.

A name that is bound anew before it is read holds a value that nobody needs any more.
"""

import ast
from collections.abc import Iterable, Iterator

from gpumagic.mismatch.read.syntax import (
    in_own_scope,
    loops_around,
    parents,
    statement,
    stored,
)
from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.variables import names_read

# Of torch and of what trains for it.
_BACKWARD = ("backward", "autograd", "fit")
_BLOCKS = ("body", "orelse", "finalbody")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# What these bind, they may not bind.
_MAYBE = (*_SCOPES, ast.If, ast.While, ast.Match)


class RestOfCode:
    """What is still to run in one frame, from the statement on that failed."""

    def __init__(self, frame: FailedFrame) -> None:
        self.frame = frame
        self.failed = next(filter(None, map(statement, frame.candidates)), None)
        self._rest = list(_rest(self.failed)) if self.failed is not None else []
        self.read = set(names_read(ast.Module(self._rest, [])))
        self.loops = loops_around(self.failed) if self.failed is not None else []

    @property
    def made_now(self) -> set[str]:
        """The names that the failing statement was to bind."""
        return _bound([self.failed]) if self.failed is not None else set()

    @property
    def read_anywhere(self) -> set[str]:
        """The names that all of this code reads, also what has run."""
        return set(names_read(self.frame.tree)) if self.frame.tree is not None else set()

    @property
    def overwritten(self) -> set[str]:
        """The names that are bound anew before they are read."""
        return _bound(self._rest) - self.read

    @property
    def made_before(self) -> set[str]:
        """The names that this code itself may have bound before it failed."""
        if self.frame.tree is None or self.failed is None or not self.frame.at_top:
            return set(self.frame.scope.local)
        line = self.failed.lineno
        before = (n for n in ast.walk(self.frame.tree) if getattr(n, "lineno", line) < line)
        return {name for node in (*before, *self.loops) for name in stored(node)}

    @property
    def added_up(self) -> set[str]:
        """The names that a loop around the failing statement makes anew from what they hold."""
        nodes = ast.walk(self.loops[-1]) if self.loops else ()
        found = set[str]()
        for node in nodes:
            if isinstance(node, ast.AugAssign):
                found |= stored(node.target)
            elif isinstance(node, ast.Assign):
                found |= stored(node) & set(names_read(ast.Module([node], [])))
        return found

    @property
    def backward(self) -> bool:
        """Whether the code of this frame, or what it calls, makes a backward pass anywhere."""
        nodes = ast.walk(self.frame.tree) if self.frame.tree is not None else ()
        return any(getattr(n, "attr", getattr(n, "id", "")) in _BACKWARD for n in nodes)


def _rest(failed: ast.stmt) -> Iterator[ast.stmt]:
    """A statement and those that follow it in its function, the loops around it once more."""
    yield failed
    inner: ast.AST = failed
    for outer in parents(failed):
        blocks = (getattr(outer, name, None) for name in _BLOCKS)
        block = next((b for b in blocks if isinstance(b, list) and inner in b), [])
        yield from block[block.index(inner) + 1 :] if block else ()
        if isinstance(outer, _LOOPS):
            yield outer
        if isinstance(outer, _SCOPES):
            return
        inner = outer


def _bound(block: Iterable[ast.stmt]) -> set[str]:
    """The names that statements surely bind."""
    found = set[str]()
    for stmt in block:
        if isinstance(stmt, _MAYBE):
            continue
        if isinstance(stmt, (ast.For, ast.AsyncFor)):
            found |= stored(stmt.target) | _bound(stmt.body)
        elif isinstance(stmt, (ast.With, ast.AsyncWith)):
            within = [item.optional_vars for item in stmt.items if item.optional_vars]
            found |= {name for node in within for name in stored(node)} | _bound(stmt.body)
        elif isinstance(stmt, ast.Try):
            found |= _bound(stmt.body)
        else:
            names = (node for node in ast.walk(stmt) if isinstance(node, ast.Name))
            found |= {
                node.id
                for node in names
                if isinstance(node.ctx, ast.Store) and not in_own_scope(node)
            }
    return found
