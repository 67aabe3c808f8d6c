"""Show the table of ``%gpus`` live in a terminal: ``gpumagic top``."""

import curses
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from gpumagic.display.table import short
from gpumagic.errors import GpuError, as_in_a_shell
from gpumagic.gputable import Holder
from gpumagic.gputable.gpu_table import GpuTable
from gpumagic.telemetry.sampler import Sampler
from gpumagic.telemetry.snapshot import Snapshot


def top(period_s: float = 1.0) -> int:
    """Show the GPUs and the holders of their memory until the user quits; return 0."""
    instead = "type gpumagic snapshot --watch 2"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise GpuError(f"top needs a terminal; {instead}")
    for fixed in ("LINES", "COLUMNS"):  # curses ignores a resize if these variables are set
        os.environ.pop(fixed, None)
    try:
        # The sampler reads on other threads, so that a stalled driver does not block keys.
        with closing(Sampler()) as sampler, sampler.subscribe(period_s=period_s, processes=True):
            curses.wrapper(_Screen(sampler.latest).run)
    except KeyboardInterrupt:
        pass
    except curses.error as error:
        raise GpuError(f"this terminal cannot be used ({error}); {instead}") from None
    return 0


_SORTS: dict[str, Callable[[Holder], Any]] = {
    "memory": lambda one: (-(one.total or 0), one.name),
    "utilization": lambda one: (-(one.utilization or 0.0), -(one.total or 0)),
    "name": lambda one: (one.name.lower(), one.pids),
    "PID": lambda one: one.pids,
}


class _Screen:
    """Draw the newest snapshot, and react to keys."""

    def __init__(self, latest: Callable[[], Snapshot | None]) -> None:
        self._latest = latest
        self._processes = False
        self._sort = "memory"
        self._first = 0  # index of the first line shown

    def run(self, window: curses.window) -> None:
        """Redraw after each snapshot, key press and resize, until q is pressed."""
        with suppress(curses.error):  # not every terminal can hide its cursor
            curses.curs_set(0)
        window.timeout(100)  # milliseconds to wait for a key before looking for a new snapshot
        key, drawn = curses.KEY_RESIZE, None
        while key != ord("q"):
            snapshot = self._latest()
            if key != curses.ERR or snapshot is not drawn:
                if key == curses.KEY_RESIZE:
                    window.clear()  # the resize may have moved old lines
                self._act(key, window.getmaxyx()[0] - 2)
                self._draw(window, snapshot)
                drawn = snapshot
            key = window.getch()

    def _act(self, key: int, page: int) -> None:
        moves = {curses.KEY_UP: -1, curses.KEY_DOWN: 1, curses.KEY_PPAGE: -page}
        moves |= {curses.KEY_NPAGE: page, curses.KEY_HOME: -self._first}
        self._first += moves.get(key, 0)
        if key == ord("s"):
            names = [*_SORTS]
            self._sort = names[(names.index(self._sort) + 1) % len(names)]
        self._processes ^= key == ord("p")

    def _draw(self, window: curses.window, snapshot: Snapshot | None) -> None:
        height, width = window.getmaxyx()
        lines = self._lines(snapshot, width)
        self._first = max(min(self._first, len(lines) - height + 1), 0)
        window.erase()
        for row, line in enumerate(lines[self._first :][: height - 1]):
            bold = line.startswith(("device ", "held by "))
            window.addstr(row, 0, short(line, width), curses.A_BOLD if bold else curses.A_NORMAL)
        listed = "processes" if self._processes else "notebooks"
        clock = time.strftime("%H:%M:%S", time.localtime(snapshot.time if snapshot else None))
        keys = f"q quit  ↑↓ scroll  s sort: {self._sort}  p list: {listed}  {clock}"
        # Leave the last cell empty, because writing there would scroll the terminal.
        window.addstr(height - 1, 0, short(keys, width - 1), curses.A_REVERSE)
        window.refresh()

    def _lines(self, snapshot: Snapshot | None, width: int) -> list[str]:
        if snapshot is None:
            return ["Waiting for the driver…"]
        table = GpuTable(snapshot, processes=self._processes, width=max(width, 40))
        # The last row has no PIDs. It shows the memory that belongs to no visible process.
        table.holders.sort(key=lambda one: (not one.pids, _SORTS[self._sort](one)))
        return as_in_a_shell(table).splitlines()
