"""Which line of the user's an operator was called from, and what stands there."""

import ast
import linecache
import os
import re
import site
import sys
import sysconfig
import textwrap
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType

import torch

LIBRARY, USER, PRINT, LOADER, DISPLAY, ENGINE, FIX = range(7)
"""What a frame is: of a library; of the user; or one that says how the user got there: by printing,
by a `DataLoader` whose batches a placement brings, by the notebook's display of a value, by
autograd's engine; by `--fix`."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_LIBRARIES = tuple(
    {
        os.path.join(path, "")
        for path in (
            *(sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
            os.path.dirname(os.__file__),
        )
        if path
    }
    | {_OURS, _TORCH}
)
_SPECIAL = {
    os.path.join("torch", "_tensor_str.py"): PRINT,
    os.path.join("torch", "autograd", "graph.py"): ENGINE,
    os.path.join("torch", "autograd", "__init__.py"): ENGINE,
    os.path.join("gpumagic", "placement", "dataloader.py"): LOADER,
    os.path.join("gpumagic", "cell", "autofix.py"): FIX,
    os.path.join("IPython", "core", "displayhook.py"): DISPLAY,
    os.path.join("IPython", "core", "formatters.py"): DISPLAY,
}
_TYPED = re.compile(r"<(ipython-input|stdin|doctest|python-input|timed |magic-timeit)")
# A tensor's own methods, which are the user's doing.
_METHODS = tuple(os.path.join("torch", name) for name in ("_tensor.py", "functional.py"))


# What IPython makes of `%timeit x.sum()`.
_MAGIC = re.compile(r"get_ipython\(\)\.run_line_magic\('(\w+)', '(.*)'\)")


class _Kinds(dict[str, int]):
    """By a file's name; looked at once each."""

    def __missing__(self, name: str) -> int:
        if len(self) > 4096:  # each cell is a file of its own
            self.clear()
        kind = self[name] = _kind_of(name)
        return kind


def _kind_of(name: str) -> int:
    if name.startswith("<"):
        return USER if _TYPED.match(name) else LIBRARY
    path = os.path.abspath(name)
    if path.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in path:
        return next((k for end, k in _SPECIAL.items() if path.endswith(os.sep + end)), LIBRARY)
    return USER


kinds = _Kinds()


def library(name: str) -> str:
    """The installed module that a file is, such as ``torch.optim.lbfgs``; nothing for others."""
    _, _, inside = name.rpartition(f"{os.sep}site-packages{os.sep}")
    if name.startswith(_TORCH):
        inside = os.path.join("torch", name[len(_TORCH) :])
    if inside == name or inside.startswith(_METHODS) or inside.endswith(tuple(_SPECIAL)):
        return ""
    return inside.removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")


def is_ours(code: CodeType) -> bool:
    """Whether code belongs to gpumagic itself."""
    return code.co_filename.startswith(_OURS)


def locate(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """The innermost frame of the user's at or above `frame`, and how it got to `frame`."""
    how, first = LIBRARY, frame
    while frame is not None:
        kind = kinds[frame.f_code.co_filename]
        if kind:
            if kind == USER:
                return frame, how
            if kind > how and (kind != ENGINE or frame is first):
                how = kind
        frame = frame.f_back
    return None, how


def of_thread(ident: int | None) -> FrameType | None:
    """The user's frame that another thread is in now."""
    return None if ident is None else locate(sys._current_frames().get(ident))[0]


def line_of(code: CodeType, at: int) -> int:
    """The line of the instruction at `at`."""
    if hasattr(code, "co_positions"):
        line = next(islice(code.co_positions(), at // 2, None), (None,))[0]
        return line or code.co_firstlineno
    line = code.co_firstlineno
    for start, end, number in code.co_lines():
        if start <= at < end and number is not None:
            line = number
    return line


def source(code: CodeType, line: int) -> str:
    """A line of the file of some code, as the user typed it."""
    return _MAGIC.sub(r"%\1 \2", linecache.getline(code.co_filename, line).strip())


@lru_cache(maxsize=1024)
def expression(code: CodeType, at: int) -> str:
    """The source of the expression that the instruction at `at` computes, in one line.

    The whole line where Python does not know columns (3.10); empty where there is no source.
    """
    line = line_of(code, at)
    whole = linecache.getline(code.co_filename, line).strip()
    if not hasattr(code, "co_positions"):
        return whole
    first, last, start, end = next(islice(code.co_positions(), at // 2, None))
    if first is None or last is None or start is None or end is None:
        return whole
    # Columns count bytes of UTF-8.
    before = linecache.getline(code.co_filename, first).encode()[:start].strip()
    if before.endswith(b"."):  # of a call over several lines, Python notes where its method stands
        first, start = _beginning(code.co_filename, last, end) or (first, start)
    rows = [
        linecache.getline(code.co_filename, n).rstrip("\n").encode() for n in range(first, last + 1)
    ]
    if not all(rows):
        return whole
    rows[-1] = rows[-1][:end]
    rows[0] = rows[0][start:]
    text = " ".join(row.decode(errors="replace").strip() for row in rows)
    return _MAGIC.sub(r"%\1 \2", text.replace(" .", ".") or whole)


def _beginning(file: str, line: int, column: int) -> tuple[int, int] | None:
    """Where the call that ends at a line and column begins."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == (line, column):
            return node.lineno, node.col_offset
    return None


def called(code: CodeType, at: int) -> str:
    """The name of the function or method that the instruction at `at` calls, or nothing."""
    try:
        tree = ast.parse(textwrap.dedent(expression(code, at)).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    if isinstance(tree, ast.Await):
        tree = tree.value
    function = tree.func if isinstance(tree, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


_INPUT = re.compile(r"<(?:ipython|python)-input-(\d+)")


def file_name(name: str) -> str:
    """A file as the user knows it: ``In [3]`` for a cell, else its last part."""
    if match := _INPUT.match(name):
        return f"In [{match[1]}]"
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", None) or {}
    number = numbers.get(name)
    return f"In [{number}]" if number is not None else os.path.basename(name)
