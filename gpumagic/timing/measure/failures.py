"""Tell of what code raised while it was timed: at which line, and whether memory was short."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Mapping
from typing import Any

import torch

_NO_ROOM = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short: that of a GPU, by torch's own class, or the host's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The host's allocator raises a plain RuntimeError.
    text = str(error)
    return "DefaultCPUAllocator" in text and any(words in text for words in _NO_ROOM)


def line_of(error: BaseException, filename: str) -> int | None:
    """The line of the user's own code that the error came through last."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == filename]
    return lines[-1] if lines else None


def short(error: BaseException, filename: str) -> str:
    """``"ValueError at line 3: shapes differ"``."""
    line = line_of(error, filename)
    text = str(error).strip().partition("\n")[0]
    at = "" if line is None else f" at line {line}"
    return f"{type(error).__name__}{at}{f': {text}' if text else ''}"


def say_where(error: BaseException, filename: str, where: str, values: Mapping[str, Any]) -> None:
    """Have the error's traceback say which device it was on, and at which line and value."""
    at = "".join(f", {name} = {value!r}" for name, value in values.items())
    line = line_of(error, filename)
    note = f"timed on {where}{at}" + ("" if line is None else f", line {line}")
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10
        print(f"{type(error).__name__}: {note}", file=sys.stderr)
