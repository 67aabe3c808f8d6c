"""Show the progress of long work in one line, and remove the line at the end."""

import sys
import threading
from contextlib import AbstractContextManager
from contextvars import copy_context
from shutil import get_terminal_size
from typing import Any

from gpumagic.display.table import block, short, tag

SHOW_AFTER_S = 2.0


def _bar(now: object) -> dict[str, str]:
    share: float | None = getattr(now, "share", None)
    value = "" if share is None else f' value="{share:.3f}"'
    style = "accent-color: var(--gm-mine); margin-right: 8px; vertical-align: middle; width: 16em"
    drawn = f'<progress style="{style}"{value}></progress>{tag("span", now)}'
    return {"text/plain": str(now), "text/html": block(drawn)}


class ProgressLine(AbstractContextManager["ProgressLine"]):
    """Context manager that shows progress in one line, after `SHOW_AFTER_S` seconds."""

    def __init__(self, shell: Any, *, silent: bool = False) -> None:
        self._notebook = hasattr(shell, "kernel")
        self._output: Any = None  # IPython's display handle
        self._line: Any = None  # tqdm's line
        self._latest: object = None
        self._due, self._over = False, silent
        self._lock = threading.Lock()
        # ipykernel finds an output's cell by context variables, so the timer's thread needs them.
        context = copy_context()
        self._timer = threading.Timer(SHOW_AFTER_S, lambda: context.run(self._begin))
        self._timer.daemon = True
        if not silent:
            self._timer.start()

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, now: object) -> None:
        """Set the text to ``str(now)``. If `now` has a `share` (0 to 1), set the bar's length."""
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
                # Shorten the text, because a line that wraps would not be erased completely.
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
            monitor_interval = 0  # no monitor thread, which would never end

        # `disable=None` shows nothing if stderr is not a terminal.
        self._line = Line(
            desc=words, bar_format="{desc}", leave=False, disable=None, file=sys.stderr
        )

    def close(self, result: Any = None) -> None:
        """Remove the line, and show `result` unless it is None."""
        from IPython.display import display

        self._timer.cancel()
        with self._lock:
            self._over = True
        if self._line is not None:
            self._line.close()
        if self._output is not None:
            # Replace the bar's output, so that no empty output stays above the result.
            empty = {"text/plain": "", "text/html": ""}
            self._output.update(empty if result is None else result, raw=result is None)
        elif result is not None:
            display(result)
