"""Show of an error in the notebook the user's own lines, and none of ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from gpumagic.errors import GpuError
from gpumagic.usercode.compile import check

# The engine's name for a file of text that came from none, such as a set-up.
_TEXT = "<timed "


def check_code(code: str, lines: int, what: str = "") -> None:
    """Refuse code that is none, or no Python, in one line: GpuError.

    A SyntaxError would be shown with all of the calls that led to it. Of several `lines` that of
    the error is told; `what` is what it is: `"--setup: "`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # An `await` is refused later, in better words.
            check(code, "<cell>")
    except SyntaxError as error:
        at = f"line {error.lineno}: " if lines > 1 and error.lineno else ""
        text = (error.text or "").strip()
        raise GpuError(f"{what}{at}{error.msg}{f': {text}' if text else ''}") from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise GpuError(f"{what}{error}") from None


def begin_at(shell: Any, error: BaseException, name: str) -> None:
    """Have the traceback begin at the user's own line, in file `name`, as a plain cell's does."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file == name or file.startswith(_TEXT):
            break
        trace = trace.tb_next
    if trace is not None:
        begin, show = trace, shell.InteractiveTB.structured_traceback
        render(error, lambda: list(show(type(error), error, begin, tb_offset=0)))
    elif type(error).__name__ == "OutOfMemoryError":  # while the inputs were copied
        notes = getattr(error, "__notes__", [])
        render(error, lambda: ["\n".join([f"{type(error).__name__}: {error}", *notes])])


def render(error: BaseException, lines: Callable[[], list[str]]) -> None:
    """Have the notebook show an error as these lines."""
    # IPython asks an exception for its own rendering. One that has slots is shown as it is.
    with suppress(AttributeError):
        error._render_traceback_ = lines  # type: ignore[attr-defined]
