"""The user's line that is running: innermost, whatever library it called."""

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass, replace
from types import FrameType

import torch

_LONG = 60  # characters of a line that are shown
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = (
    *(sysconfig.get_path(p) for p in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(torch.__file__).rsplit("torch", 1)[0],
    _OURS,
    # What has no file: generated code, and modules that are part of Python.
    *("<frozen", "<string>", "<__array_function__", "<attrs", "<built-in", "None", "built-in"),
)


@dataclass(frozen=True)
class Place:
    """A line of the user's code.

    Attributes
    ----------
    line : int
        In its own cell or file, from 1; 0 for what comes before the cell's first line.
    source : str
        The line's text, or nothing.
    function : str
        The function that it is in; nothing at the top of a cell.
    file : str
        Of the code, as Python has it.
    """

    line: int
    source: str = ""
    function: str = ""
    file: str = ""

    def at(self, line: int) -> "Place":
        """Another line of the same code."""
        return replace(self, line=line, source=linecache.getline(self.file, line).strip())

    def __str__(self) -> str:
        if self.line == 0:
            return "before the cell"
        inside = f" of {self.function}()" if self.function else ""
        source = self.source if len(self.source) <= _LONG else self.source[:_LONG] + "…"
        return f"line {self.line}{inside}" + (f": {source}" if source else "")


BEFORE = Place(0, "before the cell")


def is_users(file: str) -> bool:
    """Whether code of this file is the user's: a cell or a file that is no installed library."""
    verdict = _verdicts.get(file)
    if verdict is None:
        verdict = _verdicts[file] = not file.startswith(_LIBRARIES)
    return verdict


_verdicts: dict[str, bool] = {}


def place(frame: FrameType | None = None) -> Place | None:
    """The innermost line of the user's, from `frame` outwards."""
    here: FrameType | None = frame or sys._getframe(1)
    while here is not None:
        code = here.f_code
        if is_users(code.co_filename):
            line = here.f_lineno or 0
            source = linecache.getline(code.co_filename, line).strip()
            name = "" if code.co_name.startswith("<") else code.co_name
            return Place(line, source, name, code.co_filename)
        here = here.f_back
    return None
