"""Compile the code of a cell, and find where it awaits.

What IPython allows at the top of a cell compiles here too: `await`, `async for`, `async with`, and
comprehensions that are asynchronous.
"""

from __future__ import annotations

import ast
from types import CodeType

_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def compile_cell(
    tree: ast.Module, filename: str, flags: int = 0
) -> tuple[CodeType, CodeType | None]:
    """The statements of a cell, and apart from them its last expression, None if it has none.

    `flags` are those of ``from __future__`` in cells before.

    `eval` of either gives a coroutine where the flag `inspect.CO_COROUTINE` is set: it awaits.
    """
    body, last = tree.body, None
    if body and isinstance(body[-1], ast.Expr):
        last = _compiled(ast.Expression(body[-1].value), filename, "eval", flags)
        body = body[:-1]
    return _compiled(ast.Module(body, tree.type_ignores), filename, "exec", flags), last


def check(code: str, filename: str) -> None:
    """Raise SyntaxError (ValueError for a null byte, before Python 3.12) if it is no cell."""
    _compiled(code, filename, "exec")


def _compiled(
    code: str | ast.Module | ast.Expression, filename: str, mode: str, flags: int = 0
) -> CodeType:
    made: CodeType = compile(
        code, filename, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | flags, dont_inherit=True
    )
    return made


def awaits(node: ast.AST) -> int | None:
    """The line of the first `await` at the top of a cell, outside functions; None without one."""
    if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
        return node.lineno
    if isinstance(node, _LATER):
        return None
    if isinstance(node, _COMPREHENSIONS) and any(each.is_async for each in node.generators):
        return node.lineno
    return next(filter(None, (awaits(child) for child in ast.iter_child_nodes(node))), None)
