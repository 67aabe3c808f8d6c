"""Track a monitor's open views, the notebook's cell runs, and the variables on GPUs.

A view sends heartbeats while it is open. Without heartbeats, a view counts as closed. While a cell
runs, the kernel receives no heartbeats, so the views count as open.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from IPython import get_ipython
from IPython.display import JSON

from gpumagic.telemetry.history import CellRun, CellRuns
from gpumagic.telemetry.snapshot import ProcessSample, Snapshot

if TYPE_CHECKING:
    from gpumagic.memory.memory_report import DeviceMemory


def panel() -> JSON:
    return JSON(held_now())


def held_now() -> dict[str, Any]:
    """Return the rows of `%gpumem` by GPU UUID, as JSON. No rows if torch is not imported."""
    # Between two cells, `execution_count` is the number of the next cell.
    cell = get_ipython().execution_count - 1
    if "torch" not in sys.modules:
        return {"cell": cell, "seconds": 0.0, "gpus": {}}
    from gpumagic.memory.holders_by_name import memory

    report = memory()
    gpus = {device.uuid or device.device: _rows(device) for device in report.devices}
    return {"cell": cell, "seconds": report.seconds, "gpus": gpus}


def _rows(device: "DeviceMemory") -> dict[str, Any]:
    from gpumagic.memory import memory_report

    shown = memory_report.folded_rows(device)
    rows = [
        {
            "name": row.path,
            "kind": memory_report.kind(row),
            "nbytes": row.nbytes,
            "made": str(row.made or ""),
            "aliases": list(row.aliases[:8]),
        }
        for row in device.holders[:shown]
    ]
    rest = device.holders[shown:]
    left = sum(row.nbytes for row in rest)
    return {"allocated": device.allocated, "rows": rows, "more": len(rest), "left": left}


KEPT = 200  # maximum number of stored cell runs


class Audience:
    """The open views of one monitor. The methods are thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._beats: dict[str, float] = {}  # time of the last heartbeat, by view
        # The time at which the kernel began to receive messages; None while a cell runs.
        self._receives_since: float | None = time.monotonic()

    def look(self, view: str) -> bool:
        """Record a heartbeat of a view; return whether the view is new."""
        with self._lock:
            new = view not in self._beats
            self._beats[view] = time.monotonic()
            return new

    def leave(self, view: str) -> bool:
        """Remove a view; return whether it was the last open view."""
        with self._lock:
            return self._beats.pop(view, None) is not None and not self._beats

    def receives(self, able: bool) -> None:
        """Record whether the kernel can receive messages. While a cell runs, it cannot."""
        with self._lock:
            self._receives_since = (self._receives_since or time.monotonic()) if able else None

    def anyone(self) -> bool:
        """Whether a view is open, or may be open because the kernel could not get heartbeats."""
        with self._lock:
            if (since := self._receives_since) is None:
                return True
            # Wait over 60 s, because browsers may run a hidden page's timers only once a minute.
            oldest = time.monotonic() - 90.0
            self._beats = {v: at for v, at in self._beats.items() if max(at, since) >= oldest}
            return bool(self._beats) or since >= oldest


class ShellCells:
    """The runs of a shell's cells. `changed` is called when a cell starts or ends."""

    def __init__(self, shell: Any, changed: Callable[[], None]) -> None:
        self._shell = shell
        self._changed = changed
        self._runs = CellRuns(KEPT)
        # Run ids by `id(info)`. IPython passes the same `info` when a cell starts and when it ends.
        self._running: dict[int, str] = {}
        self.ended = ""  # the id of the run that ended last
        self._held: list[ProcessSample] = []  # this kernel's processes in the last snapshot
        self._notebook = os.environ.get("JPY_SESSION_NAME")

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def install(self) -> None:
        """Start to observe cells. If a cell is running, record it as if it began now."""
        self._shell.events.register("pre_run_cell", self._began)
        self._shell.events.register("post_run_cell", self._ended)
        result = getattr(self._shell.displayhook, "exec_result", None)
        if result is not None and result.info is not None:
            self._began(result.info)

    def uninstall(self) -> None:
        """Stop observing cells, and drop the runs that have not ended."""
        self._shell.events.unregister("pre_run_cell", self._began)
        self._shell.events.unregister("post_run_cell", self._ended)
        self._runs.forget(lambda run: run.id in self._running.values())
        self._running.clear()

    def see(self, snapshot: Snapshot, ended: str = "") -> None:
        """Record the GPUs that the running cells and the run with the id `ended` use."""
        self._held = [process for process in snapshot.processes if process.mine]
        for run_id in {*self._running.values(), ended}:
            self._runs.use(run_id, snapshot, self._held)

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs as JSON, the oldest first."""
        return [{**vars(run), "gpus": list(run.gpus)} for run in self._runs.since()]

    def _began(self, info: Any) -> None:
        # Do not use `execution_count`, which may be one higher than the starting cell's number.
        count = len(self._shell.history_manager.input_hist_parsed) if info.store_history else None
        run_id = uuid4().hex
        self._runs.start(run_id, self._held)
        self._runs.keep(CellRun(run_id, None, self._notebook, count, time.time()))
        self._running[id(info)] = run_id
        self._changed()

    def _ended(self, result: Any) -> None:
        if run := self._runs.get(self._running.pop(id(result.info), "")):
            self.ended = run.id
            count = result.execution_count if result.info.store_history else None
            self._runs.keep(replace(run, count=count, end=time.time()))
            self._changed()
