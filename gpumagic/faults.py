"""Record the faults of gpumagic itself: the first of each kind with its traceback, and a count.

A fault in gpumagic must neither stop the user's cell nor be lost: code that catches it calls
`keep`. The next cell that ends reports it in one line, and `%gpus --doctor` shows all faults.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Fault:
    """A kind of fault: the attempted work, and the error."""

    doing: str  # "starting the ledger", after "gpumagic failed while "
    error: str
    traceback: str  # of the first error, as text: frames would keep the user's tensors alive
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"gpumagic failed while {self.doing}: {self.error}{times}"


_MOST = 64  # maximum number of kinds
# Reentrant: a finalizer that fails may run while this thread records another fault.
_lock = threading.RLock()
unreported: list[Fault] = []  # kinds that no cell has reported yet
not_ours: list[Callable[[BaseException], bool]] = []  # predicates of errors not to record
_faults: dict[tuple[str, str, str], Fault] = {}


def keep(doing: str, error: BaseException) -> None:
    """Record a caught fault of gpumagic. Never raises."""
    if any(is_it(error) for is_it in not_ours):
        return
    # All errors of one line are one kind, since their messages may differ in addresses or sizes.
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
    """Return the first line of an error's message, or its type's name if it has no message."""
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
    """Record an error of gpumagic's code in this context, instead of raising the error."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  recorded, and shown by the doctor
        keep(doing, error)


def all_kept() -> list[Fault]:
    """Return every kind of fault since the process began, the oldest first."""
    with _lock:
        return list(_faults.values())


def forget() -> None:
    """Forget all faults: for tests, `%unload_ext`, and the child of a dry run."""
    with _lock:
        _faults.clear()
        unreported.clear()
