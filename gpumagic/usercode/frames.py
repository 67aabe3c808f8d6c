"""From an exception to the user's frames, their source and the expression that failed."""

import ast
import builtins
import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import cached_property
from types import FrameType, TracebackType
from typing import Any

import torch

from gpumagic.usercode.values import Scope

_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INSTALLED = tuple(
    {
        os.path.abspath(sysconfig.get_path(name)) + os.sep
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
)
_SITE = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FRAMES = 200
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", None)  # Python 3.11
_TIMED = {"<timed exec>": "expr", "<timed eval>": "expr"}


def errors(error: BaseException) -> Iterator[BaseException]:
    """An exception and those that it was raised from, each once, the original last."""
    seen: list[BaseException] = []
    queue: list[BaseException | None] = [error]
    while queue and len(seen) < 20:
        current = queue.pop(0)
        if current is None or any(current is e for e in seen):
            continue
        seen.append(current)
        yield current
        queue.append(current.__cause__)
        if not current.__suppress_context__:
            queue.append(current.__context__)
        if _GROUP is not None and issubclass(type(current), _GROUP):
            queue.extend(current.exceptions)  # type: ignore[attr-defined]


class Place:
    """One frame of a traceback: what failed in it, and the names that it sees.

    Attributes
    ----------
    direct : bool
        Between this frame and the error lies no code but torch's.
    """

    def __init__(self, tb: TracebackType, source: str | None, *, direct: bool) -> None:
        frame = tb.tb_frame
        self.scope = Scope(_names(frame), frame.f_globals)
        self.code = frame.f_code
        self.filename = frame.f_code.co_filename
        self.line = tb.tb_lineno or frame.f_code.co_firstlineno
        self.direct = direct
        self.at_top = not frame.f_code.co_flags & inspect.CO_OPTIMIZED
        self._span = position(tb)
        self._source = source

    @cached_property
    def source(self) -> str:
        """The text of the file or cell; empty where it cannot be had."""
        return self._source or "".join(linecache.getlines(self.filename))

    @cached_property
    def tree(self) -> ast.Module | None:
        return parse(self.source) if self.source else None

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the function's arguments."""
        code = self.code
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    def nodes(self) -> list[ast.AST]:
        """The expression that failed; where only the line is known, all that it may be."""
        if self.tree is None:
            return []
        if self._span is None:
            return [n for n in ast.walk(self.tree) if getattr(n, "lineno", 0) == self.line]
        found = [n for n in ast.walk(self.tree) if _span(n) == self._span]
        expressions = [n for n in found if not isinstance(n, ast.Expr)]
        return expressions[-1:] or found[-1:]

    def text(self, node: ast.AST) -> str:
        """An expression as the user wrote it, on one line."""
        found = ast.get_source_segment(self.source, node) or ast.unparse(node)
        return " ".join(line.strip() for line in found.splitlines())


def parse(source: str) -> ast.Module | None:
    """A syntax tree whose nodes know their parents; None of what is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node  # type: ignore[attr-defined]
    return tree


Span = tuple[int, int, int, int]


def _names(frame: FrameType) -> Mapping[str, Any]:
    """A frame's own names."""
    local = frame.f_locals
    if local is frame.f_globals or type(local) is not dict:
        return local
    # Before Python 3.13 a running function keeps this copy of its names until it returns, and
    # in it the exception, whose frames hold every tensor that they saw.
    names = dict(local)
    for name, value in names.items():
        if issubclass(type(value), BaseException):
            del local[name]
    return names


def position(tb: TracebackType) -> Span | None:
    """Lines and columns (of UTF-8) of what a frame was doing; None where they cannot be had."""
    code: Any = tb.tb_frame.f_code
    if not hasattr(code, "co_positions"):
        return _matched(tb)  # Python 3.10
    lasti = tb.tb_lasti
    for n, (line, end, column, end_column) in enumerate(code.co_positions()):
        if n == lasti // 2:
            if None in (line, end, column, end_column):
                return None
            return line, end, column, end_column
    return None


def _matched(tb: TracebackType) -> Span | None:
    """The same by comparing the code with the source's, as IPython's own tracebacks do."""
    try:
        from executing import Source

        node = Source.executing(tb).node
    except Exception:  # noqa: BLE001  a source that is not that of the code
        return None
    return _span(node) if node is not None else None


def _span(node: ast.AST) -> Span | None:
    if not isinstance(node, (ast.expr, ast.stmt)):
        return None
    return node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0


def parents(node: ast.AST) -> Iterator[ast.AST]:
    """What encloses a node, from the inside."""
    while (node := getattr(node, "parent", None)) is not None:  # type: ignore[assignment]
        yield node


def label(filename: str) -> str:
    """A file as people know it: ``"In[3]"`` for a cell, ``"train.py"``."""
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        try:
            named = shell.compile.format_code_name(filename) if shell is not None else None
        except Exception:  # noqa: BLE001  a shell of another make
            named = None
        if named is not None and named[0].startswith("Cell"):
            return str(named[1])
    return "" if filename.startswith("<") else os.path.basename(filename)


def is_users(filename: str) -> bool:
    """Whether a file is neither torch's, nor ours, nor of an installed library."""
    if filename.startswith("<"):
        return filename.startswith(("<ipython-input", "<timed", "<stdin")) or bool(
            linecache.getlines(filename)
        )
    path = os.path.abspath(filename)
    if path.startswith((_TORCH, _OURS)) or any(site in path for site in _SITE):
        return False
    return not path.startswith(_INSTALLED)


def places(traceback: TracebackType | None) -> list[Place]:
    """The user's frames, from the deepest outwards."""
    chain: list[TracebackType] = []
    while traceback is not None and len(chain) < 10 * _FRAMES:
        chain.append(traceback)
        traceback = traceback.tb_next
    timed: dict[str, str] = {}
    for tb in chain:
        _note_timed(tb.tb_frame, timed)
    found: list[Place] = []
    direct = True
    for tb in reversed(chain[-_FRAMES:]):
        filename = tb.tb_frame.f_code.co_filename
        if is_users(filename):
            found.append(Place(tb, timed.get(filename), direct=direct))
            direct = True
        elif not os.path.abspath(filename).startswith((_TORCH, _OURS)):
            direct = False
    return found


def _note_timed(frame: FrameType, timed: dict[str, str]) -> None:
    # %%time compiles its text under a name of which no source is kept, but its frame has it.
    if frame.f_code.co_name == "time" and "IPython" in frame.f_code.co_filename:
        text = frame.f_locals.get("expr")
        if isinstance(text, str):
            timed.update(dict.fromkeys(_TIMED, text))
