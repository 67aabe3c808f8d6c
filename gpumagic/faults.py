"""Keep the faults of gpumagic itself: the first of each kind with its traceback, the rest counted.

A fault of ours must not stop the user's cell, and must not be lost either: whoever catches one
hands it to `keep`. `%gpus --doctor` shows them all; the cell that one spoiled says so in a line.
"""

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Fault:
    """One kind of fault: what was being done, and which error ended it."""

    doing: str  # the end of "gpumagic failed while …"
    error: str
    traceback: str  # of the first time, as text: its frames would keep the user's tensors alive
    count: int = 1

    def __str__(self) -> str:
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"gpumagic failed while {self.doing}: {self.error}{times}"


_MOST = 64  # kinds; what fails in more ways than that is told by the first ones
# Reentrant: a finalizer that fails may run while this thread keeps another fault.
_lock = threading.RLock()
untold: list[Fault] = []
"""Kinds that no cell has told yet: the next one that ends does."""
not_ours: list[Callable[[BaseException], bool]] = []
"""Tell whether an error is no failure of ours, though we met it: then it is not kept."""
_faults: dict[tuple[str, str, str], Fault] = {}


def keep(doing: str, error: BaseException) -> None:
    """Keep a fault of ours that was caught. Never raises."""
    if any(is_it(error) for is_it in not_ours):
        return
    # A kind is told by where it was raised: messages hold addresses and sizes.
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
        untold.append(_faults[key])


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
    """Run a piece of gpumagic whose failure must not reach the user: it is kept instead."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  kept, and shown by the doctor
        keep(doing, error)


def all_kept() -> list[Fault]:
    """Every kind of fault since the process began, the oldest first."""
    with _lock:
        return list(_faults.values())


def forget() -> None:
    """Begin anew: for tests, and for `%unload_ext`."""
    with _lock:
        _faults.clear()
        untold.clear()
