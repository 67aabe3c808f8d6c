"""Define the errors and warnings that users see, and helpers for their messages."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any


class GpuError(Exception):
    """Error with a message of one line: what was given, what exists, what to type.

    IPython shows only this line, without a traceback.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Problem:
    """A failure of the machine, with a stable code for programs, a cause and a cure."""

    code: str
    cause: str
    cure: str
    uuid: str | None = None  # UUID of the GPU that has the problem, if any


def note(error: BaseException, text: str) -> None:
    """Add a line at the end of an error's traceback."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        print(f"{type(error).__name__}: {text}", file=sys.stderr)


def show_as(error: BaseException, lines: Callable[[], list[str]]) -> None:
    """Make IPython show the lines that `lines` returns, in place of the error's traceback."""
    with suppress(AttributeError):  # the error's class has slots
        error._render_traceback_ = lines  # type: ignore[attr-defined]


def as_typed(magic: str) -> str:
    """Return what to type to run `magic`. ``%load_ext`` comes first if gpumagic is not loaded."""
    if "gpumagic.magics.loading" in sys.modules:
        return magic
    ipython: Any = sys.modules.get("IPython")
    where = "" if ipython and ipython.get_ipython() else "in a notebook, "
    return f"{where}%load_ext gpumagic, then {magic}"


def as_in_a_shell(shown: object) -> str:
    """Return text with the commands to type in a shell instead of magics."""
    return str(shown).replace("%gpus --doctor", "gpumagic doctor")


def meant(given: str, known: Iterable[str]) -> str:
    """Return a question such as ``"did you mean cuda:1? "``; empty if no known word is close."""
    from difflib import get_close_matches

    words, known = re.findall(r"[\w:-]+", given.lower()), list(known)
    close = [match for word in words for match in get_close_matches(word, known, 1, 0.75)]
    return f"did you mean {close[0]}? " if close else ""


def check_exception(function: str, given: object) -> None:
    """Raise GpuError if `given`, the argument of a public function, is not an exception."""
    if not isinstance(given, BaseException):
        raise GpuError(f"{function} takes an exception, not {type(given).__name__}")


@contextmanager
def library_needed(library: str, what: str, install: str) -> Iterator[None]:
    """Raise a GpuError with install instructions if the block cannot import `library`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        said = f"{what} needs {library}, which is not installed; type: pip install {install}"
        raise GpuError(said) from None


torch_needed = partial(library_needed, "torch", install='"gpumagic[torch]"')
"""`library_needed` for torch; the argument is the feature that needs torch."""
cluster_needed = partial(library_needed, "ipyparallel", install='"gpumagic[cluster]"')


class CrossDeviceWarning(UserWarning):
    """Warn of a line that repeatedly copies between devices, or repeatedly waits for a GPU.

    An example is `.item()` in a loop. In a cell, each line warns at most once. To ignore these
    warnings: ``warnings.simplefilter("ignore", gpumagic.CrossDeviceWarning)``.
    """


class ImplicitCopyError(CrossDeviceWarning, RuntimeError):
    """Raised in strict mode (``--strict``) for an implicit copy between devices or implicit wait.

    The class derives from `CrossDeviceWarning`, because earlier versions raised that class.
    """
