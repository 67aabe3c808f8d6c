"""Find the user's files and lines, and remove gpumagic's frames from tracebacks.

Libraries are files under ``site-packages`` or ``dist-packages``, Python's own library, torch,
gpumagic, and files that a library generates. Cells, input at a prompt, scripts and editable
installs are the user's. A `UserLine` is plain data that keeps no frame or tensor alive.
"""

import ast
import functools
import linecache
import os
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from types import CodeType, FrameType, ModuleType, SimpleNamespace, TracebackType
from typing import Any, ParamSpec, TypeVar


def shell() -> Any:
    """Return this process's IPython shell, or None; does not import IPython."""
    # While another thread imports IPython, the module has no `get_ipython` yet.
    return getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()


def user_namespace() -> dict[str, Any]:
    """Return the variables of the notebook, or of the script."""
    ipython = shell()
    return vars(sys.modules["__main__"]) if ipython is None else ipython.user_ns


_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PACKAGES = ("checked", "frameworks", "ledger", "memory", "placement", "profiling", "virtual")
_STAND_INS = (  # files with functions that replace torch's or Python's
    *(os.path.join(_OURS, package, "") for package in _PACKAGES),
    os.path.join(_OURS, "cluster", "output.py"),
    os.path.join(_OURS, "usercode", "files.py"),
)

# torch's folder, found without importing torch. Without torch, `os.devnull` matches no file.
_place = getattr(find_spec("torch"), "origin", None)
_TORCH = os.path.join(os.path.dirname(os.path.abspath(_place)), "") if _place else os.devnull
_NAMED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_LIBRARIES = (
    _OURS,
    _TORCH,  # a torch built from source is not in site-packages
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
    os.path.join(os.path.dirname(os.__file__), ""),
)
_TYPED = re.compile(  # names of code that the user typed, such as `<stdin>`
    r"<(ipython-input|python-input|input|stdin|doctest |timed |magic-timeit|command-|pyshell#)"
)
_CYTHON = (".pyx", ".pxd", ".pxi")
_INPUT = re.compile(r"<(?:ipython|python)-input-(\d+)")


@lru_cache(maxsize=8192)  # bounded, because each cell adds a name
def is_users(file: str | None) -> bool:
    """Whether a file is the user's: a cell, or a file outside installed libraries."""
    if file is None or file in ("", "built-in", "frozen", "namespace"):
        return False
    if file.startswith("<"):
        return _TYPED.match(file) is not None
    if _NAMED.search(file) or (file.endswith(_CYTHON) and not os.path.isabs(file)):
        return False
    # First test the path as given, because making it absolute is slow.
    if file.startswith(_LIBRARIES) or os.path.abspath(file).startswith(_LIBRARIES):
        return False
    return not (os.path.isfile(file) and _is_generated(file))


def _is_generated(file: str) -> bool:
    """Whether a library generated a file: the file is a loaded module of an installed package."""
    modules = [(name, vars(m)) for name, m in [*sys.modules.items()] if type(m) is ModuleType]
    name = next((name for name, held in modules if held.get("__file__") == file), "")
    package = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    return package is not None and package != file and not is_users(package)


def is_ours(file: str) -> bool:
    """Whether a file belongs to gpumagic itself."""
    return file.startswith(_OURS)


def stands_in(file: str) -> bool:
    """Whether a file has functions that replace functions of torch or Python."""
    return file.startswith(_STAND_INS)


def is_torchs(file: str) -> bool:
    return file.startswith(_TORCH)


def module_of(file: str) -> str:
    """Return the module of a package's file, such as ``torch.optim.lbfgs``, or empty."""
    if is_torchs(file):
        inside = os.path.join("torch", file[len(_TORCH) :])
    elif found := list(_NAMED.finditer(file)):
        inside = file[found[-1].end() :]
    else:
        return ""
    return inside.removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")


def label(file: str) -> str:
    """Return the display name of a file: ``"In [3]"`` for a cell, else ``"train.py"``."""
    if match := _INPUT.match(file):
        return f"In [{match[1]}]"
    named = getattr(getattr(shell(), "compile", None), "format_code_name", lambda file: None)(file)
    if named is not None and (number := re.search(r"\d+", named[1])):
        return f"In [{number[0]}]"
    return os.path.basename(file)


def last_cell() -> str:
    """Return the name of the running or last cell: ``"In [3]"``; ``"In [0]"`` without IPython."""
    return f"In [{_typed() - 1}]"


def next_cell() -> str:
    """Return the name of the next cell: ``"In [4]"``."""
    return f"In [{_typed()}]"


def _typed() -> int:
    # Count the history, because IPython versions differ in when `execution_count` changes.
    return len(getattr(getattr(shell(), "history_manager", None), "input_hist_raw", [""]))


_LONG = 60  # maximum length of a displayed line
_TIMED = ("<timed ", "<magic-timeit")  # names of the code that `%%time` and `%%timeit` run
_TIMING = ("time", "timeit")  # names of IPython's functions that run code named in `_TIMED`
# Matches IPython's translation of a line magic, such as `%timeit x.sum()`.
_MAGIC = re.compile(r"""get_ipython\(\)\.run_line_magic\('(\w+)', (['"])(.*)\2\)""")


@dataclass(frozen=True)
class UserLine:
    """A line of the user's code."""

    line: int  # number in its cell or file, from 1; 0 for `BEFORE`
    source: str = ""  # as the user typed it
    function: str = ""  # the function's name; empty for code outside functions
    file: str = ""  # the file name of its code object

    @property
    def label(self) -> str:
        """The display name of the file: ``"In [3]"``, ``"train.py"``."""
        return label(self.file)

    @property
    def place(self) -> str:
        """``"line 19"`` in the running or last cell; elsewhere ``"In [5], line 19"``."""
        line = f"line {self.line}"
        return line if self.label in ("", last_cell()) else f"{self.label}, {line}"

    def __str__(self) -> str:
        if self.line == 0:
            return "before the cell"
        inside = f" of {self.function}()" if self.function else ""
        source = self.source if len(self.source) <= _LONG else self.source[:_LONG] + "…"
        return f"line {self.line}{inside}" + (f": {source}" if source else "")


BEFORE = UserLine(0, "before the cell")


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the user's innermost frame among `frame` and its callers."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def innermost(frame: FrameType | None = None) -> UserLine | None:
    """Return the user's innermost line in `frame` (by default, the caller's) and its callers."""
    found = user_frame(frame or sys._getframe(1))
    return None if found is None else line_at(*in_cell(found))


def innermost_of(traceback: TracebackType | None) -> UserLine | None:
    """Return the user's innermost line in an error's traceback."""
    found = None
    while traceback is not None:
        if is_users(traceback.tb_frame.f_code.co_filename):
            found = traceback
        traceback = traceback.tb_next
    return None if found is None else line_at(*in_cell(found.tb_frame, found.tb_lasti))


def in_cell(frame: FrameType, at: int | None = None) -> tuple[CodeType, int]:
    """Return a frame's code and instruction. For `%%time`, the code has the cell's line numbers."""
    code, at = frame.f_code, frame.f_lasti if at is None else at
    if not code.co_filename.startswith(_TIMED):
        return code, at
    body, line, outer = _timed_in(frame)
    if outer is None:
        return code, at
    name, ipython = outer.f_code.co_filename, shell()
    if not body and not (line and ipython):
        return outer.f_code, outer.f_lasti
    if not body:  # `%time` of one line: add blank lines above, for the right line number
        above = outer.f_lineno - 1
        count = getattr(ipython.compile, "_filename_map", {}).get(name, 0)
        name = ipython.compile.cache("\n" * above + line, count)
        return code.replace(co_filename=name, co_firstlineno=code.co_firstlineno + above), at
    typed = ipython.history_manager.input_hist_raw[-1] if ipython is not None else ""
    before = max(typed.rstrip().count("\n") - body.rstrip().count("\n"), 1)
    known = linecache.getlines(name)
    if len(known) <= before:
        # IPython stores the cell as one line. Tracebacks need the typed lines too.
        known += ["\n"] * (before - len(known)) + [f"{line}\n" for line in body.splitlines()]
    return code.replace(co_filename=name, co_firstlineno=code.co_firstlineno + before), at


def _timed_in(frame: FrameType) -> tuple[str, str, FrameType | None]:
    """Return the timed cell's text, the timed line's text, and the user's frame around them."""
    body, line, outer = "", "", frame.f_back
    while outer is not None:
        name = outer.f_code.co_filename
        if outer.f_code.co_name in _TIMING and not is_users(name):
            body, expr, stmt = (outer.f_locals.get(n) or "" for n in ("cell", "expr", "stmt"))
            line = expr or stmt
        elif is_users(name) and not name.startswith(_TIMED):
            break
        outer = outer.f_back
    return body, line, outer


def line_at(code: CodeType, at: int) -> UserLine:
    """Return the line of the instruction at offset `at`."""
    line, file = line_of(code, at), code.co_filename
    return UserLine(line, source_of(file, line), function_of(code), file)


def function_of(code: CodeType) -> str:
    """Return the name of a code object's function; empty for code outside functions."""
    names = getattr(code, "co_qualname", code.co_name).split(".")  # from Python 3.11 on
    return next((name for name in reversed(names) if not name.startswith("<")), "")


def line_of(code: CodeType, at: int) -> int:
    lines = (line for start, end, line in code.co_lines() if start <= at < end and line)
    return next(lines, code.co_firstlineno)


def source_of(file: str, line: int) -> str:
    """Return a line of a file, as typed."""
    return _MAGIC.sub(r"%\1 \3", linecache.getline(file, line).strip())


@lru_cache(maxsize=1024)
def expression(code: CodeType, at: int) -> str:
    """Return an instruction's expression in one line; if unknown, the source line."""
    found = executing(code, at)
    text = ast.get_source_segment(found.source.text, found.node) if found.node else None
    # The package `executing` finds no node for a jump, such as the jump of an `if`.
    if not (text := text or _columns(code, at)):
        return source_of(code.co_filename, line_of(code, at))
    text = " ".join(row.strip() for row in text.splitlines())
    return _MAGIC.sub(r"%\1 \3", text.replace(" .", "."))


def executing(code: CodeType, at: int) -> Any:
    """Look up an instruction with the package `executing`. The result's `node` may be None."""
    from executing import Source  # imported here, because it takes 14 ms and few magics need it

    # This object has all attributes the package reads. A real frame would keep variables alive.
    frame: Any = SimpleNamespace(f_code=code, f_lasti=at, f_lineno=line_of(code, at), f_globals={})
    return Source.executing(frame)


def parsed(file: str) -> Any:
    """Return a file's `text` and syntax `tree`, as the package `executing` reads them."""
    from executing import Source

    return Source.for_filename(file)


def name_in(frame: FrameType, test: Callable[[Any], bool]) -> str:
    """Return the first name in a frame's expression whose value passes `test`, or empty."""
    names: list[str] = re.findall(r"(?<![.\w])[^\W\d]\w*", expression(*in_cell(frame)))
    values = ((name, frame.f_locals.get(name, frame.f_globals.get(name))) for name in names)
    return next((name for name, value in values if test(value)), "")


def called(code: CodeType, at: int) -> str:
    """Return the name of the function or method called at offset `at`, or empty."""
    text = expression(code, at) if is_users(code.co_filename) else _columns(code, at)
    try:
        tree = ast.parse(textwrap.dedent(text).strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError):
        return ""
    function = tree.func if isinstance(tree, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _columns(code: CodeType, at: int) -> str:
    """Return the source text at an instruction's line and column numbers, or empty."""
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


P = ParamSpec("P")
R = TypeVar("R")


def swap_attribute(stack: ExitStack, owner: Any, name: str, ours: Any) -> None:
    """Set an attribute; closing `stack` restores it, unless other code has changed the value."""
    real = vars(owner)[name]
    setattr(owner, name, ours)

    @stack.callback
    def put_back() -> None:
        if vars(owner).get(name) is ours:
            setattr(owner, name, real)


def leave_out_ours(error: BaseException) -> None:
    """Remove the frames of gpumagic's replacement functions at the start of a traceback."""
    # Call this before a bare `raise`. From Python 3.11 on, a bare `raise` adds no new frame.
    trace = error.__traceback__
    while trace is not None and stands_in(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if not sys.flags.dev_mode:
        error.__traceback__ = trace


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that gpumagic's frames do not appear in tracebacks."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    return call
