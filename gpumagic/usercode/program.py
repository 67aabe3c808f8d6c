"""Compile the code of a cell, to run once, or again and again inline.

Everything that IPython allows at the top of a cell compiles here: `await`, `async for`, `async
with` and asynchronous comprehensions.

The loop is part of the compiled code, as in `timeit`. Guarantees: names that the code assigns are
global variables, as at the top of a cell; lines and file are the user's; `return` and `yield` are
refused, as Python refuses them at the top of a cell.
"""

import __future__ as future

import ast
import hashlib
import inspect
import linecache
import symtable
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from gpumagic.errors import GpuError
from gpumagic.usercode.variables import NOT_VARIABLES, names_read, variables_read

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


# No name that code can say, so that none of the user's is hidden.
FUNCTION = ".function"


@dataclass(frozen=True)
class Program:
    """Code that can be run many times, in variables where `FUNCTION` is the one it may call."""

    text: str  # as the user knows it
    filename: str  # as tracebacks name it
    reads: tuple[str, ...]  # the variables, those of its set-up included
    assigned: tuple[str, ...]
    function: Callable[[], Any] | None  # where one was given and no text
    _setup: CodeType
    _once: tuple[CodeType, CodeType | None]
    _loop: CodeType

    def set_up(self, space: dict[str, Any]) -> None:
        """Run what stands before the code."""
        _run(self._setup, space)

    def once(self, space: dict[str, Any]) -> Any:
        """Run the code once; its value is that of its last expression, or None."""
        body, last = self._once
        _run(body, space)
        return None if last is None else _run(last, space)

    def looped(self, space: dict[str, Any]) -> Callable[[Iterable[None]], object]:
        """What runs the code once for each item that it is given, in the variables `space`."""
        return FunctionType(own_code(self._loop), space)


def program(
    code: str | Callable[[], Any],
    namespace: dict[str, Any],
    *,
    setup: str = "",
    filename: str | None = None,
    text: str | None = None,
    passed: Iterable[str] = (),
) -> Program:
    """Compile Python, or a function that is called with what is `passed`, variables by their names;
    GpuError for what cannot be run again and again."""
    named = _remember(setup)
    before = ast.parse(setup, named)
    if awaits(before):
        raise GpuError("the set-up awaits at its top; put what it waits for into a cell before")
    if isinstance(code, str):
        name, function = filename or _remember(code), None
        tree = ast.parse(code, name)
        _refuse(tree)
        text = code if text is None else text
        read = names_read(ast.Module([*before.body, *tree.body], []))
        assigned = symtable.symtable(code, name, "exec").get_symbols()
    else:
        read = [*_read_by(code, namespace), *names_read(before)]
        name, function, assigned = "<gpumagic.compare>", code, []
        tree = ast.parse(f"f({', '.join(f'{each}={each}' for each in passed)})", name)
        tree.body[0].value.func.id = FUNCTION  # type: ignore[attr-defined]
        text = text or _text_of(code)
    return Program(
        text=text,
        filename=_file_of(function, name),
        reads=tuple(dict.fromkeys(read)),
        assigned=tuple(s.get_name() for s in assigned if s.is_assigned() or s.is_declared_global()),
        function=function,
        _setup=compile(before, named, "exec", dont_inherit=True),
        # As a cell first: a function would take what a cell may not say.
        _once=compile_cell(tree, name),
        _loop=looped(tree, name, [s.get_name() for s in assigned]),
    )


def _run(code: CodeType, space: dict[str, Any]) -> Any:
    # Unlike `exec` it puts nothing into variables that may be the user's own.
    return FunctionType(own_code(code), space)()


def _refuse(tree: ast.Module) -> None:
    if not tree.body:
        raise GpuError("there is no code to run; give some, such as 'a @ a'")
    if line := awaits(tree):
        raise GpuError(
            f"line {line} awaits, which cannot be run again and again; await it in a cell before"
        )
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            raise GpuError(
                f"line {node.lineno} imports * from {node.module}, which cannot be run again and "
                "again; put it into --setup, or into a cell before"
            )


def _read_by(function: Any, namespace: dict[str, Any]) -> list[str]:
    """The variables that a function leads to."""
    if not callable(function):
        raise GpuError(
            f"compare times code or a function, not {type(function).__name__}; type "
            "compare('a @ a') or compare(lambda: a @ a)"
        )
    if inspect.iscoroutinefunction(function):
        raise GpuError(
            "an async function cannot be run again and again; give one that awaits nothing"
        )
    module = str(getattr(inspect.unwrap(function), "__module__", "__main__"))
    found = variables_read([FUNCTION], {**namespace, FUNCTION: function}, module)
    return [name for name, _ in found if name in namespace and name not in NOT_VARIABLES]


def _remember(code: str) -> str:
    """A file's name for text that came from none, by which tracebacks find its lines."""
    name = f"<timed {hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()[:8]}>"
    lines = [f"{line}\n" for line in code.splitlines()]
    linecache.cache[name] = (len(code), None, lines, name)
    return name


def _text_of(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    if "<lambda>" not in name:
        return f"{name.rpartition('<locals>.')[2]}()"
    try:
        return inspect.getsource(function).strip()
    except (OSError, TypeError, SyntaxError):
        return "lambda"


def _file_of(function: Any, otherwise: str) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return otherwise if code is None else str(code.co_filename)
