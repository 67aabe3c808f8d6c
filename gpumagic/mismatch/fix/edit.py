"""Edit the statement that failed: lines before it, and expressions in it, as a fix."""

import ast
from dataclasses import dataclass, field

from gpumagic.mismatch.explanation import Fix
from gpumagic.usercode.files import label
from gpumagic.usercode.frames import FailedFrame

_ATOMS = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Tuple, ast.Constant)
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Assert, ast.Delete)


def bracketed(node: ast.AST, text: str) -> str:
    """An expression, in brackets if something is to be put after it."""
    return text if isinstance(node, _ATOMS) and not text.startswith(("-", "~")) else f"({text})"


@dataclass
class Edit:
    """Changes around one statement."""

    frame: FailedFrame
    stmt: ast.stmt
    before: list[str] = field(default_factory=list)
    replaced: list[tuple[ast.AST, str]] = field(default_factory=list)

    def fix(
        self, nbytes: int | None, other_nbytes: int | None = None, *, once: bool = False
    ) -> Fix:
        """The changes as a fix."""
        lines = self.frame.source.splitlines()
        start, end = self.stmt.lineno, self.stmt.end_lineno or self.stmt.lineno
        if not isinstance(self.stmt, _SIMPLE):
            end = start
        end = max([end, *(getattr(n, "end_lineno", end) for n, _ in self.replaced)])
        indent = lines[start - 1][: len(lines[start - 1]) - len(lines[start - 1].lstrip())]
        code = [f"{indent}{line}" for line in self.before]
        if self.replaced:
            code += _edited(lines[start - 1 : end], start, self.replaced)
        return Fix(
            "\n".join(code),
            "replace" if self.replaced else "before",
            start,
            end if self.replaced else start,
            self.frame.filename,
            label(self.frame.filename),
            nbytes,
            other_nbytes,
            once,
        )


def _edited(lines: list[str], first: int, edits: list[tuple[ast.AST, str]]) -> list[str]:
    """Lines with expressions replaced; `first` is the number of the first."""
    text = "\n".join(lines).encode()  # columns count bytes of UTF-8
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
