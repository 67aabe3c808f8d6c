"""Dry-run a notebook's cell for `%%ongpu … --dry-run`.

IPython's magics and commands are left out and named; a cell that awaits gets its own event loop.
"""

import ast
import asyncio
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType
from typing import Any

from IPython.core.compilerop import PyCF_MASK

from gpumagic.display.progress_line import ProgressLine
from gpumagic.dryrun.fakes import NotKnown, Stopped
from gpumagic.dryrun.follow_code import Subject, dry
from gpumagic.dryrun.held_memory import target_of
from gpumagic.dryrun.result import LIMIT_S, DryRun
from gpumagic.errors import show_as
from gpumagic.usercode.program import compile_cell
from gpumagic.usercode.variables import names_read, variables_read

Note = Callable[[str], object]
_ENDED = "KeyboardInterrupt: the dry run was ended; nothing of yours has changed"
# Magics whose text runs here too, once; the others are left out.
_PYTHON = {"time", "timeit", "capture", "prun"}


def dry_run_cell(shell: Any, tree: Any, file: str, on: object, *, move: bool = True) -> DryRun:
    """Predict what the rest of a running cell would do, on a device or where it is."""
    line = ProgressLine(shell)
    namespace, flags = shell.user_ns, shell.compile.flags & PyCF_MASK
    names = names_read(tree, shell.transform_cell)
    if "torch._dynamo" not in sys.modules:
        line.update("dry run: the first one loads more of torch, which takes some seconds")

    def prepare(note: Note) -> Callable[[], dict[str, Any]]:
        execute = leave_out_magics(namespace, note, file, shell.transform_cell, flags)
        return lambda: {"Out": execute(tree)}

    reads = list(variables_read(names, namespace))
    try:
        device, cards = target_of(on)
        subject = Subject(namespace, reads, prepare, device, move, LIMIT_S, cards)
        return dry(
            subject, lambda seconds: line.update(f"dry run: {seconds:.0f} s; Ctrl-C ends it")
        )
    except KeyboardInterrupt as error:
        # A traceback would be of ours alone: the cell's own frames are in the copy that was ended.
        show_as(error, lambda: [_ENDED])
        raise
    finally:
        line.close()


def leave_out_magics(
    namespace: dict[str, Any],
    note: Note,
    file: str,
    transform: Callable[[str], str],
    flags: int = 0,
) -> Callable[[ast.Module], Any]:
    """Make `get_ipython()` only name magics, in a forked child; return a runner of statements."""

    def execute(part: ast.Module) -> Any:
        return _execute(compile_cell(part, file, flags), namespace)

    stand_in = _DryShell(note, file, transform, execute)
    namespace["get_ipython"] = lambda: stand_in
    return execute


def _execute(codes: Iterable[CodeType | None], namespace: dict[str, Any]) -> Any:
    """Run the statements of a cell, and give the value of its last expression."""
    value = None
    for code in filter(None, codes):
        value = eval(code, namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            value = asyncio.new_event_loop().run_until_complete(value)
    return value


@dataclass(frozen=True)
class _DryShell:
    """Replace `get_ipython()` in a dry run: magics and commands are named and left out."""

    _note: Note
    _file: str
    _transform: Callable[[str], str]
    _execute: Callable[..., Any]

    def run_line_magic(self, name: str, line: str = "", _stack_depth: int = 1) -> Any:
        if name in _PYTHON and line.strip():
            return self._python(name, line, sys._getframe(1).f_lineno - 1)
        return self._left_out(f"%{name}")

    def run_cell_magic(self, name: str, line: str, cell: str) -> Any:
        if name in _PYTHON:
            number = sys._getframe(1).f_lineno
            # On the line of our own magic, it was a line below.
            below = "%%ongpu" in linecache.getline(self._file, number)
            return self._python(name, cell, number + below)
        return self._left_out(f"%%{name}")

    def system(self, command: str) -> None:
        self._left_out(f"!{command}")

    def getoutput(self, command: str, **options: Any) -> Any:
        return self._left_out(f"!{command}")

    def __getattr__(self, name: str) -> Any:
        raise Stopped(f"get_ipython().{name} is not there in a dry run")

    def _left_out(self, what: str) -> Any:
        self._note(f"{what} was left out")
        return NotKnown(f"what {what} gives")

    def _python(self, name: str, text: str, above: int) -> Any:
        if name != "time":
            self._note(f"%{name} was left out; its code was followed once")
        # Blank lines above it, so that its lines have the cell's numbers.
        code = "\n" * max(above, 0) + self._transform(text)
        try:
            tree = ast.parse(code)
        except SyntaxError:
            return self._left_out(f"%{name} {text.strip()}")
        return self._execute(tree)
