"""Define the one error for bad input: what was given, what there is, what to type; and the one
warning."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any


class GpuError(Exception):
    """Bad input, in one line: what was given, what there is, what to type.

    IPython shows it as that line alone; other programs see an ordinary exception.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython asks an exception for its own rendering; a usage error needs no stack.
        return [f"{type(self).__name__}: {self}"]


def note(error: BaseException, text: str) -> None:
    """Have an error's traceback end with a line more."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10
        print(f"{type(error).__name__}: {text}", file=sys.stderr)


def show_as(error: BaseException, lines: Callable[[], list[str]]) -> None:
    """Have a notebook show an error as these lines."""
    # IPython asks an exception for its own rendering. One that has slots is shown as it is.
    with suppress(AttributeError):
        error._render_traceback_ = lines  # type: ignore[attr-defined]


def as_typed(magic: str) -> str:
    """A magic's line as it is to be typed here, where the extension may not be loaded."""
    loaded = "gpumagic.magics.loading" in sys.modules
    return magic if loaded else f"%load_ext gpumagic, then {magic}"


def meant(given: str, known: Iterable[str]) -> str:
    """The known word that is nearly one of those given, as a question; nothing without one."""
    from difflib import get_close_matches

    words, known = re.findall(r"[\w:-]+", given.lower()), list(known)
    close = [match for word in words for match in get_close_matches(word, known, 1, 0.75)]
    return f"did you mean {close[0]}? " if close else ""


@contextmanager
def library_needed(library: str, what: str, install: str) -> Iterator[None]:
    """Import a library within; where it is not installed, one line says how to get it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != library:
            raise
        raise GpuError(
            f"{what} needs {library}, which is not installed here; type: pip install {install}"
        ) from None


def torch_needed(what: str) -> AbstractContextManager[None]:
    """Import what needs torch within."""
    return library_needed("torch", what, '"gpumagic[torch]"')


def cluster_needed(what: str) -> AbstractContextManager[None]:
    """Import what needs ipyparallel within."""
    return library_needed("ipyparallel", what, '"gpumagic[cluster]"')


class CrossDeviceWarning(UserWarning):
    """A copy between devices, or a wait for one, that the code does not ask for in so many words.

    Given once for each line of a cell; under ``--strict`` it is raised. Filter it like any warning:
    ``warnings.simplefilter("ignore", gpumagic.CrossDeviceWarning)``.
    """

    raised_in: Any = None  # the user's code, where a library's frames lie between

    def _render_traceback_(self) -> Any:
        # What raised it is no code of the user's: the traceback ends at the user's line.
        from IPython import get_ipython

        trace = self.__traceback__
        while trace is not None and trace.tb_next is not None:
            ends = trace.tb_frame.f_code is self.raised_in
            if ends or trace.tb_next.tb_frame.f_locals.get("__tracebackhide__"):
                trace.tb_next = None
            trace = trace.tb_next
        show = get_ipython().InteractiveTB.structured_traceback
        return show(type(self), self, self.__traceback__)
