"""Find the line of the user's code that is running, and the expression there.

The result is plain data, which keeps no frame and so no tensor alive.
"""

import ast
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from types import CodeType, FrameType, SimpleNamespace, TracebackType
from typing import Any

from executing import Source

from gpumagic.usercode.files import is_users, label, last_cell, shell

_LONG = 60  # characters of a line that are shown
# The names of the code that `%%time` and `%%timeit` run.
_TIMED = ("<timed ", "<magic-timeit")
_TIMING = ("time", "timeit")
# What IPython makes of `%timeit x.sum()`.
_MAGIC = re.compile(r"get_ipython\(\)\.run_line_magic\('(\w+)', '(.*)'\)")


@dataclass(frozen=True)
class UserLine:
    """A line of the user's code."""

    line: int  # in its own cell or file, from 1; 0 for what comes before the cell's first line
    source: str = ""  # as the user typed it
    function: str = ""  # that it is in; nothing at the top of a cell
    file: str = ""  # of the code, as Python has it

    @property
    def label(self) -> str:
        """The file as the user knows it: ``"In [3]"``, ``"train.py"``."""
        return label(self.file)

    @property
    def place(self) -> str:
        """``"line 4"`` of the cell that runs or ran last, ``"In [5], line 19"`` of other code."""
        line = f"line {self.line}"
        return line if self.label in ("", last_cell()) else f"{self.label}, {line}"

    def at(self, line: int) -> "UserLine":
        """Another line of the same code."""
        return replace(self, line=line, source=source_of(self.file, line))

    def __str__(self) -> str:
        if self.line == 0:
            return "before the cell"
        inside = f" of {self.function}()" if self.function else ""
        source = self.source if len(self.source) <= _LONG else self.source[:_LONG] + "…"
        return f"line {self.line}{inside}" + (f": {source}" if source else "")


BEFORE = UserLine(0, "before the cell")


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's at or above `frame`."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def innermost(frame: FrameType | None = None) -> UserLine | None:
    """The innermost line of the user's at or above `frame`, by default the caller's."""
    found = user_frame(frame or sys._getframe(1))
    return None if found is None else line_at(*in_cell(found))


def innermost_of(traceback: TracebackType | None) -> UserLine | None:
    """The innermost line of the user's that an error passed."""
    found = None
    while traceback is not None:
        if is_users(traceback.tb_frame.f_code.co_filename):
            found = traceback
        traceback = traceback.tb_next
    return None if found is None else line_at(*in_cell(found.tb_frame, found.tb_lasti))


def in_cell(frame: FrameType, at: int | None = None) -> tuple[CodeType, int]:
    """The code of a frame and its instruction; of what `%%time` runs, as it stands in the cell."""
    code, at = frame.f_code, frame.f_lasti if at is None else at
    if not code.co_filename.startswith(_TIMED):
        return code, at
    body, outer = "", frame.f_back
    while outer is not None:
        name = outer.f_code.co_filename
        if outer.f_code.co_name in _TIMING and not is_users(name):
            body = outer.f_locals.get("cell") or ""
        elif is_users(name) and not name.startswith(_TIMED):
            break
        outer = outer.f_back
    if outer is None:
        return code, at
    if not body:  # `%time` of one line
        return outer.f_code, outer.f_lasti
    name, before = outer.f_code.co_filename, _lines_before(body)
    known = linecache.getlines(name)
    if len(known) <= before:
        # What IPython made of the cell is one line: behind it there is room for those typed.
        known += ["\n"] * (before - len(known)) + [f"{line}\n" for line in body.splitlines()]
    code = code.replace(co_filename=name, co_firstlineno=code.co_firstlineno + before)
    return code, at


def _lines_before(body: str) -> int:
    """How many lines of the running cell stand above the text of its magic, which is its end."""
    ipython = shell()
    typed = ipython.history_manager.input_hist_raw[-1] if ipython is not None else ""
    above: str = typed[: -len(body.strip())] if typed.strip().endswith(body.strip()) else "\n"
    return above.count("\n")


def line_at(code: CodeType, at: int) -> UserLine:
    """The line of the instruction at `at` of the user's code."""
    line, file = line_of(code, at), code.co_filename
    function = "" if code.co_name.startswith("<") else code.co_name
    return UserLine(line, source_of(file, line), function, file)


def line_of(code: CodeType, at: int) -> int:
    """The number of the line of the instruction at `at`."""
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line)
    return next(lines, code.co_firstlineno)


def source_of(file: str, line: int) -> str:
    """A line of a file, as the user typed it."""
    return _MAGIC.sub(r"%\1 \2", linecache.getline(file, line).strip())


@lru_cache(maxsize=1024)
def expression(code: CodeType, at: int) -> str:
    """The expression that an instruction computes, in one line; else its whole line, or nothing."""
    line = line_of(code, at)
    # A frame would keep all that the code sees alive; of a frame, these are what is looked at.
    frame: Any = SimpleNamespace(f_code=code, f_lasti=at, f_lineno=line, f_globals={})
    found = Source.executing(frame)
    text = ast.get_source_segment(found.source.text, found.node) if found.node else None
    # For a jump, such as that of an `if`, executing finds nothing.
    if not (text := text or _columns(code, at)):
        return source_of(code.co_filename, line)
    text = " ".join(row.strip() for row in text.splitlines())
    return _MAGIC.sub(r"%\1 \2", text.replace(" .", "."))


def name_in(frame: FrameType, is_it: Callable[[Any], bool]) -> str:
    """The variable in the expression that a frame computes whose value is the one, or nothing."""
    names: list[str] = re.findall(r"(?<![.\w])[^\W\d]\w*", expression(*in_cell(frame)))
    values = ((name, frame.f_locals.get(name, frame.f_globals.get(name))) for name in names)
    return next((name for name, value in values if is_it(value)), "")


def called(code: CodeType, at: int) -> str:
    """The name of the function or method that the instruction at `at` calls, or nothing."""
    text = expression(code, at) if is_users(code.co_filename) else _columns(code, at)
    try:
        tree = ast.parse(textwrap.dedent(text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    if isinstance(tree, ast.Await):
        tree = tree.value
    function = tree.func if isinstance(tree, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _columns(code: CodeType, at: int) -> str:
    """What stands between the columns of an instruction; no file is parsed for it."""
    if not hasattr(code, "co_positions"):
        return ""
    first, last, start, end = next(islice(code.co_positions(), at // 2, None), (None,) * 4)
    if first is None or last is None:
        return ""
    # Columns count bytes of UTF-8.
    rows = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    rows[-1] = rows[-1][:end]
    rows[0] = rows[0][start:]
    return b" ".join(row.strip() for row in rows).decode(errors="replace")
