"""Walk the syntax tree of the user's code: the nodes around a node, the names that code binds.

After an error, the rest of the code says which values are still needed: a value is not needed if
its name is bound again before it is read.
"""

import ast
from collections.abc import Iterable, Iterator
from itertools import takewhile

from gpumagic.usercode.frames import FailedFrame
from gpumagic.usercode.variables import names_read

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that enclose a node, the innermost first."""
    while (node := getattr(node, "parent", None)) is not None:  # type: ignore[assignment]
        yield node


def statement(node: ast.AST) -> ast.stmt | None:
    """Return the statement that a node belongs to."""
    return next((n for n in (node, *parents(node)) if isinstance(n, ast.stmt)), None)


def function_of(node: ast.AST) -> ast.AST | None:
    """Return the function, lambda or module whose code a node is."""
    kinds = (*_FUNCTIONS, ast.Lambda, ast.Module)
    return next((n for n in parents(node) if isinstance(n, kinds)), None)


def in_own_scope(node: ast.AST) -> bool:
    """Whether a node is inside a comprehension, a generator expression or a lambda."""
    within = takewhile(lambda parent: not isinstance(parent, ast.stmt), parents(node))
    return any(isinstance(parent, _OWN_SCOPES) for parent in within)


def loops_around(node: ast.AST) -> list[ast.stmt]:
    """Return the loops around a node in its own function, the innermost first."""
    within = takewhile(lambda parent: not isinstance(parent, _FUNCTIONS), parents(node))
    return [parent for parent in within if isinstance(parent, _LOOPS)]


def stored(tree: ast.AST) -> set[str]:
    """Return the names that are bound in a piece of code."""
    nodes = ast.walk(tree)
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def root(text: str) -> str:
    """Return the first name of an expression: ``"self"`` of ``"self.items[0]"``."""
    return text.partition(".")[0].partition("[")[0]


def uses(node: ast.AST, text: str) -> list[ast.expr]:
    """Return the nodes that read a name, an attribute or an item written as `text`."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    found = (n for n in ast.walk(node) if isinstance(n, kinds) and isinstance(n.ctx, ast.Load))
    return [n for n in found if ast.unparse(n) == text]


# Names of torch and of libraries that train for it.
_BACKWARD = ("backward", "autograd", "fit")
_BLOCKS = ("body", "orelse", "finalbody")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
# These may run none of their code.
_MAYBE = (*_SCOPES, ast.If, ast.While, ast.Match)


class RestOfCode:
    """The statements of one frame that have not run yet, from the failed one on."""

    def __init__(self, frame: FailedFrame) -> None:
        self.frame = frame
        self.failed = next(filter(None, map(statement, frame.candidates)), None)
        self._rest = list(_rest(self.failed)) if self.failed is not None else []
        self.read = set(names_read(ast.Module(self._rest, [])))
        self.loops = loops_around(self.failed) if self.failed is not None else []

    @property
    def made_now(self) -> set[str]:
        """Return the names that the failed statement binds."""
        return bound([self.failed]) if self.failed is not None else set()

    @property
    def read_anywhere(self) -> set[str]:
        """Return the names that all of this code reads, also the part that has run."""
        return set(names_read(self.frame.tree)) if self.frame.tree is not None else set()

    @property
    def overwritten(self) -> set[str]:
        """Return the names that are bound again before they are read."""
        return bound(self._rest) - self.read

    @property
    def made_before(self) -> set[str]:
        """Return the names that this code itself may have bound before it failed."""
        if self.frame.tree is None or self.failed is None or not self.frame.at_top:
            return set(self.frame.scope.local)
        line = self.failed.lineno
        before = (n for n in ast.walk(self.frame.tree) if getattr(n, "lineno", line) < line)
        return {name for node in (*before, *self.loops) for name in stored(node)}

    @property
    def added_up(self) -> set[str]:
        """Return the names that a loop around the failed statement updates from their values."""
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
    """Yield a statement, the ones after it in its function, and the loops around it again."""
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


def bound(block: Iterable[ast.stmt]) -> set[str]:
    """Return the names that statements surely bind."""
    found = set[str]()
    for stmt in block:
        if isinstance(stmt, _MAYBE):
            continue
        if isinstance(stmt, (ast.For, ast.AsyncFor)):
            found |= stored(stmt.target) | bound(stmt.body)
        elif isinstance(stmt, (ast.With, ast.AsyncWith)):
            within = [item.optional_vars for item in stmt.items if item.optional_vars]
            found |= {name for node in within for name in stored(node)} | bound(stmt.body)
        elif isinstance(stmt, ast.Try):
            found |= bound(stmt.body)
        else:
            names = (node for node in ast.walk(stmt) if isinstance(node, ast.Name))
            found |= {
                node.id
                for node in names
                if isinstance(node.ctx, ast.Store) and not in_own_scope(node)
            }
    return found
