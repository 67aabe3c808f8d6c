"""Show the live monitor as a widget, with snapshots from this kernel's sampler.

The notebook also has a table, which is updated after each cell. A visible live view hides the
table. A saved notebook that is opened without a kernel shows the table.
"""

import atexit
import threading
import time
from concurrent.futures import TimeoutError as NotYet
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import anywidget
from IPython import get_ipython
from IPython.display import display, update_display
from traitlets import Dict, Float, List, Unicode

from gpumagic import faults
from gpumagic.gputable.gpu_table import GpuTable
from gpumagic.telemetry.history import KEPT, board
from gpumagic.telemetry.sampler import checked, shared_sampler
from gpumagic.telemetry.snapshot import Snapshot
from gpumagic.widget.notebook_watch import Audience, ShellCells, held_now

SCRIPT = Path(__file__).parents[1] / "static" / "widget.js"
_SENT = 20  # maximum number of cell runs to send when a cell starts or ends
# Without a kernel, JupyterLab shows an error below the table. This CSS hides the error.
_NO_MODEL = (
    ".jp-OutputArea-child:has(.{}) + .jp-OutputArea-child:has(.jupyter-widgets)"
    ":not(:has(.gpumagic-monitor)) {{ display: none }}"
)
_NOTE = "The live view appears when the running cell ends, or when this cell is run again."


class MonitorWidget(anywidget.AnyWidget):
    """The live monitor in a notebook, created by :func:`gpumagic.monitor`."""

    period = Float(1.0).tag(sync=True)
    snapshot = Dict().tag(sync=True)
    history = Dict().tag(sync=True)
    cells: List[Any] = List().tag(sync=True)
    results: List[Any] = List().tag(sync=True)
    timing = Dict().tag(sync=True)  # the running measurement of this kernel
    timings: List[Any] = List().tag(sync=True)  # the finished measurements of this kernel
    variables = Dict().tag(sync=True)  # variables on GPUs, read when a view last requested them
    table = Unicode().tag(sync=True)  # the CSS class of the table that the view hides
    _closed = True  # so that `close`, which ipywidgets calls if `__init__` fails, does nothing

    def __init__(self, period: float = 1.0) -> None:
        checked(period)
        self._sampler = shared_sampler()
        self._audience = Audience()
        # One pair for each display of the widget: the table's display id and the view's display id.
        self._shown: list[tuple[str, str]] = []
        self._due = False
        self._guard = threading.RLock()
        self._running = False
        self._subscription: Any = None
        # Take a new snapshot, because the latest snapshot may be from before this cell.
        try:
            self._last: Snapshot = self._sampler.fresh(processes=True, max_age_s=0).result(3.0)
        except NotYet:
            self._last = self._sampler.latest() or Snapshot(time=time.time())
        # Do not pass a Path, because anywidget would watch the file and so keep this widget alive.
        self._esm = SCRIPT.read_text("utf-8")
        super().__init__(
            period=period, snapshot=self._last.to_dict(), table=f"gpumagic-table-{uuid4().hex}"
        )
        self._closed = False
        self._log = ShellCells(get_ipython(), self._on_cell)
        self._log.see(self._last)
        self.on_msg(self.receive)
        self._start()

    def show(self, result: Any, title: str | None = None) -> None:
        """Show an object's text below the GPUs, newest first. Only the last 50 texts stay."""
        name = str(title or getattr(result, "title", None) or type(result).__name__)
        made = {"id": uuid4().hex, "title": name, "time": time.time(), "text": str(result)}
        self.results = [{**made, "bars": []}, *self.results][:KEPT]

    def close(self) -> None:
        """Close the monitor. Its last state stays in the notebook as a table."""
        if self._closed:
            return
        self._stop()
        self._closed = True
        self._save_table()
        for _, view in self._shown:
            update_display({"text/plain": "", "text/html": ""}, raw=True, display_id=view)
        layout = self.layout
        super().close()
        layout.close()

    def _ipython_display_(self, **kwargs: Any) -> None:
        table, view = uuid4().hex, uuid4().hex
        display(self._table(), raw=True, display_id=table)
        if self._closed:
            return
        data, metadata = self._repr_mimebundle_() or ({}, {})
        display({**data, "text/plain": ""}, metadata=metadata, raw=True, display_id=view)
        self._shown.append((table, view))

    def _table(self) -> dict[str, str]:
        shown = GpuTable(self._last)
        style = f"<style>{_NO_MODEL.format(self.table)}</style>"
        at = f"{datetime.fromtimestamp(self._last.time):%Y-%m-%d %H:%M:%S}"
        note = f'<div style="font-size: 11px; opacity: .7">As of {at}. {_NOTE}</div>'
        html = f'<div class="{self.table}">{style}{shown._repr_html_()}{note}</div>'
        return {"text/plain": f"{shown!r}\n\nAs of {at}.", "text/html": html}

    def _save_table(self) -> None:
        self._due = False
        for table, _ in self._shown:
            update_display(self._table(), raw=True, display_id=table)

    def _exit(self) -> None:
        self._closed = True
        self._subscription.close()
        self._save_table()

    def _start(self) -> None:
        with self._guard:
            if self._running or self._closed:
                return
            self._running = True
        self._log.install()
        self._audience.receives(not self._log.busy)
        atexit.register(self._exit)
        self.history = self._sampler.history.since(None)
        self._subscription = self._sampler.subscribe(
            self._tick, period_s=self.period, processes=True
        )
        self._unsubscribe = board.subscribe(self._measured)
        self._measured()

    def _stop(self) -> None:
        """Stop sampling and drop the data. `_start` resumes when a view is visible again."""
        with self._guard:
            if not self._running:
                return
            self._running = False
        self._subscription.close()
        self._unsubscribe()
        atexit.unregister(self._exit)
        self._log.uninstall()
        self.history = {}
        self.timing, self.timings = {}, []

    def _measured(self) -> None:
        if self._running:
            self.timing = board.now or {}
            self.timings = board.entries

    def _tick(self, snapshot: Snapshot, ended: str = "") -> None:
        """Handle a snapshot on the sampler's thread. `ended` is the id of a cell run that ended."""
        if self._closed or not self._running:
            return
        if not ended and not self._audience.anyone():
            self._stop()
            return
        self._last = snapshot
        self.snapshot = snapshot.to_dict()
        self._log.see(snapshot, ended)
        if ended:
            self.cells = self._log.runs()[-_SENT:]
        if ended or (self._due and not self._log.busy):
            self._save_table()

    def _on_cell(self) -> None:
        if self._closed:
            return
        self._audience.receives(not self._log.busy)
        self._due = True  # the next snapshot updates the table
        # Send only the latest cell runs, because an open view already has the earlier runs.
        self.cells = self._log.runs()[-_SENT:]
        if not self._log.busy:
            # A cell ended. Take a snapshot now, as a new cell may begin before the next snapshot.
            future, ended = self._sampler.fresh(processes=True, max_age_s=0), self._log.ended
            future.add_done_callback(lambda done: self._tick(done.result(), ended))

    def receive(self, _: Any, content: Any, buffers: Any) -> None:
        """Handle a view's message: a heartbeat, a request for variables, or the view's end."""
        message = content if isinstance(content, dict) else {}
        view, kind = str(message.get("id"))[:64], message.get("type")
        if kind == "alive":
            new = self._audience.look(view)
            self._start()
            if new:
                self.history = self._sampler.history.since(None)
                self.cells = self._log.runs()
        elif kind == "variables":  # from a view that shows the variables
            with faults.kept("sending the memory holders to the monitor"):
                self.variables = held_now()
        elif kind == "gone" and self._audience.leave(view):
            self._stop()
            self._save_table()
