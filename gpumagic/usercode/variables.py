"""Find the variables that a cell reads, also through the notebook's functions; run nothing.

A name counts if its value from *before* the cell can reach an expression. `x = 1; print(x)` does
not read the old `x`, but `if c: x = 1` followed by `print(x)` does. A cell with only `train()`
reads what `train` reads. A tensor does not count if only its metadata is read (`x.shape`,
`len(x)`), also in a function that gets it as an argument.
"""

import ast
import inspect
import re
import symtable
import textwrap
import types
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from tokenize import TokenError
from types import CodeType, FunctionType
from typing import Any

from gpumagic.usercode.files import is_users
from gpumagic.usercode.values import functions_in, globals_of, is_array

# Line and cell magics whose text is Python that runs in the user's namespace.
_PYTHON_MAGICS = {"time", "timeit", "capture", "prun", "lprun", "memit", "mprun", "gputime"}
_OPTIONS = re.compile(r"^(\s*-{1,2}\w+(\s*\d+)?(?=\s|$))+")
# What is the same of a tensor wherever its bytes are. By `device` code makes others, unless it is
# only shown.
_ABOUT = {"dim", "dtype", "layout", "nbytes", "ndim", "numel", "shape", "size"}
_ASKS = {"id", "len", "type"}
BY_NAME = {"eval", "exec", "globals", "locals", "vars"}
"""With one of these, code reaches variables by names in its texts."""
NO_VALUES: Mapping[str, Any] = types.MappingProxyType({})


class _SomeArray:
    """Stands for what a parameter is given, where that counts as an array."""

    __dlpack_device__ = None


_SOME_ARRAY = _SomeArray()


def _definition(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """The `def` of the user's that this is the code of, if its file still says so."""
    if not is_users(code.co_filename):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
        made = compile(tree, code.co_filename, "exec", dont_inherit=True).co_consts
    except (OSError, SyntaxError, ValueError, IndexError, TokenError):
        return None
    same = (isinstance(c, CodeType) and c.co_code == code.co_code for c in made)
    found = tree.body[0]
    is_def = isinstance(found, (ast.FunctionDef, ast.AsyncFunctionDef))
    return found if is_def and any(same) else None  # type: ignore[return-value]


class NamesReader(ast.NodeVisitor):
    """Walks statements in the order in which they run, keeping what is surely bound by then."""

    # `transform` and `values` are those of `names_read`; `rebound` gives the names that may stand
    # for another function by the time it is called; `asked` has what is known of functions.
    def __init__(
        self,
        transform: Callable[[str], str],
        values: Mapping[str, Any],
        rebound: Callable[[], Collection[str]] = tuple,
        asked: dict[CodeType, Collection[str]] | None = None,
    ) -> None:
        self.read: dict[str, None] = {}
        self.bound: set[str] = set()
        self.transform = transform
        self.values = values
        self.rebound = rebound
        self.asked = {} if asked is None else asked

    def _is_tensor(self, node: ast.AST) -> bool:
        held = self.values.get(node.id) if isinstance(node, ast.Name) else None
        return is_array(held)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (node.attr in _ABOUT and self._is_tensor(node.value)):
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "print":
            parts: list[ast.AST] = [value.func, *value.args, *value.keywords]
        else:
            parts = [*value.elts] if isinstance(value, ast.Tuple) else [value]
        self._all(part for part in parts if not self._is_device(part))

    def _is_device(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Attribute):
            return False
        return node.attr == "device" and self._is_tensor(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)
        elif node.id not in self.bound:
            self.read.setdefault(node.id)

    def _all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)

    def _maybe(self, *branches: Iterable[ast.AST | None]) -> None:
        # Any of the branches may run: only what all of them bind is bound afterwards.
        before = set(self.bound)
        ends = []
        for branch in branches:
            self.bound = set(before)
            self._all(branch)
            ends.append(self.bound)
        self.bound = set.intersection(*ends)

    # -- statements that read before they bind
    def visit_Assign(self, node: ast.Assign) -> None:
        self._all([node.value, *node.targets])

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._all([node.annotation, node.value])
        if node.value is not None:
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.visit(ast.Name(node.target.id, ast.Load()))
        self._all([node.value, node.target])

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._all([node.value, node.target])

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound |= {(a.asname or a.name).split(".")[0] for a in node.names}

    visit_ImportFrom = visit_Import

    # -- branches
    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        self._maybe(node.body, node.orelse)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.visit(node.test)
        self._maybe([node.body], [node.orelse])

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._maybe(node.values[1:], [])

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._maybe(node.body, [])
        self._maybe(node.orelse, [])

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._maybe([node.target, *node.body], [])
        self._maybe(node.orelse, [])

    visit_AsyncFor = visit_For

    def visit_Try(self, node: Any) -> None:
        before = set(self.bound)
        self._all(node.body)
        self._all(node.orelse)
        completed, self.bound = self.bound, before
        for handler in node.handlers:
            self._maybe([handler], [])
        self.bound = completed if not node.handlers else before
        self._all(node.finalbody)

    visit_TryStar = visit_Try

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._all([node.type])
        if node.name:
            self.bound.add(node.name)
        self._all(node.body)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        before = set(self.bound)
        for case in node.cases:
            self.bound = set(before)
            for pattern in ast.walk(case.pattern):
                name = getattr(pattern, "name", None) or getattr(pattern, "rest", None)
                if name:
                    self.bound.add(name)
            self._all([case.pattern, case.guard, *case.body])
        self.bound = before

    # -- scopes of their own
    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._all(node.decorator_list)
        self._function(node.args, node.body, name=node.name)
        self.bound.add(node.name)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._function(node.args, [node.body])

    def _function(self, args: ast.arguments, body: Iterable[ast.AST], name: str = "") -> None:
        self._all([*args.defaults, *args.kw_defaults])
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        local = {a.arg for a in every if a is not None} | {name}
        outer = set[str]()
        for node in body:
            for inner in ast.walk(node):
                if isinstance(inner, (ast.Global, ast.Nonlocal)):
                    outer |= set(inner.names)
                elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    local.add(inner.id)
        # The body runs later, when all that the cell binds at its top is bound: what matters
        # is only which names are the function's own.
        saved, self.bound = self.bound, self.bound | (local - outer)
        self._all(body)
        self.bound = saved

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._all([*node.decorator_list, *node.bases, *node.keywords])
        saved = set(self.bound)
        self._all(node.body)
        self.bound = saved | {node.name}

    def _comprehension(self, node: Any) -> None:
        saved = set(self.bound)
        for generator in node.generators:
            self._all([generator.iter, generator.target, *generator.ifs])
        self._all([node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt])
        self.bound = saved

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    # -- magics below ours: their Python is a string in the tree
    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        named = function.id if isinstance(function, ast.Name) else ""
        asks = named in _ASKS and named not in self.values and named not in self.bound
        if asks and len(node.args) == 1 and self._is_tensor(node.args[0]):
            return
        asked = self._asked_by(named, node)
        self._all(part for part in (function, *node.args, *node.keywords) if part not in asked)
        if not (
            isinstance(function, ast.Attribute)
            and function.attr in ("run_line_magic", "run_cell_magic")
            and all(isinstance(a, ast.Constant) for a in node.args)
        ):
            return
        magic, *texts = [str(a.value) for a in node.args if isinstance(a, ast.Constant)]
        if magic not in _PYTHON_MAGICS or not texts:
            return
        # The text after the magic's name is Python too: a statement, or the set-up of %%timeit.
        texts[0] = _OPTIONS.sub("", texts[0]).strip()
        for text in texts:
            try:
                self.visit(ast.parse(self.transform(text)))
            except SyntaxError:
                continue

    # -- tensors that are given to the user's functions
    def _asked_by(self, named: str, call: ast.Call) -> list[ast.AST]:
        """The arguments that are tensors of which the called function asks what they are alone."""
        function = self.values.get(named)
        tensors = [x for x in call.args if self._is_tensor(x)]
        by_name = [k for k in call.keywords if self._is_tensor(k.value)]
        if (
            type(function) is not FunctionType
            or not (tensors or by_name)
            or named in self.rebound()
        ):
            return []
        code, only_asked = function.__code__, self._only_asked(function)
        places = dict(zip(call.args, code.co_varnames[: code.co_argcount]))  # noqa: B905 (defaults)
        if any(isinstance(x, ast.Starred) for x in call.args):
            places.clear()
        return [
            *(x for x in tensors if places.get(x) in only_asked),
            *(k for k in by_name if k.arg in only_asked),
        ]

    def _only_asked(self, function: FunctionType) -> Collection[str]:
        """The parameters of a function that it only asks what they are, were they tensors."""
        code = function.__code__
        if code not in self.asked:
            self.asked[code] = ()  # what calls itself meanwhile is not sure
            parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            own = dict.fromkeys((*code.co_varnames, *code.co_freevars))
            values = ChainMap(dict.fromkeys(parameters, _SOME_ARRAY), own, function.__globals__)
            reader = NamesReader(str, values, self.rebound, self.asked)
            if (definition := _definition(code)) is not None:
                reader._all(definition.body)
                if not BY_NAME & reader.read.keys():
                    self.asked[code] = set(parameters) - reader.read.keys()
        return self.asked[code]


# IPython's own names for what it keeps: every output of the notebook is no variable of the cell.
NOT_VARIABLES = {"In", "Out", "_ih", "_oh", "_dh", "get_ipython", "exit", "quit"}


# `transform` makes Python of the text of a nested magic, as `InteractiveShell.transform_cell` does.
def names_read(
    tree: ast.AST, transform: Callable[[str], str] = str, values: Mapping[str, Any] = NO_VALUES
) -> list[str]:
    """The global names that the code of `tree` reads, in the order of their first use.

    Not those of tensors, by their `values`, of which is only asked what they are: `x.shape`.
    """
    assigned: list[list[str]] = []

    def rebound() -> list[str]:
        if not assigned:
            assigned.append(names_assigned(tree))
        return assigned[0]

    reader = NamesReader(transform, values, rebound)
    reader.visit(tree)
    if BY_NAME & reader.read.keys():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                reader.read.update(dict.fromkeys(re.findall(r"\w+", node.value)))
    return [name for name in reader.read if name not in NOT_VARIABLES]


def names_assigned(tree: ast.AST) -> list[str]:
    """The global names that the code of `tree` binds, also in its functions."""
    symbols = symtable.symtable(ast.unparse(tree), "<cell>", "exec").get_symbols()
    bound = (s for s in symbols if s.is_assigned() or s.is_imported() or s.is_declared_global())
    return [symbol.get_name() for symbol in bound]


def variables_read(
    names: Iterable[str], namespace: Mapping[str, Any], module: str = "__main__"
) -> Iterator[tuple[str, Any]]:
    """Yield `(name, value)` for each name, and for those that functions of `module` read."""
    queue = deque(names)
    seen: set[str] = set()
    followed: set[CodeType] = set()
    while queue:
        name = queue.popleft()
        if name in seen or name not in namespace:
            continue
        seen.add(name)
        value = namespace[name]
        yield name, value
        functions = deque([] if is_array(value) else functions_in(value, module))
        while functions:
            function = functions.popleft()
            if function.__code__ in followed:
                continue
            followed.add(function.__code__)
            queue.extend(globals_of(function.__code__))
            for free, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            ):
                try:
                    held = cell.cell_contents
                except ValueError:  # a closure variable that is not bound yet
                    continue
                yield f"{name}.{free}", held
                functions.extend(functions_in(held, module))
