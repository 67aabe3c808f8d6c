"""The cells that run in this shell, from IPython's own events, and the GPUs that they held."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

KEPT = 200
_numbers = itertools.count()


class CellLog:
    """What ran when, while it is installed.

    Parameters
    ----------
    shell : InteractiveShell
    changed : callable
        Called after a cell began or ended.
    clock : callable
        Seconds of Unix time.
    """

    def __init__(
        self, shell: Any, changed: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._events = shell.events
        self._shell = shell
        self._changed = changed
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: deque[dict[str, Any]] = deque(maxlen=KEPT)
        # By the identity of IPython's own record of the cell, which its start and end share.
        self._running: dict[int, dict[str, Any]] = {}
        self._notebook = os.environ.get("JPY_SESSION_NAME")

    @property
    def busy(self) -> bool:
        """Whether a cell runs."""
        return bool(self._running)

    def install(self) -> None:
        """Begin to listen; a cell that runs already is taken to begin now."""
        self._events.register("pre_run_cell", self._began)
        self._events.register("post_run_cell", self._ended)
        result = getattr(self._shell.displayhook, "exec_result", None)
        if result is not None and result.info is not None:
            self._began(result.info)

    def uninstall(self) -> None:
        """Listen no more; what still runs is forgotten."""
        self._events.unregister("pre_run_cell", self._began)
        self._events.unregister("post_run_cell", self._ended)
        with self._lock:
            for run in self._running.values():
                self._runs.remove(run)
            self._running.clear()

    def holds(self, uuids: Iterable[str]) -> None:
        """This kernel holds memory on these GPUs, and so do the cells that run."""
        held = set(uuids)
        with self._lock:
            for run in self._running.values():
                run["gpus"] = sorted(held.union(run["gpus"]))

    def runs(self) -> list[dict[str, Any]]:
        """Oldest first, as JSON."""
        with self._lock:
            return [dict(run) for run in self._runs]

    def _began(self, info: Any) -> None:
        run: dict[str, Any] = {
            "id": f"{os.getpid()}-{next(_numbers)}",
            "kernel": None,
            "notebook": self._notebook,
            "count": self._shell.execution_count if info.store_history else None,
            "start": self._clock(),
            "end": None,
            "gpus": [],
        }
        with self._lock:
            if len(self._runs) == KEPT:
                self._running = {k: r for k, r in self._running.items() if r is not self._runs[0]}
            self._runs.append(run)
            self._running[id(info)] = run
        self._changed()

    def _ended(self, result: Any) -> None:
        with self._lock:
            run = self._running.pop(id(result.info), None)
            if run is None:
                return
            run["end"] = self._clock()
        self._changed()
