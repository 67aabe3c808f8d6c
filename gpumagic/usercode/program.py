"""Compile a cell's code, to run it once or many times in a loop.

As in `timeit`, the loop is part of the compiled code. The loop is at module level, so the code has
the same meaning and the same cost as in a cell. Tracebacks show the user's lines and file name.
"""

import __future__ as future

import ast
import hashlib
import inspect
import linecache
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

from gpumagic.errors import GpuError
from gpumagic.usercode.variables import NOT_VARIABLES, names_assigned, names_read, variables_read

_RUNS, _RUN = ".runs", ".run"  # the loop's variables; no code can contain these names
FUNCTION = ".function"
_FUTURES = sum({getattr(future, name).compiler_flag for name in future.all_feature_names})
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.GeneratorExp)  # bodies run later
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp)


def compile_cell(
    tree: ast.Module, filename: str, flags: int = 0
) -> tuple[CodeType, CodeType | None]:
    """Return a cell's compiled statements, and its compiled last expression or None."""
    body, last = tree.body, None
    if body and isinstance(body[-1], ast.Expr):
        last = _compiled(ast.Expression(body[-1].value), filename, "eval", flags)
        body = body[:-1]
    return _compiled(ast.Module(body, tree.type_ignores), filename, "exec", flags), last


def _compiled(tree: ast.Module | ast.Expression, filename: str, mode: str, flags: int) -> CodeType:
    flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    return cast(CodeType, compile(tree, filename, mode, flags, dont_inherit=True))


def awaits(node: ast.AST) -> int | None:
    """Return the line of the first `await` outside functions; None if there is none."""
    if isinstance(node, (ast.Await, ast.AsyncFor, ast.AsyncWith)):
        return node.lineno
    if isinstance(node, _LATER):  # decorators, defaults and a generator's first iterable run now
        now = [*getattr(node, "decorator_list", ()), getattr(node, "args", ast.Pass())]
        now += [each.iter for each in getattr(node, "generators", ())[:1]]
        return next(filter(None, map(awaits, now)), None)
    if isinstance(node, _COMPREHENSIONS) and any(each.is_async for each in node.generators):
        return node.lineno
    return next(filter(None, (awaits(child) for child in ast.iter_child_nodes(node))), None)


def _looped(tree: ast.Module, filename: str) -> CodeType:
    """Compile a loop over `_RUNS` whose body is a cell's code."""
    flags = _compiled(tree, filename, "exec", 0).co_flags & _FUTURES
    body = [n for n in tree.body if getattr(n, "module", "") != "__future__"] or [ast.Pass()]
    loop = ast.For(ast.Name(_RUN, ast.Store()), ast.Name(_RUNS, ast.Load()), body, [])
    ast.copy_location(loop, tree.body[0])
    return _compiled(ast.fix_missing_locations(ast.Module([loop], [])), filename, "exec", flags)


def own_code(code: CodeType) -> CodeType:
    """Copy a code object and the code objects inside it."""
    # torch.compile adds names to globals only once per code object, so each namespace needs a copy.
    consts = (own_code(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=tuple(consts))


@dataclass(frozen=True)
class Program:
    """Code, or a call of a function, that is compiled to run many times."""

    text: str  # as shown to the user
    filename: str  # as shown in tracebacks
    reads: tuple[str, ...]  # variables that the code or the set-up reads
    assigned: tuple[str, ...]  # variables that the code binds
    function: Callable[[], Any] | None  # called by the name in `FUNCTION`; None if code is text
    _setup: CodeType
    _once: tuple[CodeType, CodeType | None]
    _loop: CodeType

    def set_up(self, space: dict[str, Any]) -> None:
        _run(self._setup, space)

    def once(self, space: dict[str, Any]) -> Any:
        """Run the code once; return the value of its last expression, or None."""
        body, last = self._once
        _run(body, space)
        return None if last is None else _run(last, space)

    def looped(self, space: dict[str, Any]) -> Callable[[Iterable[None]], object]:
        """Return a function that runs the code in `space` once for each item of an iterable."""
        code = FunctionType(own_code(self._loop), space)

        def loop(runs: Iterable[None]) -> None:
            space[_RUNS] = runs
            try:
                code()
            finally:
                for name in (_RUNS, _RUN):
                    space.pop(name, None)

        return loop


def program(
    code: str | Callable[[], Any],
    namespace: dict[str, Any],
    *,
    setup: str = "",
    filename: str | None = None,
    text: str | None = None,
    passed: Iterable[str] = (),
) -> Program:
    """Compile code, or a function call with the variables `passed` as arguments; refuse `await`."""
    named = _remember(setup)
    if awaits(before := ast.parse(setup, named)):
        raise GpuError("the set-up has an await; move it to an earlier cell, and use its result")
    if isinstance(code, str):
        name, function = filename or _remember(code), None
        tree = ast.parse(code, name)
        if not tree.body:
            raise GpuError("there is no code to run; give some, such as 'a @ a'")
        if line := awaits(tree):
            raise GpuError(
                f"line {line} has an await, which cannot be repeated; move it to an earlier cell"
            )
        text = code if text is None else text
        read = names_read(ast.Module([*before.body, *tree.body], []))
        assigned = names_assigned(tree)
    else:
        read = [*_read_by(code, namespace), *names_read(before)]
        name, function, assigned = "<gpumagic.compare>", code, []
        filename = getattr(getattr(inspect.unwrap(code), "__code__", None), "co_filename", name)
        tree = ast.parse(f"f({', '.join(f'{each}={each}' for each in passed)})", name)
        tree.body[0].value.func.id = FUNCTION  # type: ignore[attr-defined]
        text = text or _text_of(code)
    return Program(
        text=text,
        filename=filename or name,
        reads=tuple(dict.fromkeys(read)),
        assigned=tuple(assigned),
        function=function,
        _setup=compile(before, named, "exec", dont_inherit=True),
        _once=compile_cell(tree, name),
        _loop=_looped(tree, name),
    )


def namespace_of(code: object, caller: FrameType) -> dict[str, Any]:
    """Return a function's globals; for any other code, the calling frame's globals."""
    own = getattr(inspect.unwrap(code), "__globals__", None) if callable(code) else None
    return caller.f_globals if own is None else own


def _run(code: CodeType, space: dict[str, Any]) -> Any:
    # Do not use `exec`, because it would add `__builtins__` to the variables.
    return FunctionType(own_code(code), space)()


def _read_by(function: Any, namespace: dict[str, Any]) -> list[str]:
    if not callable(function):
        kind = type(function).__name__
        raise GpuError(f"code or a function is needed, not {kind}; type 'a @ a' or lambda: a @ a")
    if inspect.iscoroutinefunction(function):
        raise GpuError("an async function cannot be repeated; give a function without async")
    module = str(getattr(inspect.unwrap(function), "__module__", "__main__"))
    found = variables_read([FUNCTION], {**namespace, FUNCTION: function}, module)
    return [name for name, _ in found if name in namespace and name not in NOT_VARIABLES]


def _remember(code: str) -> str:
    """Register code that has no file, so that tracebacks show its lines; return its file name."""
    name = f"<timed {hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest()[:8]}>"
    linecache.cache[name] = (len(code), None, [f"{line}\n" for line in code.splitlines()], name)
    return name


def _text_of(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    if "<lambda>" not in name:
        return f"{name.rpartition('<locals>.')[2]}()"
    with suppress(OSError, TypeError, SyntaxError):
        return inspect.getsource(function).strip()
    return "lambda"


def passes(loops: list[Any], space: dict[str, Any]) -> int:
    """Evaluate what a `for` loop iterates over; return its length, or 0 for nested loops."""
    if len(loops) != 1 or ast.Break in map(type, ast.walk(loops[0])):
        return 0
    over = loops[0].iter
    wraps = getattr(getattr(over, "func", None), "id", "") in ("enumerate", "zip", "tqdm")
    items = over.args[: None if over.func.id == "zip" else 1] if wraps else [over]
    return min(len(eval(ast.unparse(each), space)) for each in items)
