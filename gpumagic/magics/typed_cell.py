"""Hand a cell's text to code that runs it elsewhere, on copies: to time it, or to fit it.

Lines and tracebacks are those of the cell; Ctrl-C keeps what is known by then.
"""

from __future__ import annotations

import ast
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from gpumagic.display.progress_line import ProgressLine
from gpumagic.errors import GpuError, show_as

# Magics that say where code runs, as IPython has made Python of them.
_ELSEWHERE = re.compile(r"get_ipython\(\)\.run_(line|cell)_magic\('(ongpu|gputime|gpufit)'")
# The engine's name for a file of text that came from none, such as a set-up.
_TEXT = "<timed "


def compiled_name(shell: Any, text: str, magic: str, setup: str = "") -> tuple[str, str]:
    """The code of a cell's text below the line `magic`, if any, and the name of its file."""
    code, raw = shell.transform_cell(text), text
    _check(code, text, magic, setup)
    shown = code
    if magic:
        # A line more above, so that the numbers are those of the cell. For tracebacks it is a
        # statement: they take a file to begin where its first one does.
        code, raw, shown = f"\n{code}", f"{magic}\n{text}", f"{magic!r}\n{code}"
    running = getattr(shell.displayhook, "exec_result", None)
    count = getattr(running, "execution_count", None) or shell.execution_count
    return code, shell.compile.cache(shown, count, raw_code=raw)


@contextmanager
def progressing(shell: Any, asked: Any, name: str) -> Iterator[ProgressLine]:
    """A progress line for work within; an error's traceback begins in the cell's own code."""
    line = ProgressLine(shell, silent=asked.quiet)
    try:
        yield line
    except BaseException as error:
        line.close()
        if not isinstance(error, GpuError):
            _begin_at(shell, error, name)
        raise


def give(shell: Any, asked: Namespace, line: ProgressLine, made: Any) -> None:
    """Bind and show a result as the line asks; after Ctrl-C raise that, with what is known."""
    if asked.output:
        shell.user_ns[asked.output] = made
    line.close(None if asked.quiet else made)
    if made.interrupted:
        where = "shown above" if not asked.quiet else asked.output and f"in {asked.output}"
        told = [f"what was finished is {where}"] if where else []
        stopped = KeyboardInterrupt(*told)
        show_as(stopped, lambda: [": ".join(["KeyboardInterrupt", *told])])
        raise stopped


def _check(code: str, text: str, magic: str, setup: str) -> None:
    """Refuse what cannot be run elsewhere, in one line."""
    if text.lstrip().startswith("%%ongpu"):
        raise GpuError("the cell says %%ongpu too; leave that line out")
    # The magic's own line is above, so that the numbers are those of the cell.
    _check_code(f"\n{code}" if magic else code, text.count("\n") + bool(magic))
    _check_code(setup, 1, "--setup: ")
    if not ast.parse(code).body:
        raise GpuError("there is no code; put what to time below the line, or after --")
    if found := _ELSEWHERE.search(code):
        line = f"{'%' * (1 + (found[1] == 'cell'))}{found[2]}"
        raise GpuError(f"the cell says {line} too; leave that line out")


def _check_code(code: str, lines: int, what: str = "") -> None:
    """Refuse what is no Python in one line, which has the number of several `lines`."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # An `await` is refused later, in better words.
            compile(code, "<cell>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except SyntaxError as error:
        at = f"line {error.lineno}: " if lines > 1 and error.lineno else ""
        text = (error.text or "").strip()
        raise GpuError(f"{what}{at}{error.msg}{f': {text}' if text else ''}") from None
    except ValueError as error:  # a null byte, before Python 3.12
        raise GpuError(f"{what}{error}") from None


def _begin_at(shell: Any, error: BaseException, name: str) -> None:
    """Have the traceback begin at the user's own line, in file `name`, as a plain cell's does."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file == name or file.startswith(_TEXT):
            break
        trace = trace.tb_next
    if trace is not None:
        begin, show = trace, shell.InteractiveTB.structured_traceback
        show_as(error, lambda: list(show(type(error), error, begin, tb_offset=0)))
    elif type(error).__name__ == "OutOfMemoryError":  # while the inputs were copied
        notes = getattr(error, "__notes__", [])
        show_as(error, lambda: ["\n".join([f"{type(error).__name__}: {error}", *notes])])
