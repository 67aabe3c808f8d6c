"""Show the progress of long work in one line, which is overwritten and removed at the end.

Work that takes less than 2 s shows none. A pipe or a file gets nothing, a terminal tqdm's line, and
a notebook a bar that is updated in place; the bar moves to and fro if the total is unknown.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from shutil import get_terminal_size
from typing import Any, TextIO

from gpumagic.display.table import block, tag

PATIENCE_S = 2.0


def _bar(now: object) -> str:
    """HTML's own bar, in our color, and the words."""
    share: float | None = getattr(now, "share", None)
    value = "" if share is None else f' value="{share:.3f}"'
    style = "accent-color: var(--gm-mine); margin-right: 8px; vertical-align: middle; width: 16em"
    return block(f'<progress style="{style}"{value}></progress>{tag("span", now)}')


class ProgressLine:
    """The line under a cell, or in a terminal; a timer writes it once too, for a step may last."""

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
        self._bar: Any = None
        self._output: Any = None
        self._latest: object = None
        self._lock = threading.Lock()
        self._over = silent
        # The notebook knows by its context which cell it is that writes.
        context = copy_context()
        self._timer = timer(PATIENCE_S, lambda: context.run(self._write))
        self._timer.daemon = True
        if not silent:
            self._timer.start()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, now: object) -> None:
        """Write ``str(now)``, if it is time; a bar is as long as its `share`, from 0 to 1."""
        self._latest = now
        if self._clock() - self._began >= PATIENCE_S:
            self._write()

    def _write(self) -> None:
        with self._lock:
            if self._over or self._latest is None:
                return
            if self._notebook:
                self._publish(self._latest)
            else:
                self._draw(str(self._latest))

    def _publish(self, now: object) -> None:
        from IPython.display import display

        shown = {"text/plain": str(now), "text/html": _bar(now)}
        if self._output is None:
            self._output = display(shown, raw=True, display_id=True)
        else:
            self._output.update(shown, raw=True)

    def _draw(self, words: str) -> None:
        # A line that wraps would not be erased whole.
        words = words[: get_terminal_size().columns - 1]
        if self._bar is not None:
            self._bar.set_description_str(words)
            return
        from tqdm import tqdm

        class Line(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # no thread that would live on

        # By None it is off where there is no terminal.
        self._bar = Line(
            desc=words, bar_format="{desc}", leave=False, disable=None, file=self._terminal
        )

    def close(self, result: Any = None) -> None:
        """Take it away; in its place `result` is shown, unless it is None."""
        from IPython.display import display

        self._timer.cancel()
        with self._lock:
            self._over = True
        if self._bar is not None:
            self._bar.close()
        if self._output is None:
            if result is not None:
                display(result)
        elif result is None:
            # A front end draws the HTML, and of an empty one nothing.
            self._output.update({"text/plain": "", "text/html": ""}, raw=True)
        else:
            # One output of the cell, not an empty one above the result.
            self._output.update(result)
