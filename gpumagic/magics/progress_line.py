"""One line that says how far a measurement is, written over itself, and gone at the end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from gpumagic.timing.progress import Progress

# What is over sooner needs no line.
PATIENCE_S = 2.0
# Whoever is told something in this time needs no timer.
_GRACE_S = 0.5
# Erases the line that the cursor stands on (ECMA-48, EL).
_ERASE = "\r\x1b[2K"


def caption(now: Progress) -> str:
    """``"cuda:0 · n = 256 · repeat 12 · 2 of 3 devices · about 4 s left"``."""
    parts = [now.where, *(f"{name} = {value}" for name, value in now.values.items())]
    if now.stage == "timing":
        parts.append(f"repeat {now.repeat}" if now.repeat else "first run")
    else:
        parts.append({"copy": "inputs and first run"}.get(now.stage, now.stage))
    if now.total > 1:
        kind = "" if now.values else " devices"
        parts.append(f"{min(now.done + 1, now.total)} of {now.total}{kind}")
    # At 0 an estimate is over, and what it was of may not be.
    if now.remaining:
        parts.append(f"about {_rough(now.remaining)} left")
    return " · ".join(part for part in parts if part)


def _rough(seconds: float) -> str:
    whole = max(round(seconds), 1)
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / 60)
    return f"{minutes} min" if minutes < 100 else f"{round(minutes / 60)} h"


class ProgressLine:
    """The line under a cell, or in a terminal; begun when a measurement has lasted 2 s.

    Parameters
    ----------
    shell : InteractiveShell
    clock : callable
        Seconds that only grow.
    silent : bool
        Never write.
    terminal : file, optional
        Where a shell without a kernel writes; standard error if None.
    timer : callable
        As `threading.Timer`: one run may last long, and nothing is told while it does.
    """

    def __init__(
        self,
        shell: Any,
        clock: Callable[[], float] = time.monotonic,
        *,
        silent: bool = False,
        terminal: TextIO | None = None,
        timer: Callable[..., threading.Timer] = threading.Timer,
    ) -> None:
        self._notebook = hasattr(shell, "kernel")
        self._clock = clock
        self._terminal = terminal or sys.stderr
        self._began = clock()
        self._id: str | None = None
        self._written = False
        self._latest: Progress | None = None
        self._lock = threading.Lock()
        self._over = silent
        # The notebook knows by its context which cell it is that writes.
        context = copy_context()
        self._timer = timer(PATIENCE_S + _GRACE_S, lambda: context.run(self._first))
        self._timer.daemon = True
        if not silent:
            self._timer.start()

    def update(self, now: Progress) -> None:
        """Write it, if it is time."""
        self._latest = now
        if self._clock() - self._began >= PATIENCE_S:
            self._write(now)

    def _first(self) -> None:
        # Once only, and where a run takes seconds: it costs that run nothing to speak of.
        if self._latest is not None and self._id is None and not self._written:
            self._write(self._latest)

    def _write(self, now: Progress) -> None:
        with self._lock:
            if not self._over:
                self._put(now)

    def _put(self, now: Progress) -> None:
        if self._notebook:
            self._publish({"text/plain": caption(now)})
        elif self._terminal.isatty():
            # A line that wraps would not be erased whole.
            self._terminal.write(_ERASE + caption(now)[: get_terminal_size().columns - 1])
            self._terminal.flush()
            self._written = True

    def close(self, result: Any = None) -> None:
        """Take it away; in its place `result` is shown, unless it is None."""
        from IPython.display import display, update_display

        self._timer.cancel()
        with self._lock:
            self._over = True
        if self._written:
            self._terminal.write(_ERASE)
            self._terminal.flush()
            self._written = False
        shown, self._id = self._id, None
        if result is None:
            if shown is not None:
                # A front end draws the HTML, and of an empty one nothing.
                nothing = {"text/plain": "", "text/html": ""}
                update_display(nothing, raw=True, display_id=shown)
        elif shown is None:
            display(result)
        else:
            # One output of the cell, not an empty one above the result.
            update_display(result, display_id=shown)

    def _publish(self, data: dict[str, str]) -> None:
        from IPython.display import display, update_display

        if self._id is None:
            from uuid import uuid4

            self._id = uuid4().hex
            display(data, raw=True, display_id=self._id)
        else:
            update_display(data, raw=True, display_id=self._id)
