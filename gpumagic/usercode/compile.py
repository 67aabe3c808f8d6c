"""Compile the code of a cell, to run once or in a loop, and find where it awaits.

What IPython allows at the top of a cell compiles here too: `await`, `async for`, `async with`, and
comprehensions that are asynchronous.
"""

import __future__ as future

import ast
from types import CodeType

# No names that code can say, so that none of the user's is hidden.
_RUNS, _RUN = ".runs", ".run"
_FUTURES = sum({getattr(future, name).compiler_flag for name in future.all_feature_names})
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def compile_cell(
    tree: ast.Module, filename: str, flags: int = 0
) -> tuple[CodeType, CodeType | None]:
    """The statements of a cell, and apart from them its last expression, None if it has none.

    `eval` of either gives a coroutine where the flag `inspect.CO_COROUTINE` is set: it awaits.
    """
    body, last = tree.body, None
    if body and isinstance(body[-1], ast.Expr):
        last = _compiled(ast.Expression(body[-1].value), filename, "eval", flags)
        body = body[:-1]
    return _compiled(ast.Module(body, tree.type_ignores), filename, "exec", flags), last


def _compiled(
    tree: ast.Module | ast.Expression, filename: str, mode: str, flags: int = 0
) -> CodeType:
    made: CodeType = compile(
        tree, filename, mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | flags, dont_inherit=True
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


def looped(tree: ast.Module, filename: str, names: list[str]) -> CodeType:
    """A function that runs a cell's code inline, once for each item that it is given.

    `names` are global variables in it, as they are at the top of a cell. The tree is changed.
    """
    flags = _compiled(tree, filename, "exec").co_flags & _FUTURES
    body = [_Plain().visit(node) for node in tree.body]
    loop = ast.For(ast.Name(_RUN, ast.Store()), ast.Name(_RUNS, ast.Load()), body, [])
    module = ast.parse("def f(): pass")
    made = module.body[0]
    assert isinstance(made, ast.FunctionDef)
    # Tracebacks show it as the cell that it is.
    made.name, made.args.args = "<module>", [ast.arg(_RUNS)]
    made.body = [ast.Global(names), loop] if names else [loop]
    for node in [made, *made.body]:
        ast.copy_location(node, body[0])
    # A module's code begins at its file's first line, from where IPython counts.
    made.lineno = 1
    ast.fix_missing_locations(module)
    code = compile(module, filename, "exec", flags=flags, dont_inherit=True)
    return next(c for c in code.co_consts if isinstance(c, CodeType))


class _Plain(ast.NodeTransformer):
    """Rewrites what the top of a cell may say of its variables, and a function may not."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else None
        space = ast.copy_location(ast.Name("globals", ast.Load()), node)
        if name in ("locals", "vars") and not node.args:
            node.func = space
        elif name in ("exec", "eval") and len(node.args) == 1 and not node.keywords:
            node.args.append(ast.copy_location(ast.Call(space, [], []), node))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        plain = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.copy_location(plain, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if node.module == "__future__" else node

    def visit_FunctionDef(self, node: ast.AST) -> ast.AST:
        return node

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef


def own_code(code: CodeType) -> CodeType:
    """The same code as an object of its own, with that of the functions which it defines.

    torch.compile keeps what it makes with the code, and writes its names into the globals of the
    function that it met first: any other with the same code would look for them in vain.
    """
    consts = (own_code(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=tuple(consts))
