"""Show the progress of long work in one line, which is overwritten and removed at the end.

Work of less than 2 s shows no line, and a pipe or a file gets none. A terminal gets tqdm's line. A
notebook gets a bar, updated in place; if the total is unknown, the bar moves to and fro.
"""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from contextvars import copy_context
from shutil import get_terminal_size
from typing import Any

from gpumagic.display.table import block, short, tag

SHOW_AFTER_S = 2.0
# A front end shows the HTML; empty HTML shows nothing.
_NOTHING = {"text/plain": "", "text/html": ""}


def _bar(now: object) -> dict[str, str]:
    """Return a progress bar in HTML, in gpumagic's color, with text."""
    share: float | None = getattr(now, "share", None)
    value = "" if share is None else f' value="{share:.3f}"'
    style = "accent-color: var(--gm-mine); margin-right: 8px; vertical-align: middle; width: 16em"
    drawn = f'<progress style="{style}"{value}></progress>{tag("span", now)}'
    return {"text/plain": str(now), "text/html": block(drawn)}


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """A context manager that shows updates in one line, from `SHOW_AFTER_S` seconds on."""

    def __init__(self, shell: Any, *, silent: bool = False) -> None:
        self._notebook = hasattr(shell, "kernel")
        self._output: Any = None  # IPython's display handle
        self._line: Any = None  # tqdm's
        self._latest: object = None
        self._due, self._over = False, silent
        self._lock = threading.Lock()
        # ipykernel finds an output's cell by the context, so the timer's thread needs a copy of it.
        context = copy_context()
        self._timer = threading.Timer(SHOW_AFTER_S, lambda: context.run(self._begin))
        self._timer.daemon = True
        if not silent:
            self._timer.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, now: object) -> None:
        """Set the text to ``str(now)``, and the bar's length to ``now.share``, from 0 to 1."""
        self._latest = now
        if self._due:
            self._write()

    def _begin(self) -> None:
        self._due = True
        self._write()

    def _write(self) -> None:
        from IPython.display import display

        with self._lock:
            if self._over or self._latest is None:
                return
            if not self._notebook:
                # A line that wraps would not be erased completely.
                self._draw(short(str(self._latest), get_terminal_size().columns - 1))
            elif self._output is None:
                self._output = display(_bar(self._latest), raw=True, display_id=True)
            else:
                self._output.update(_bar(self._latest), raw=True)

    def _draw(self, words: str) -> None:
        from tqdm import tqdm

        if self._line is not None:
            self._line.set_description_str(words)
            return

        class Line(tqdm):  # type: ignore[misc]
            monitor_interval = 0  # tqdm's monitor thread would not end

        # `disable=None` shows nothing without a terminal.
        self._line = Line(
            desc=words, bar_format="{desc}", leave=False, disable=None, file=sys.stderr
        )

    def close(self, result: Any = None) -> None:
        """Remove the line; show `result` in its place, unless it is None."""
        from IPython.display import display

        self._timer.cancel()
        with self._lock:
            self._over = True
        if self._line is not None:
            self._line.close()
        if self._output is None:
            if result is not None:
                display(result)
        elif result is None:
            self._output.update(_NOTHING, raw=True)
        else:
            # Replace the bar's output, so that no empty output stays above the result.
            self._output.update(result)
