"""Counting, in memory that does not grow with the number of calls."""

import threading
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

from gpumagic.ledger.copy_time import CLOCK
from gpumagic.ledger.entry import Entry, Ledger, merged
from gpumagic.ledger.implicit import is_implicit
from gpumagic.ledger.via import PRINT, WORDS
from gpumagic.usercode.files import module_of
from gpumagic.usercode.lines import expression, line_at

# Code that a loop compiles anew each time would make an entry each time: past this many, entries
# are merged by what is shown of them.
_MOST = 4096
# A tensor's own methods, which are the user's doing.
_METHODS = ("torch._tensor", "torch.functional")


class Count:
    """The counts of one instruction; what `Entry` is made of."""

    __slots__ = (
        "alone",
        "at",
        "blocking",
        "calls",
        "code",
        "copy",
        "count",
        "destination",
        "how",
        "implicit",
        "kept",
        "last",
        "looks",
        "nbytes",
        "operator",
        "pinned",
        "repeats",
        "seconds",
        "source",
        "timed",
        "version",
        "warned",
        "within",
    )

    def __init__(
        self,
        copy: bool,
        operator: str,
        source: str,
        destination: str,
        how: int,
        place: tuple[CodeType | None, int],
        inner: tuple[CodeType | None, int],
        kept: object = None,
    ) -> None:
        self.copy, self.operator = copy, operator
        self.source, self.destination = source, destination
        self.how, (self.code, self.at) = how, place
        # Keys hold addresses of code objects: they must not be used again while the key is there.
        self.kept = kept
        self.implicit = is_implicit(operator, how, *inner)
        by_itself = inner[0] if self.implicit and not how else None
        module = "" if by_itself is None else module_of(by_itself.co_filename)
        self.within = "" if module in _METHODS else module
        self.count = self.nbytes = self.calls = self.repeats = self.looks = 0
        self.blocking = self.timed = 0
        self.seconds = 0.0
        self.pinned: bool | None = None
        self.last: weakref.ref[Any] | None = None
        self.version: int | None = None
        self.warned = False
        self.alone = (self,)

    def look_at(self, tensor: Any, host: Any) -> None:
        """Note whether a copy copies what the last one did, and from or to pinned memory."""
        version = None if tensor.is_inference() else tensor._version
        if self.last is not None and self.last() is tensor and self.version == version:
            self.repeats += 1
        self.last, self.version = weakref.ref(tensor), version
        if host.get_device() < 0:
            pinned = bool(host.is_pinned())
            self.pinned = pinned if not self.looks or self.pinned is pinned else None
        self.looks += 1


class Tally:
    """The counts of one watch.

    Parameters
    ----------
    virtual : bool
        Whether the devices are virtual ones.
    """

    def __init__(self, virtual: bool = False) -> None:
        self.virtual = virtual
        self._counts: dict[tuple[Any, ...], Count] = {}
        self.get = self._counts.get
        self._leaving: list[Count] = []
        self._folded: tuple[Entry, ...] = ()
        # Reentrant: a finaliser that runs meanwhile may copy too.
        self._lock = threading.RLock()

    def add(self, key: tuple[Any, ...], new: Count) -> Count:
        """Begin to count under `key`."""
        with self._lock:
            if len(self._counts) >= _MOST:
                self._fold()
            return self._counts.setdefault(key, new)

    def ledger(self) -> Ledger:
        """What was counted so far; on a real GPU, waits for the copies that are timed."""
        CLOCK.settle()
        with self._lock:
            return Ledger(merged([*self._folded, *self._entries()]), self.virtual)

    def __bool__(self) -> bool:
        return bool(self._counts or self._folded)

    def _fold(self) -> None:
        CLOCK.settle()
        # Those that a call is about to add to are folded the next time only.
        self._folded = merged([*self._folded, *(entry_of(c) for c in self._leaving if c.count)])
        self._leaving = list(self._counts.values())
        self._counts.clear()

    def _entries(self) -> Iterator[Entry]:
        yield from (entry_of(c) for c in (*self._leaving, *self._counts.values()) if c.count)


def entry_of(c: Count, at_least: int = 0) -> Entry:
    """A count as the ledger shows it; of `at_least` so many calls, for what is yet to come."""
    # Not every copy was timed on the device: the others are taken to be like those that were.
    seconds = c.seconds * c.count / c.timed if c.timed else c.seconds
    return Entry(
        kind="copy" if c.copy else "wait",
        operator=c.operator,
        source=c.source,
        destination=c.destination,
        count=max(c.count, at_least),
        nbytes=c.nbytes,
        seconds=seconds,
        implicit=c.implicit,
        where=None if c.code is None else line_at(c.code, c.at),
        code="" if c.code is None else expression(c.code, c.at),
        via=WORDS.get(c.how, ""),
        within=c.within,
        calls=max(c.calls if c.how == PRINT else c.count, at_least),
        repeats=round(c.repeats * c.count / c.looks) if c.looks else 0,
        blocking=c.blocking,
        pinned=c.pinned,
    )
