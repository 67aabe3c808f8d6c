"""Profile one cell: its operators with torch's profiler, its lines with `sys.settrace`.

A loop may run ten million lines a second, so only lines that take `SHORT` or longer are logged. The
times of shorter lines are summed. When the sum exceeds `SAMPLE`, the last line gets the sum.
"""

import gzip
import json
import os
import sys
from array import array
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import get_native_id
from time import perf_counter_ns, time_ns
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd import profiler

from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.faults import kept
from gpumagic.ledger.entry import Ledger, opcode
from gpumagic.profiling.cell_profile import CellProfile
from gpumagic.profiling.read_trace import CELL, LINE, read_trace
from gpumagic.usercode.files import UserLine, function_of, in_cell, is_users, source_of, user_frame

SHORT = 1_000  # nanoseconds; a line with an operator takes longer than this while torch profiles
SAMPLE = 20_000  # nanoseconds; the sum of short lines is logged when it exceeds this time
_LEVEL = "KINETO_LOG_LEVEL"


class CellProfiler:
    """Profile code. Call `start`, run the code, always call `stop`, then call `result`."""

    def __init__(self, device: Device, save: str = "") -> None:
        if torch._C._autograd._profiler_enabled():
            raise GpuError("--profile: a profiler of torch is already running; stop it first")
        if save and not Path(save).absolute().parent.is_dir():
            raise GpuError(f"--profile: there is no folder {Path(save).absolute().parent}")
        self._device, self._save = device, save
        self._lines = LineClock()
        kinds = {kind.name.lower() for kind in torch.profiler.supported_activities()} - {"cpu"}
        self._kind = kind = device.kind if device.kind in kinds and not device.virtual else None
        self._profile: Any = profiler.profile(use_kineto=True, use_device=kind)
        self._thread = self._began = 0
        self.stopping = 0.0  # seconds that the profiler took to stop, not part of the cell's time

    def start(self) -> None:
        ours = _LEVEL not in os.environ
        os.environ.setdefault(_LEVEL, "99")  # otherwise kineto logs to the cell's output
        try:
            self._profile.__enter__()
        finally:
            if ours:
                del os.environ[_LEVEL]
        self._thread, self._began = get_native_id(), perf_counter_ns()
        self._lines.start()

    def stop(self) -> None:
        """Wait for the device, then stop recording. Do nothing if `start` was not called."""
        self._lines.stop()
        if not self._profile.entered:
            return
        try:
            if self._kind:
                getattr(torch, self._kind).synchronize(self._device.ordinal)
        finally:
            began = perf_counter_ns()
            self._profile.use_device = None  # otherwise, `__exit__` would record one more wait
            self._profile.__exit__(None, None, None)
            self.stopping = (perf_counter_ns() - began) / 1e9

    def result(self, ledger: Ledger) -> CellProfile | None:
        """Save the trace if asked. Return the profile, with the copies and waits in `ledger`."""
        if self._profile.kineto_results is None:
            return None
        trace, saved = self._trace(), ""
        if self._save:
            write = gzip.open if self._save.endswith(".gz") else open
            with kept("saving the trace of a profile"):
                with write(self._save, "wt", encoding="utf-8") as file:
                    json.dump(trace, file)
                saved = self._save
        return read_trace(trace, ledger, saved)

    def _trace(self) -> dict[str, Any]:
        """Return torch's trace, with added events for the user's lines and the whole cell."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace.json")
            self._profile.kineto_results.save(str(path))
            del self._profile  # frees the memory of the events
            trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        # torch's clock is the time of day; `perf_counter_ns` begins at an arbitrary time.
        ahead = time_ns() - perf_counter_ns() - trace.get("baseTimeNanoseconds", 0)
        device = {"device": str(self._device), "virtual": self._device.virtual}
        whole = self._began, self._lines.ended - self._began
        rows = [(CELL, "cell", *whole, device | {"thread": self._thread})]
        rows += [(LINE, str(at), t, d, vars(at)) for t, d, at in self._lines.segments()]
        for cat, name, start, duration, args in rows:
            event = {"ph": "X", "pid": os.getpid(), "tid": "lines", "cat": cat, "name": name}
            times = {"ts": (start + ahead) / 1e3, "dur": duration / 1e3}
            trace["traceEvents"].append({**event, **times, "args": args})
        return trace


class LineClock:
    """Log when the user's lines run in this thread. Call `start`, run code, always call `stop`."""

    def __init__(self) -> None:
        if sys.gettrace() is not None:
            raise GpuError("--profile: a debugger or coverage traces this thread; end it first")
        self._log = array("q")  # four numbers for each period: start, duration, code's id, line
        self._codes: dict[int, tuple[CodeType, CodeType]] = {}  # by id: code as run and as typed
        self._code = self._line = self._began = self._short = self._bias = 0
        self.ended = 0  # when the last statement of the cell ended; 0 while a statement runs

    def start(self) -> None:
        """Trace the user's innermost frame from its next line on, and all functions it calls."""
        self._bias, self.ended = _bias(), perf_counter_ns()
        if (frame := user_frame(sys._getframe(1))) is not None:
            self._codes[id(frame.f_code)] = frame.f_code, in_cell(frame)[0]
            frame.f_trace = self._changed
        sys.settrace(self._called)

    def stop(self) -> None:
        """Stop tracing, unless the user's code has set another trace function."""
        if sys.gettrace() == self._called:
            sys.settrace(None)
        if not self.ended:
            self.ended = perf_counter_ns()
            self._add(self._began, self.ended - self._began)
        if self._code:
            self._add(self.ended - self._short, self._short)

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        code = frame.f_code
        if not is_users(code.co_filename):
            return None
        if id(code) not in self._codes:
            self._codes[id(code)] = code, in_cell(frame)[0]
        return self._changed(frame, event, given)

    def _changed(self, frame: FrameType, event: str, given: Any) -> Any:
        now = perf_counter_ns()
        spent = now - self._began - self._bias
        if self.ended:  # the time between two statements of the cell belongs to no line
            self.ended = 0
        elif spent >= SHORT:
            self._add(self._began, spent)
        elif spent > 0:
            self._short += spent
            if self._short > SAMPLE:
                self._add(now - self._short, self._short)
                self._short = 0
        at = user_frame(frame.f_back) if event == "return" else frame
        if at is None or id(at.f_code) not in self._codes:
            # While code is suspended at an `await`, the line of the `await` gets the time.
            ends = given is None or opcode(frame.f_code, frame.f_lasti).startswith("RETURN")
            at = None if ends else frame
        if at is None or not at.f_lineno:  # line 0 is the start of another statement
            self.ended = now
        else:
            self._code, self._line = id(at.f_code), at.f_lineno
        self._began = perf_counter_ns()  # the time of this function belongs to no line
        return self._changed

    def _add(self, start: int, duration: int) -> None:
        self._log.extend((start, duration, self._code, self._line))

    def segments(self) -> Iterator[tuple[int, int, UserLine]]:
        """Yield the start, the duration (in nanoseconds) and the line of each period."""

        @cache
        def line_of(code: int, number: int) -> UserLine:
            ran, typed = self._codes[code]
            line, file = number - ran.co_firstlineno + typed.co_firstlineno, typed.co_filename
            return UserLine(line, source_of(file, line), function_of(ran), file)

        for n in range(0, len(self._log), 4):
            start, duration, *where = self._log[n : n + 4]
            yield start, duration, line_of(*where)


def _bias() -> int:
    """Measure the nanoseconds that calling a trace function adds to the time of each line."""
    spent, began = array("q"), perf_counter_ns()

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal began
        spent.append(perf_counter_ns() - began)
        began = perf_counter_ns()
        return trace

    def loop() -> None:
        for _ in range(1_000):
            pass

    sys.settrace(trace)
    try:
        loop()
    finally:
        sys.settrace(None)
    return int(median(spent))
