"""Edit the user's source: a line before a statement, an expression within it."""

import ast
from dataclasses import dataclass, field

from gpumagic.mismatch.explanation import Fix
from gpumagic.usercode.frames import Place, label, parents

SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Tuple, ast.Constant)


def statement(node: ast.AST) -> ast.stmt | None:
    """The statement that a node belongs to."""
    if isinstance(node, ast.stmt):
        return node
    return next((n for n in parents(node) if isinstance(n, ast.stmt)), None)


def in_own_scope(node: ast.AST) -> bool:
    """Whether a node is inside a comprehension, a generator expression or a lambda."""
    for parent in parents(node):
        if isinstance(parent, ast.stmt):
            return False
        if isinstance(parent, SCOPES):
            return True
    return False


def function_of(node: ast.AST) -> ast.AST | None:
    """The function, lambda or module whose code a node is."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
    return next((n for n in parents(node) if isinstance(n, kinds)), None)


def can_precede(place: Place, stmt: ast.stmt, node: ast.AST) -> bool:
    """Whether a line put before `stmt` runs each time just before `node`."""
    line = place.source.splitlines()[stmt.lineno - 1]
    if line.encode()[: stmt.col_offset].strip():
        return False  # `if ready: y = net(x)`, `a; b`
    if line.lstrip().startswith("elif") or isinstance(stmt, (ast.While, ast.ClassDef)):
        return False
    return not isinstance(stmt, (ast.FunctionDef, ast.AsyncFunctionDef))


def bracketed(node: ast.AST, text: str) -> str:
    """An expression, in brackets if something is to be put after it."""
    return text if isinstance(node, _ATOMS) and not text.startswith(("-", "~")) else f"({text})"


@dataclass
class Edit:
    """Changes around one statement."""

    place: Place
    stmt: ast.stmt
    before: list[str] = field(default_factory=list)
    replaced: list[tuple[ast.AST, str]] = field(default_factory=list)

    def fix(self, nbytes: int | None, other_nbytes: int | None, *, once: bool = False) -> Fix:
        """The changes as a fix."""
        lines = self.place.source.splitlines()
        start, end = self.stmt.lineno, self.stmt.end_lineno or self.stmt.lineno
        if not isinstance(self.stmt, _SIMPLE):
            end = start
        end = max([end, *(getattr(n, "end_lineno", end) for n, _ in self.replaced)])
        indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
        code = [f"{indent}{line}" for line in self.before]
        if self.replaced:
            code += edited(lines[start - 1 : end], start, self.replaced)
        return Fix(
            "\n".join(code),
            "replace" if self.replaced else "before",
            start,
            end if self.replaced else start,
            self.place.filename,
            label(self.place.filename),
            nbytes,
            other_nbytes,
            once,
        )


_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Assert, ast.Delete)


def edited(lines: list[str], first: int, edits: list[tuple[ast.AST, str]]) -> list[str]:
    """Lines with expressions replaced; `first` is the number of the first."""
    text = "\n".join(lines).encode()
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()) + 1)
    spans = []
    for node, new in edits:
        begin = starts[node.lineno - first] + node.col_offset  # type: ignore[attr-defined]
        end = starts[node.end_lineno - first] + node.end_col_offset  # type: ignore[attr-defined]
        spans.append((begin, end, new.encode()))
    for begin, end, put in sorted(set(spans), reverse=True):
        text = text[:begin] + put + text[end:]
    return text.decode().split("\n")
