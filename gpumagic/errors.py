"""Define the errors and warnings that users see, and helpers for their messages."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any


class GpuError(Exception):
    """Bad input, in one line: what was given, what there is, what to type.

    IPython shows only that line; other programs see an ordinary exception.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython calls this instead of showing the traceback.
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Problem:
    """A failure of the machine: a stable code for programs, its cause and its cure as sentences."""

    code: str
    cause: str
    cure: str
    uuid: str | None = None  # of the GPU that has the problem, if any


def note(error: BaseException, text: str) -> None:
    """Add a line at the end of an error's traceback."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        print(f"{type(error).__name__}: {text}", file=sys.stderr)


def show_as(error: BaseException, lines: Callable[[], list[str]]) -> None:
    """Make IPython show an error as these lines."""
    with suppress(AttributeError):  # an error with slots
        error._render_traceback_ = lines  # type: ignore[attr-defined]


def as_typed(magic: str) -> str:
    """Return how to run `magic` from here: it may first need ``%load_ext``, or a notebook."""
    if "gpumagic.magics.loading" in sys.modules:
        return magic
    ipython: Any = sys.modules.get("IPython")
    where = "" if ipython and ipython.get_ipython() else "in a notebook, "
    return f"{where}%load_ext gpumagic, then {magic}"


def meant(given: str, known: Iterable[str]) -> str:
    """Return ``"did you mean on? "`` with the closest known word; empty if none is close."""
    from difflib import get_close_matches

    words, known = re.findall(r"[\w:-]+", given.lower()), list(known)
    close = [match for word in words for match in get_close_matches(word, known, 1, 0.75)]
    return f"did you mean {close[0]}? " if close else ""


@contextmanager
def library_needed(library: str, what: str, install: str) -> Iterator[None]:
    """Turn a missing library in this context into a GpuError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        said = f"{what} needs {library}, which is not installed; type: pip install {install}"
        raise GpuError(said) from None


torch_needed = partial(library_needed, "torch", install='"gpumagic[torch]"')
"""`library_needed` for torch, called with the feature that needs it."""
cluster_needed = partial(library_needed, "ipyparallel", install='"gpumagic[cluster]"')
"""`library_needed` for ipyparallel."""


class CrossDeviceWarning(UserWarning):
    """Warn of a copy between devices, or a wait for one, that the code does not ask for.

    Examples are `.item()` and indexing with a mask. Each line of a cell warns once. Filter it like
    any warning: ``warnings.simplefilter("ignore", gpumagic.CrossDeviceWarning)``.
    """


class ImplicitCopyError(CrossDeviceWarning, RuntimeError):
    """Raised with ``--strict`` for a copy or a wait that the code does not ask for.

    Until the next version it is also a `CrossDeviceWarning`, which ``--strict`` raised before.
    """
