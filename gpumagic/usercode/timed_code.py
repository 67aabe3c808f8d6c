"""Find the cell's own lines of code that `%%time` or `%%timeit` runs under names of its own."""

import linecache
import sys
from types import CodeType, FrameType
from typing import Any

from gpumagic.usercode.files import is_users

_NAMES = ("<timed ", "<magic-timeit")
_MAGICS = ("time", "timeit")


def in_cell(frame: FrameType, at: int | None = None) -> tuple[CodeType, int]:
    """The code of a frame and its instruction; of one that such a magic runs, as in the cell."""
    code, at = frame.f_code, frame.f_lasti if at is None else at
    if not code.co_filename.startswith(_NAMES):
        return code, at
    body, outer = "", frame.f_back
    while outer is not None:
        name = outer.f_code.co_filename
        if outer.f_code.co_name in _MAGICS and not is_users(name):
            body = outer.f_locals.get("cell") or ""
        elif is_users(name) and not name.startswith(_NAMES):
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
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    typed = shell.history_manager.input_hist_raw[-1] if shell is not None else ""
    above: str = typed[: -len(body.strip())] if typed.strip().endswith(body.strip()) else "\n"
    return above.count("\n")
