"""Find the user's notebook and files, name them, and keep our frames out of tracebacks.

Files under ``site-packages`` or ``dist-packages``, Python's own library, torch and gpumagic are
libraries, and so are files that a library writes and imports. Cells, input at a prompt, scripts and
editable installs are the user's.

When an error leaves a function, Python adds its frame to the traceback, except after a bare `raise`
from Python 3.11 on. Before, one frame of ours stays, which a notebook leaves out.
"""

import functools
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar


def shell() -> Any:
    """Return this process's IPython shell, or None; does not import IPython."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def user_namespace() -> dict[str, Any]:
    """Return the variables of the notebook, or of the script."""
    ipython = shell()
    return vars(sys.modules["__main__"]) if ipython is None else ipython.user_ns


_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_ROOMS = ("checked", "frameworks", "ledger", "memory", "placement", "profiling", "virtual")
_STAND_INS = (
    *(os.path.join(_OURS, room, "") for room in _ROOMS),
    os.path.join(_OURS, "cluster", "output.py"),
    os.path.join(_OURS, "usercode", "files.py"),
)


def _folder_of(package: str) -> str:
    """Return a package's folder without importing it; the null device if it is not installed."""
    found = find_spec(package)
    place = found.origin if found else None
    return os.path.join(os.path.dirname(os.path.abspath(place)), "") if place else os.devnull


_TORCH = _folder_of("torch")
_NAMED = re.compile(r"[\\/](site|dist)-packages[\\/]")
_LIBRARIES = (
    _OURS,
    _TORCH,  # also a build from source
    *(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")),
    os.path.join(os.path.dirname(os.__file__), ""),
)
# Typed and generated code have no file; these names are of typed code.
_TYPED = re.compile(
    r"<(ipython-input|python-input|input|stdin|doctest |timed |magic-timeit|command-|pyshell#)"
)
_NO_FILE = ("", "built-in", "frozen", "namespace")
_CYTHON = (".pyx", ".pxd", ".pxi")
_INPUT = re.compile(r"<(?:ipython|python)-input-(\d+)")


@lru_cache(maxsize=8192)  # each cell is a file
def is_users(file: str | None) -> bool:
    """Whether a file is the user's: a cell, or a file outside installed libraries."""
    if file is None or file in _NO_FILE:
        return False
    if file.startswith("<"):
        return _TYPED.match(file) is not None
    if _NAMED.search(file) or (file.endswith(_CYTHON) and not os.path.isabs(file)):
        return False
    # First the path as Python has it: making it absolute is the slowest step.
    if file.startswith(_LIBRARIES) or os.path.abspath(file).startswith(_LIBRARIES):
        return False
    return not (os.path.isfile(file) and _is_generated(file))


def _is_generated(file: str) -> bool:
    """Whether a library generated the file: its module's package is installed elsewhere."""
    modules = [(name, vars(m)) for name, m in [*sys.modules.items()] if type(m) is ModuleType]
    name = next((name for name, held in modules if held.get("__file__") == file), "")
    package = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    return package is not None and package != file and not is_users(package)


def is_ours(file: str) -> bool:
    """Whether a file belongs to gpumagic itself."""
    return file.startswith(_OURS)


def stands_in(file: str) -> bool:
    """Whether a file's functions replace torch's or Python's own."""
    return file.startswith(_STAND_INS)


def is_torchs(file: str) -> bool:
    """Whether a file belongs to torch."""
    return file.startswith(_TORCH)


def module_of(file: str) -> str:
    """Return the installed module of a file, as ``torch.optim.lbfgs``; empty for others."""
    if is_torchs(file):
        inside = os.path.join("torch", file[len(_TORCH) :])
    elif found := list(_NAMED.finditer(file)):
        inside = file[found[-1].end() :]
    else:
        return ""
    return inside.removesuffix(".py").removesuffix(f"{os.sep}__init__").replace(os.sep, ".")


def label(file: str) -> str:
    """Return the user's name of a file: ``"In [3]"`` for a cell, ``"train.py"`` for others."""
    if match := _INPUT.match(file):
        return f"In [{match[1]}]"
    named = getattr(getattr(shell(), "compile", None), "format_code_name", lambda file: None)(file)
    if named is not None and (number := re.search(r"\d+", named[1])):
        return f"In [{number[0]}]"
    return os.path.basename(file)


def last_cell() -> str:
    """Return the running or last cell: ``"In [3]"``; empty outside of IPython."""
    return f"In [{_typed() - 1}]"


def next_cell() -> str:
    """Return the next cell of IPython, whose `execution_count` depends on the version."""
    return f"In [{_typed()}]"


def _typed() -> int:
    return len(getattr(getattr(shell(), "history_manager", None), "input_hist_raw", [""]))


P = ParamSpec("P")
R = TypeVar("R")


def leave_out_ours(error: BaseException) -> None:
    """Remove the calling function and our frames below it from an error's traceback.

    Call it in an `except` that ends with a bare `raise`. `python -X dev` keeps the frames.
    """
    trace = error.__traceback__
    while trace is not None and stands_in(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if not sys.flags.dev_mode:
        error.__traceback__ = trace


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, without its frame in tracebacks."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            leave_out_ours(error)
            raise

    return call
