"""Find the user's frame that led to an operator, by which way, and whether a device was named.

`locate(frame)` is asked at each copy or wait, so files are looked at once each.
"""

import dis
import os
import sys
from types import CodeType, FrameType

from gpumagic.usercode.files import is_ours, is_users
from gpumagic.usercode.lines import called

IN_FRONT, LIBRARY, USER, PRINT, LOADER, DISPLAY, ENGINE, FIX = range(-1, 7)
"""What a frame is: of what stands in front of torch's own; of a library; of the user; or one that
says how the user got there: by printing, by a `DataLoader` whose batches a placement brings, by the
notebook's display of a value, by autograd's engine; by `--fix`."""

WORDS = {PRINT: "print", LOADER: "loader", DISPLAY: "display", ENGINE: "backward", FIX: "fix"}
_SPECIAL = {
    os.path.join("torch", "_ops.py"): IN_FRONT,  # how we call the next kernel
    os.path.join("torch", "_tensor_str.py"): PRINT,
    os.path.join("torch", "autograd", "graph.py"): ENGINE,
    os.path.join("torch", "autograd", "__init__.py"): ENGINE,
    os.path.join("gpumagic", "placement", "dataloader.py"): LOADER,
    os.path.join("gpumagic", "cell", "autofix.py"): FIX,
    os.path.join("IPython", "core", "displayhook.py"): DISPLAY,
    os.path.join("IPython", "core", "formatters.py"): DISPLAY,
}

# Expressions that are no call: a subscript, an operator, a comparison.
_NO_CALL = ("BINARY_", "INPLACE_", "COMPARE_", "STORE_SUBSCR", "STORE_SLICE", "UNARY_", "CONTAINS_")
_READING = {
    *("__contains__", "__getitem__", "__setitem__", "getitem", "setitem", "index_put"),
    *("index_put_", "bool", "float", "int", "str", "format", "item", "print", "repr", "tolist"),
}


class _Kinds(dict[str, int]):
    """By a file's name."""

    def __missing__(self, file: str) -> int:
        if len(self) > 4096:  # each cell is a file of its own
            self.clear()
        kind = USER
        if not is_users(file):
            ends = (k for end, k in _SPECIAL.items() if file.endswith(os.sep + end))
            kind = next(ends, IN_FRONT if is_ours(file) else LIBRARY)
        self[file] = kind
        return kind


kinds = _Kinds()


def locate(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """The innermost frame of the user's at or above `frame`, and how it got to `frame`."""
    how, first = LIBRARY, frame
    while frame is not None:
        kind = kinds[frame.f_code.co_filename]
        if kind > LIBRARY:
            if kind == USER:
                return frame, how
            if kind > how and (kind != ENGINE or frame is first):
                how = kind
        frame = frame.f_back
    return None, how


def of_thread(ident: int | None) -> FrameType | None:
    """The user's frame that another thread is in now."""
    return None if ident is None else locate(sys._current_frames().get(ident))[0]


def is_implicit(operator: str, how: int, code: CodeType | None, at: int) -> bool:
    """Whether the innermost Python code called an operator without a device being named.

    Where it cannot be told, a copy counts as explicit: torch makes few others by itself.
    """
    if operator == "synchronize" or how in (LOADER, ENGINE, FIX):
        return False
    if operator != "copy_" or how >= PRINT:
        return True
    if code is None:  # a thread of autograd's, where no Python runs
        return False
    return opcode(code, at).startswith(_NO_CALL) or called(code, at) in _READING


def opcode(code: CodeType | None, at: int) -> str:
    """The name of the instruction at `at`; empty if there is none."""
    return dis.opname[code.co_code[at]] if code and 0 <= at < len(code.co_code) else ""
