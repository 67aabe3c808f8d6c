"""Track which views of a monitor are open.

Each view says again and again that it is there. A kernel that runs a cell hears nothing, so that
time does not count: only what is not heard while the kernel could hear is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# More than the minute to which browsers slow the clocks of pages in the background.
PATIENCE_S = 90.0


class Audience:
    """The views of one monitor; any thread may ask and tell.

    Parameters
    ----------
    clock : callable
        Seconds that only grow.
    patience_s : float
        How long a view may be silent.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, patience_s: float = PATIENCE_S
    ) -> None:
        self._clock = clock
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._heard: dict[str, float] = {}
        # Since when the kernel can hear; None while it cannot.
        self._hears_since: float | None = clock()

    def look(self, view: str) -> bool:
        """A view is there; the value is whether it is a new one."""
        with self._lock:
            new = view not in self._heard
            self._heard[view] = self._clock()
            return new

    def leave(self, view: str) -> bool:
        """A view went; the value is whether it was the last."""
        with self._lock:
            return self._heard.pop(view, None) is not None and not self._heard

    def hears(self, able: bool) -> None:
        """The kernel has begun or ended what keeps it from hearing."""
        with self._lock:
            if not able:
                self._hears_since = None
            elif self._hears_since is None:
                self._hears_since = self._clock()

    def anyone(self) -> bool:
        """Whether somebody looks, or may come to look, as far as can be known."""
        with self._lock:
            since = self._hears_since
            if since is None:
                return True
            now = self._clock()
            self._heard = {
                view: at
                for view, at in self._heard.items()
                if now - max(at, since) <= self._patience_s
            }
            return bool(self._heard) or now - since <= self._patience_s
