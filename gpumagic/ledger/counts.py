"""Count and time copies and waits by instruction; their memory does not grow with the calls."""

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from gpumagic.ledger.entry import Entry, Ledger, merged
from gpumagic.ledger.via import PRINT, WORDS
from gpumagic.usercode.lines import expression, line_at, line_of

# Code that a loop compiles anew each time would make an entry each time: past so many, new ones are
# counted by their lines.
_MOST = 4096
before_reading: list[Callable[[], None]] = []
"""Called before counts are read: what is still being measured is waited for."""


@dataclass(slots=True, eq=False)
class Count:
    """The counts of one instruction; what `Entry` is made of, and described there."""

    copy: bool
    operator: str
    source: str
    destination: str
    how: int  # the way from the user's frame to the operator: see `via`
    code: CodeType | None  # of the user, and its instruction
    at: int
    implicit: bool
    within: str = ""
    # Code objects whose addresses are in this count's key: none other may come to lie there.
    kept: object = None
    count: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    calls: int = 0
    blocking: int = 0
    timed: int = 0  # calls that have added to `seconds`, if not all
    looks: int = 0  # see `look_at`
    repeats: int = 0
    pinned: bool | None = None
    last: weakref.ref[Any] | None = None
    version: int | None = None
    warned: bool = False
    names: tuple[str, ...] = ()
    framework: str = ""
    kind: str = ""  # `Entry.kind`, where it is neither a copy nor a wait
    untimed: bool = False
    unsized: bool = False

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

    def entry(self, at_least: int = 0) -> Entry:
        """The count as the ledger shows it; of `at_least` so many calls, for what is to come."""
        # Not every copy was timed on the device: the others are taken to be like those that were.
        seconds = self.seconds * self.count / self.timed if self.timed else self.seconds
        calls = max(self.calls if self.how == PRINT else self.calls or self.count, at_least)
        return Entry(
            kind=self.kind or ("copy" if self.copy else "wait"),
            operator=self.operator,
            source=self.source,
            destination=self.destination,
            count=max(self.count, at_least),
            nbytes=self.nbytes,
            seconds=seconds,
            implicit=self.implicit,
            where=None if self.code is None else line_at(self.code, self.at),
            code="" if self.code is None else expression(self.code, self.at),
            via=WORDS.get(self.how, ""),
            within=self.within,
            calls=calls,
            sites=int(calls > 0),
            repeats=round(self.repeats * self.count / self.looks) if self.looks else 0,
            blocking=self.blocking,
            pinned=self.pinned,
            names=self.names,
            framework=self.framework,
            untimed=self.untimed,
            unsized=self.unsized,
        )


@dataclass(eq=False)
class Tally:
    """The counts of one watch."""

    virtual: bool = False  # whether the devices are
    # By operator, devices and instruction.
    counts: dict[tuple[Any, ...], Count] = field(default_factory=dict)
    # Reentrant: a finalizer that runs meanwhile may copy too.
    _lock: Any = field(default_factory=threading.RLock)

    def add(self, key: tuple[Any, ...], new: Count) -> Count:
        """Begin to count under `key`."""
        with self._lock:
            if len(self.counts) >= _MOST and new.code is not None:
                key = (key[0], new.code.co_filename, line_of(new.code, new.at), key[-1])
            return self.counts.setdefault(key, new)

    def ledger(self) -> Ledger:
        """What was counted so far; on a real GPU, waits for the copies that are timed."""
        for settle in before_reading:
            settle()
        with self._lock:
            counts = [*self.counts.values()]
        return Ledger(merged(count.entry() for count in counts if count.count), self.virtual)
