"""Record faults: errors in gpumagic's own code, which must neither stop a cell nor get lost.

Code that catches a fault calls `keep`, which stores the first fault of each kind with its
traceback. The next cell reports a new fault in one line. `%gpus --doctor` shows all faults.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Fault:
    """Record one kind of fault: what gpumagic tried to do, the error, and how often it occurred."""

    doing: str  # words after "gpumagic failed while", such as "starting the ledger"
    error: str
    traceback: str  # text, because a traceback object would keep the user's tensors alive
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"gpumagic failed while {self.doing}: {self.error}{times}"


_MOST = 64  # maximum number of kinds of fault
# Reentrant, because a finalizer that runs while this thread holds the lock may record a fault.
_lock = threading.RLock()
unreported: list[Fault] = []  # faults that no cell has reported yet
not_ours: list[Callable[[BaseException], bool]] = []  # if any returns True, `keep` does nothing
_faults: dict[tuple[str, str, str], Fault] = {}


def keep(doing: str, error: BaseException) -> None:
    """Record a caught error of gpumagic's own code; never raise an error."""
    if any(matches(error) for matches in not_ours):
        return
    # Errors of the same type from the same line are one kind, even if their messages differ.
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    key = (doing, type(error).__name__, where)
    with _lock:
        known = _faults.get(key)
        if known is not None:
            known.count += 1
            return
        if len(_faults) >= _MOST:
            return
        text = "".join(traceback.format_list(frames))
        _faults[key] = Fault(doing, in_words(error), text)
        unreported.append(_faults[key])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type if there is no message."""
    try:
        message = str(error).strip().partition("\n")[0]
    except Exception:  # noqa: BLE001  the __str__ of a user's class may raise anything
        message = ""
    return message or type(error).__name__


def in_words(error: BaseException) -> str:
    """Return an error's type and the first line of its message: ``"ValueError: no value"``."""
    name, message = type(error).__name__, first_line(error)
    return name if message == name else f"{name}: {message}"


@contextmanager
def kept(doing: str) -> Iterator[None]:
    """Catch an error that is raised in the block, and record it as a fault."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  recorded for `%gpus --doctor`
        keep(doing, error)


def all_kept() -> list[Fault]:
    """Return all recorded faults, the oldest first."""
    with _lock:
        return list(_faults.values())


def forget() -> None:
    """Delete all faults. Called by tests, `%unload_ext`, and the forked child of a dry run."""
    with _lock:
        _faults.clear()
        unreported.clear()
