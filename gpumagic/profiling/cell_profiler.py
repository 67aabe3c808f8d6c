"""Profile one cell with torch's profiler and the clock of its lines."""

import gzip
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter_ns
from typing import Any

import torch
from torch.autograd import profiler

from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.ledger.entry import Ledger
from gpumagic.profiling.cell_profile import CellProfile
from gpumagic.profiling.line_clock import LineClock
from gpumagic.profiling.read_trace import CELL, LINE, read_trace

_MARK = "gpumagic's mark"
_MARKS = 16
_LEVEL = "KINETO_LOG_LEVEL"


class CellProfiler:
    """Profile one stretch of code: `start`, run the code, then always `stop`; then `result`.

    Raises GpuError if another profiler of torch runs, or if there is no folder for the file `save`.
    """

    def __init__(self, device: Device, save: str = "") -> None:
        if torch._C._autograd._profiler_enabled():
            raise GpuError("--profile: a profiler of torch runs already; stop it first")
        if save and not Path(save).absolute().parent.is_dir():
            raise GpuError(f"--profile: there is no folder {Path(save).absolute().parent}")
        self._device, self._save = device, save
        self._lines = LineClock()
        kinds = {kind.name.lower() for kind in torch.profiler.supported_activities()} - {"cpu"}
        self._kind = device.kind if device.kind in kinds and not device.virtual else None
        self._profile: Any = None
        self._marks: list[int] = []
        self._began = 0
        self.stopping = 0.0
        """Seconds that the profiler took to stop, which are none of the cell's."""

    def start(self) -> None:
        """Begin to record."""
        self._profile = profiler.profile(use_kineto=True, use_device=self._kind)
        with _silent():
            self._profile.__enter__()
        self._mark()
        self._began = perf_counter_ns()
        self._lines.start()

    def stop(self) -> None:
        """End the recording when the device has finished; does nothing if it did not begin."""
        self._lines.stop()
        if self._profile is None or not self._profile.entered:
            return
        try:
            if self._kind:
                getattr(torch, self._kind).synchronize(self._device.ordinal)
            self._mark()
        finally:
            began = perf_counter_ns()
            self._profile.use_device = None  # it would wait once more, as if the user's code did
            with _silent():
                self._profile.__exit__(None, None, None)
            self.stopping = (perf_counter_ns() - began) / 1e9

    def _mark(self) -> None:
        """Make events at known times: they give the difference of torch's clock and Python's."""
        for _ in range(_MARKS):
            mark = torch._C._profiler._RecordFunctionFast(_MARK)
            before = perf_counter_ns()
            mark.__enter__()
            self._marks.append((before + perf_counter_ns()) // 2)
            mark.__exit__(None, None, None)

    def result(self, ledger: Ledger | None) -> CellProfile | None:
        """Return what was recorded, with the copies and waits of a ledger; save the trace."""
        if self._profile is None or self._profile.kineto_results is None:
            return None
        trace = self._trace()
        if self._save:
            write = gzip.open if self._save.endswith(".gz") else open
            with write(self._save, "wt", encoding="utf-8") as file:
                json.dump(trace, file)
        return read_trace(trace, ledger or Ledger(), self._save)

    def _trace(self) -> dict[str, Any]:
        """Return torch's trace with the user's lines as one more thread, and the cell itself."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.kineto_results.save(str(path))
            self._profile = None
            trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        events: list[dict[str, Any]] = trace["traceEvents"]
        marks = sorted(event["ts"] for event in events if event["name"] == _MARK)
        thread = next(event["tid"] for event in events if event["name"] == _MARK)
        events[:] = [event for event in events if event["name"] != _MARK]
        pairs = zip(marks, sorted(self._marks), strict=True)
        ahead = median(theirs * 1e3 - ours for theirs, ours in pairs)
        row = {"ph": "X", "pid": os.getpid(), "tid": "lines"}

        def at(start: int, duration: int) -> dict[str, float]:
            return {"ts": (start + ahead) / 1e3, "dur": duration / 1e3}

        cell = {"device": str(self._device), "virtual": self._device.virtual, "thread": thread}
        span = at(self._began, self._lines.ended - self._began)
        events.append(row | {"cat": CELL, "name": "cell", "args": cell} | span)
        for start, duration, line in self._lines.segments():
            args = {"file": line.file, "line": line.line, "function": line.function}
            named = {"cat": LINE, "name": str(line), "args": args | {"source": line.source}}
            events.append(row | named | at(start, duration))
        return trace


@contextmanager
def _silent() -> Iterator[None]:
    """Keep kineto's log off the cell's output, unless the user has set its level."""
    ours = _LEVEL not in os.environ
    os.environ.setdefault(_LEVEL, "99")
    try:
        yield
    finally:
        if ours:
            os.environ.pop(_LEVEL, None)
