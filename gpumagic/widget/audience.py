"""Track which views of a monitor are open.

Each view says again and again that it is there. A kernel that runs a cell receives nothing, so that
time does not count: only a view that is silent while the kernel could receive is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# More than the minute to which browsers slow the clocks of pages in the background.
PATIENCE_S = 90.0


class Audience:
    """The views of one monitor, each of which may be silent for a while; for any thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S
    ) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._looked: dict[str, float] = {}
        # Since when the kernel can receive; None while it cannot.
        self._receives_since: float | None = clock()

    def look(self, view: str) -> bool:
        """A view is there; the value is whether it is a new one."""
        with self._lock:
            new = view not in self._looked
            self._looked[view] = self._clock()
            return new

    def leave(self, view: str) -> bool:
        """A view went; the value is whether it was the last."""
        with self._lock:
            return self._looked.pop(view, None) is not None and not self._looked

    def receives(self, able: bool) -> None:
        """The kernel has begun or ended what keeps it from receiving."""
        with self._lock:
            if not able:
                self._receives_since = None
            elif self._receives_since is None:
                self._receives_since = self._clock()

    def anyone(self) -> bool:
        """Whether somebody looks, or may come to look, as far as can be known."""
        with self._lock:
            since = self._receives_since
            if since is None:
                return True
            now = self._clock()
            self._looked = {
                view: at
                for view, at in self._looked.items()
                if now - max(at, since) <= self._patience_s
            }
            return bool(self._looked) or now - since <= self._patience_s
