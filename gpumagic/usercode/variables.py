"""Find the names that code reads and binds, and their values, without running the code.

A name is read if an expression may use the value from *before* the cell. `x = 1; print(x)` does
not read the old `x`, but `if c: x = 1` followed by `print(x)` does. A cell with only `train()`
reads the names that `train` reads. Reading only a tensor's metadata (`x.shape`) does not count.
"""

import ast
import re
import symtable
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any

from gpumagic.usercode.values import (
    bases_of,
    comes_from,
    functions_in,
    globals_of,
    members_of,
    values_held,
)

# Line and cell magics whose text is Python that runs in the user's namespace.
_PYTHON_MAGICS = {"time", "timeit", "capture", "prun", "lprun", "memit", "mprun"}
_PYTHON_MAGICS |= {"gputime", "gpudiff"}
_OPTIONS = re.compile(r"^(\s*-{1,2}\w+(\s*\d+)?(?=\s|$))+")
# Metadata that is the same on all devices. Not `device`: code may read it to create tensors.
_METADATA = {"dim", "dtype", "layout", "nbytes", "ndim", "numel", "shape", "size"}
_METADATA_OF = {"id", "len", "type"}
# Code that calls one of these functions may read variables that are named in strings.
_BY_NAME = {"eval", "exec", "globals", "locals", "vars"}
_WORD = re.compile(r"[^\W\d]\w*")
_NO_VALUES: Mapping[str, Any] = types.MappingProxyType({})


def _is_array(value: object) -> bool:
    """Whether a value is a tensor or an array that supports DLPack."""
    return any("__dlpack_device__" in members_of(base) for base in bases_of(type(value)))


class NamesReader(ast.NodeVisitor):
    """Collect the names that code reads, and the names that it binds on every path."""

    def __init__(
        self, transform: Callable[[str], str] = str, values: Mapping[str, Any] = _NO_VALUES
    ) -> None:
        self.read: dict[str, None] = {}
        self.bound: set[str] = set()
        self._sometimes: set[str] = set()  # bound in some branches, or by := in comprehensions
        self._declared: set[str] = set()  # names declared global or nonlocal
        self._seen_inside: set[str] | None = None  # in a class body: names that its functions see
        self._transform = transform
        self._values = values

    def visit_all(self, *parts: Any) -> None:
        for part in parts:
            if isinstance(part, list):
                self.visit_all(*part)
            elif part is not None:
                self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self.bound.add(node.id)
        elif isinstance(node.ctx, ast.Del):
            self.bound.discard(node.id)
        elif node.id not in self.bound:
            self.read.setdefault(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit_all(node.value, node.targets)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit_all(node.annotation, node.value, node.target if node.value else None)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.visit(ast.Name(node.target.id, ast.Load()))
        self.visit_all(node.value, node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit_all(node.value, node.target)

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.bound |= {(a.asname or a.name).split(".")[0] for a in node.names}

    visit_ImportFrom = visit_Import

    def _one_of(self, *branches: Any) -> None:
        before = set(self.bound)
        ends = []
        for branch in branches:
            self.bound = set(before)
            self.visit_all(branch)
            ends.append(self.bound)
        self.bound = set.intersection(*ends)
        self._sometimes.update(*ends)

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        self._one_of(node.body, node.orelse)

    visit_IfExp = visit_If

    # For a loop, add an empty branch, because `break` may end the body early and skip `else`.
    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self._one_of(node.body, node.orelse, None)

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self._one_of([node.target, node.body], node.orelse, None)

    visit_AsyncFor = visit_For

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self._one_of(node.values[1:], None)

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        self._one_of(*node.cases, None)

    def visit_Try(self, node: Any) -> None:
        self._one_of([node.body, node.orelse], *node.handlers)
        self.visit_all(node.finalbody)

    visit_TryStar = visit_Try

    def _named(self, node: Any) -> None:
        if name := getattr(node, "name", None) or getattr(node, "rest", None):
            self.bound.add(name)
        self.generic_visit(node)

    visit_ExceptHandler = visit_MatchAs = visit_MatchStar = visit_MatchMapping = _named

    def _function(self, node: Any) -> None:
        for part in ("decorator_list", "args", "returns"):
            self.visit_all(getattr(node, part, None))
        params = [a.arg for a in ast.iter_child_nodes(node.args) if isinstance(a, ast.arg)]
        self.bound.update([node.name] if hasattr(node, "name") else [])
        self._scope(node.body, params)

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.visit_all(node.decorator_list, node.bases, node.keywords)
        self._scope(node.body, of_class=True)
        self.bound.add(node.name)

    def _comprehension(self, node: Any) -> None:
        first, *others = ([each.iter, each.target, each.ifs] for each in node.generators)
        self.visit(first.pop(0))  # Python evaluates the first iterable outside the nested scope
        value = [node.key, node.value] if isinstance(node, ast.DictComp) else node.elt
        self._scope([first, others, value])
        self._sometimes |= {n.target.id for n in ast.walk(node) if isinstance(n, ast.NamedExpr)}

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def _scope(self, body: Any, params: list[str] | None = None, of_class: bool = False) -> None:
        """Visit a nested scope, which does not see the names of a class around it."""
        seen = self.bound if self._seen_inside is None else self._seen_inside
        inner = NamesReader(self._transform, self._values)
        inner.bound, inner._seen_inside = {*seen, *(params or ())}, seen if of_class else None
        inner.visit_all(body)
        local = set() if params is None else (inner.bound | inner._sometimes) - inner._declared
        # Count non-local names as read, because the body may run before the cell binds them.
        self.read.update(dict.fromkeys(name for name in inner.read if name not in local))

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> None:
        self._declared.update(node.names)

    visit_Nonlocal = visit_Global

    def _is_tensor(self, node: ast.AST) -> bool:
        return _is_array(self._values.get(node.id) if isinstance(node, ast.Name) else None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not (node.attr in _METADATA and self._is_tensor(node.value)):
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        shown = node.value
        if isinstance(shown, ast.Call) and getattr(shown.func, "id", "") == "print":
            parts: list[Any] = [shown.func, *shown.args, *shown.keywords]
        else:
            parts = shown.elts if isinstance(shown, ast.Tuple) else [shown]
        for part in parts:
            if not (getattr(part, "attr", "") == "device" and self._is_tensor(part.value)):
                self.visit(part)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "id", "")
        builtin = name not in self._values and name not in self.bound
        if name in _METADATA_OF and builtin and all(map(self._is_tensor, node.args)):
            return
        self.generic_visit(node)
        if getattr(node.func, "attr", "") in ("run_line_magic", "run_cell_magic"):
            self._nested_magic(*node.args)

    def _nested_magic(self, *arguments: ast.expr) -> None:
        texts = [str(a.value) for a in arguments if isinstance(a, ast.Constant)]
        if len(texts) < max(len(arguments), 2) or texts[0] not in _PYTHON_MAGICS:
            return
        # The text on the magic's line is Python too: a statement, or the set-up of %%timeit.
        for text in (_OPTIONS.sub("", texts[1]).strip(), *texts[2:]):
            try:
                self.visit(ast.parse(self._transform(text)))
            except SyntaxError:  # an option has a value, as in %lprun -f train train(X)
                self.visit_all([ast.Name(word, ast.Load()) for word in _WORD.findall(text)])


NOT_VARIABLES = {"In", "Out", "_ih", "_oh", "_dh", "get_ipython", "exit", "quit"}  # IPython's own


def own_variables(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook's variables, without private names (``_name``) and IPython's names."""
    return {n: v for n, v in namespace.items() if not n.startswith("_") and n not in NOT_VARIABLES}


# `transform` converts a nested magic's text to Python, like `InteractiveShell.transform_cell`.
def names_read(
    tree: ast.AST, transform: Callable[[str], str] = str, values: Mapping[str, Any] = _NO_VALUES
) -> list[str]:
    """Return the global names that code reads, in order; a tensor's metadata does not count."""
    reader = NamesReader(transform, values)
    reader.visit(tree)
    if _BY_NAME & reader.read.keys():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                reader.read.update(dict.fromkeys(_WORD.findall(node.value)))
    return [name for name in reader.read if name not in NOT_VARIABLES]


def names_assigned(tree: ast.AST) -> list[str]:
    """Return the global names that the code of `tree` binds, including in its functions."""
    symbols = symtable.symtable(ast.unparse(tree), "<cell>", "exec").get_symbols()
    bound = (s for s in symbols if s.is_assigned() or s.is_imported() or s.is_declared_global())
    return [symbol.get_name() for symbol in bound]


_ON_HOST = "torch.utils.data.Dataset", "torch.utils.data.DataLoader"


def variables_read(
    names: Iterable[str],
    namespace: Mapping[str, Any],
    module: str = "__main__",
    *,
    on_host: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Yield `(name, value)` of `names`, and of their functions' globals, closures and defaults."""
    queue = deque(names)
    seen: set[str] = set()
    followed: set[FunctionType] = set()
    while queue:
        if (name := queue.popleft()) in seen or name not in namespace:
            continue
        seen.add(name)
        value = namespace[name]
        yield name, value
        kind = value if isinstance(value, type) else type(value)
        # Without `on_host`, do not follow datasets' and loaders' functions, which run on the host.
        closed = _is_array(value) or (not on_host and comes_from(kind, *_ON_HOST))
        functions = deque([] if closed else functions_in(value, module))
        while functions:
            if (function := functions.popleft()) in followed:
                continue
            followed.add(function)
            queue.extend(globals_of(function.__code__))
            for inner, held in values_held(function):
                yield f"{name}.{inner}", held
                functions.extend(functions_in(held, module))
