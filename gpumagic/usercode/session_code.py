"""Read the cells of a session as plain Python, and find the statements that some of them need.

What IPython adds to Python is left out, with a comment in its place. Nothing is run: what a
statement needs is found by the names that it reads.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gpumagic.usercode.variables import names_assigned, names_read

# Below these stands Python that runs in the notebook.
_AROUND = {"time", "capture", "prun", "ongpu"}
_TIMED = re.compile(r"^([ \t]*)%time[ \t]+(?=\S)", re.MULTILINE)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class CodePart:
    """A statement, or a whole cell, with the names of what it reads, binds and changes."""

    text: str
    reads: frozenset[str]
    binds: frozenset[str]
    changes: frozenset[str] = frozenset()  # by setting a part, or by calling a method of it
    defines: bool = False  # a function, a class or an import
    surely: bool = False  # all that it does is to bind
    calls: bool = True


def plain_python(cell: str) -> tuple[list[str], str]:
    """The magics that stand above a cell, and what is below as Python; nothing for other text."""
    from IPython.core.inputtransformer2 import TransformerManager

    above, text = [], cell
    while text.lstrip().startswith("%%"):
        line, _, text = text.lstrip().partition("\n")
        above.append(line.strip())
        if line[2:].partition(" ")[0] not in _AROUND:
            return above, ""
    try:
        return above, _left_out(TransformerManager().transform_cell(_TIMED.sub(r"\1", text)))
    except SyntaxError:
        return above, ""


def _left_out(code: str) -> str:
    """The same with comments where IPython is called."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and _is_ipythons(node):
            first = lines[node.lineno - 1]
            blank = first[: len(first) - len(first.lstrip())]
            said = " ".join(ast.unparse(node).split())
            rest = [""] * ((node.end_lineno or node.lineno) - node.lineno)
            lines[node.lineno - 1 : node.end_lineno] = [f"{blank}pass  # left out: {said}", *rest]
    return "\n".join(lines)


def _is_ipythons(node: ast.AST) -> bool:
    return any(getattr(each, "id", "") == "get_ipython" for each in ast.walk(node))


def parts_of(code: str) -> Iterator[CodePart]:
    """The statements of a cell, each with the comments above it."""
    lines, end = code.splitlines(), 0
    for node in ast.parse(code).body:
        decorators = [d.lineno for d in getattr(node, "decorator_list", [])]
        start, stop = min([node.lineno, *decorators]) - 1, node.end_lineno or node.lineno
        while start > end and lines[start - 1].lstrip().startswith("#"):
            start -= 1
        # Of several on one line, each by itself.
        text = "\n".join(lines[start:stop]) if start >= end and not _shared(node, lines) else ""
        end = stop
        yield code_part(ast.Module([node], []), text or ast.unparse(node))


def _shared(node: ast.stmt, lines: list[str]) -> bool:
    after = lines[(node.end_lineno or node.lineno) - 1].encode()[node.end_col_offset or 0 :]
    return after.lstrip().startswith(b";")


def code_part(tree: ast.Module, text: str) -> CodePart:
    """What code reads, binds and changes."""
    node = tree.body[0] if len(tree.body) == 1 else tree
    binds = frozenset(names_assigned(tree))
    defines = isinstance(node, _DEFINITIONS)
    sets = isinstance(node, (ast.Assign, ast.AnnAssign)) and not _changes(node)
    calls = not defines and any(isinstance(each, ast.Call) for each in ast.walk(node))
    reads, changes = frozenset(names_read(tree)), frozenset(_changes(node))
    return CodePart(text, reads, binds, changes, defines, bool(binds) and (defines or sets), calls)


def _changes(node: ast.AST) -> set[str]:
    """The names of which a part is set, or a method called for what it does."""
    parts: list[ast.AST] = []
    for each in ast.walk(node):
        if isinstance(each, (ast.Attribute, ast.Subscript)) and not isinstance(each.ctx, ast.Load):
            parts.append(each)
        elif isinstance(each, ast.Expr) and isinstance(each.value, ast.Call):
            parts.append(each.value.func)
    return {found for found in map(_root, parts) if found}


def _root(node: ast.AST) -> str:
    part = node
    while isinstance(part, (ast.Attribute, ast.Subscript)):
        part = part.value
    return part.id if isinstance(part, ast.Name) and part is not node else ""


def needed(every: Sequence[CodePart], wanted: Sequence[CodePart]) -> list[CodePart]:
    """Those that are wanted, and those before that bind or change what these read; in order.

    What is bound anew before anything reads it is left out.
    """
    chosen = {id(each) for each in wanted}
    last = max((n for n, each in enumerate(every) if id(each) in chosen), default=-1)
    names, more = set[str](), True
    while more:
        for each in every:
            names |= each.reads if id(each) in chosen else set()
        found = {id(p) for p in every[:last] if (p.binds | p.changes) & names or _brings_all(p)}
        more = not found <= chosen
        chosen |= found
    kept = [each for each in every if id(each) in chosen]
    inner = {name for each in kept if each.defines for name in each.reads}
    bound, alive = set[str](), list[CodePart]()  # bound: anew, before anything reads it
    for each in reversed(kept):
        if each.surely and each.binds <= bound and not each.changes:
            continue
        alive.append(each)
        bound |= each.binds if each.surely else set()
        bound -= each.reads | (inner if each.calls else set())
    return alive[::-1]


def _brings_all(each: CodePart) -> bool:
    """Whether it is `from module import *`."""
    return each.defines and not each.binds
