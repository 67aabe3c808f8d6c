"""The user's code with a fix in it, and what else is so while it is followed."""

import ast
import linecache
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

import torch

from gpumagic.mismatch.explanation import Fix
from gpumagic.usercode.frames import Place, parse
from gpumagic.usercode.values import full

DEFS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Mended:
    """A file with a fix in it."""

    filename: str
    tree: ast.Module
    after: int
    shift: int

    @classmethod
    def of(cls, fix: Fix, place: Place) -> "Mended | None":
        source = fix.apply(place.source)
        tree = parse(source)
        shift = len(source.splitlines()) - len(place.source.splitlines())
        return cls(fix.filename, tree, fix.line, shift) if tree is not None else None

    def line(self, line: int) -> int:
        """The line that one of the old text has become."""
        return line + self.shift if line > self.after else line

    def scope(self, scope: ast.AST) -> ast.AST | None:
        """A function of the old text, in the new one."""
        if isinstance(scope, ast.Module):
            return self.tree
        line, column = getattr(scope, "lineno", 0), getattr(scope, "col_offset", 0)
        for node in ast.walk(self.tree):
            if not isinstance(node, type(scope)) or not isinstance(node, DEFS):
                continue
            if (node.lineno, node.col_offset) == (line, column):
                return node
        return None


@dataclass(frozen=True)
class World:
    """What is so in every frame: the mended file, and the objects that a fix may have replaced."""

    mended: Mended
    replaced: frozenset[int]
    default: str
    trees: dict[str, ast.Module | None] = field(default_factory=dict)
    steps: Iterator[int] = field(default_factory=count)

    def tree(self, filename: str) -> ast.Module | None:
        """The text of a file, read once; of the mended file, the new text."""
        if filename == self.mended.filename:
            return self.mended.tree
        if filename not in self.trees:
            self.trees[filename] = parse("".join(linecache.getlines(filename)))
        return self.trees[filename]

    def first_line(self, code: types.CodeType) -> int:
        """Where a function begins in `tree()`."""
        moved = code.co_filename == self.mended.filename
        return self.mended.line(code.co_firstlineno) if moved else code.co_firstlineno


def default_device(tree: ast.AST | None) -> str:
    """Where tensors are made without `device=`; empty where a `with` says so."""
    withs = (n for n in ast.walk(tree) if isinstance(n, ast.With)) if tree else ()
    if any("device" in ast.unparse(item) for n in withs for item in n.items):
        return ""
    return full(torch.get_default_device())


def definition(tree: ast.Module, code: types.CodeType, first: int) -> ast.AST | None:
    """The text of a function that begins on line `first`."""
    found = [
        n
        for n in ast.walk(tree)
        if isinstance(n, DEFS)
        and first == min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))])
        and getattr(n, "name", "<lambda>") == code.co_name
    ]
    return found[0] if len(found) == 1 else None
