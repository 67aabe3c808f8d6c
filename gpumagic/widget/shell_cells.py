"""Record the cells that run in this shell, from IPython's own events, and the GPUs they held."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from gpumagic.telemetry.history import CellRun, CellRuns

KEPT = 200
_numbers = itertools.count()


class ShellCells:
    """What ran when, while it is installed; ``changed`` is called after a cell began or ended."""

    def __init__(
        self, shell: Any, changed: Callable[[], None], clock: Callable[[], float] = time.time
    ) -> None:
        self._events = shell.events
        self._shell = shell
        self._changed = changed
        self._clock = clock
        self._runs = CellRuns(KEPT)
        # The ids, by the identity of IPython's own record of the cell: its start and end share it.
        self._running: dict[int, str] = {}
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
        running = set(self._running.values())
        self._runs.forget(lambda run: run.id in running)
        self._running.clear()

    def holds(self, uuids: Iterable[str]) -> None:
        """This kernel holds memory on these GPUs, and so do the cells that run."""
        for name in list(self._running.values()):
            self._runs.hold(name, uuids)

    def runs(self) -> list[dict[str, Any]]:
        """Oldest first, as JSON."""
        return [run.to_dict() for run in self._runs.since()]

    def _began(self, info: Any) -> None:
        count = self._shell.execution_count if info.store_history else None
        name = f"{os.getpid()}-{next(_numbers)}"
        self._runs.keep(CellRun(name, None, self._notebook, count, self._clock()))
        self._running[id(info)] = name
        self._changed()

    def _ended(self, result: Any) -> None:
        name = self._running.pop(id(result.info), None)
        if name is not None:
            self._runs.end(name, self._clock())
            self._changed()
