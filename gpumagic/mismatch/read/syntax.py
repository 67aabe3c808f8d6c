"""Walk the syntax tree of the user's code: what encloses a node, and what a piece of code binds."""

import ast
from collections.abc import Iterator
from itertools import takewhile

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """What encloses a node, from the inside."""
    while (node := getattr(node, "parent", None)) is not None:  # type: ignore[assignment]
        yield node


def statement(node: ast.AST) -> ast.stmt | None:
    """The statement that a node belongs to."""
    return next((n for n in (node, *parents(node)) if isinstance(n, ast.stmt)), None)


def function_of(node: ast.AST) -> ast.AST | None:
    """The function, lambda or module whose code a node is."""
    kinds = (*_FUNCTIONS, ast.Lambda, ast.Module)
    return next((n for n in parents(node) if isinstance(n, kinds)), None)


def in_own_scope(node: ast.AST) -> bool:
    """Whether a node is inside a comprehension, a generator expression or a lambda."""
    within = takewhile(lambda parent: not isinstance(parent, ast.stmt), parents(node))
    return any(isinstance(parent, _OWN_SCOPES) for parent in within)


def loops_around(node: ast.AST) -> list[ast.stmt]:
    """The loops around a node in its own function, the innermost first."""
    within = takewhile(lambda parent: not isinstance(parent, _FUNCTIONS), parents(node))
    return [parent for parent in within if isinstance(parent, _LOOPS)]


def stored(tree: ast.AST) -> set[str]:
    """The names that are bound in a piece of code."""
    nodes = ast.walk(tree)
    return {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def root(text: str) -> str:
    """The name that an expression begins with: ``"self"`` of ``"self.items[0]"``."""
    return text.partition(".")[0].partition("[")[0]


def uses(node: ast.AST, text: str) -> list[ast.expr]:
    """Where code reads a name, an attribute or an item that is written `text`."""
    kinds = (ast.Name, ast.Attribute, ast.Subscript)
    found = (n for n in ast.walk(node) if isinstance(n, kinds) and isinstance(n.ctx, ast.Load))
    return [n for n in found if ast.unparse(n) == text]
