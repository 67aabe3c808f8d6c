"""Keep what was read, and read anew what is older than it may be."""

import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

T = TypeVar("T")


class KeptReadings:
    """By key: when it was read, how often it is to be, and how."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._kept: dict[Hashable, tuple[float, float, Callable[[], Any], Any]] = {}

    def get(self, key: Hashable, every_s: float, patience: float, read: Callable[[], T]) -> T:
        """What is kept, unless it is `patience` times as old as it is to become."""
        now = self._monotonic()
        kept = self._kept.get(key)
        if kept is None or now - kept[0] >= every_s * patience:
            self._kept[key] = kept = now, every_s, read, read()
        value: T = kept[3]
        return value

    def read_ahead(self, seconds: float, wanted: Callable[[Hashable], bool]) -> None:
        """Read what is due of the wanted, the longest overdue first, for at most so long."""
        end = self._monotonic() + seconds
        for key, (at, every_s, read, _) in sorted(
            self._kept.items(), key=lambda item: item[1][0] + item[1][1]
        ):
            now = self._monotonic()
            if now >= end:
                return
            if wanted(key) and now - at >= every_s:
                self._kept[key] = now, every_s, read, read()

    def keep_only(self, wanted: Callable[[Hashable], bool]) -> None:
        """Forget the others."""
        self._kept = {key: kept for key, kept in self._kept.items() if wanted(key)}
