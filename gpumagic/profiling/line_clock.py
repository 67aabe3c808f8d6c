"""Record which of the user's lines runs when, with `sys.settrace`.

A range of torch's profiler for each line would cost more memory than the operators: a loop in plain
Python changes its line ten million times a second. So only lines that run longer than any operator
are logged, with 32 bytes each. Shorter ones are sampled: the line that runs when they have added up
to `SAMPLE` gets all of their time.
"""

import sys
from array import array
from collections.abc import Iterator
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

from gpumagic.errors import GpuError
from gpumagic.usercode.files import UserLine, in_cell, is_users, source_of, user_frame

SHORT = 1_000
"""Nanoseconds: while torch's profiler runs, an operator takes longer than that."""
SAMPLE = 20_000
_LOOP = 200


class LineClock:
    """Log the lines of the user's code in this thread: `start`, run the code, then always `stop`.

    Raises GpuError if something else, such as a debugger, traces this thread.
    """

    def __init__(self) -> None:
        if sys.gettrace() is not None:
            raise GpuError("--profile: a debugger or coverage traces this thread; end it first")
        self._log = array("q")  # four each: start, duration, code, line
        self._codes: dict[int, tuple[CodeType, CodeType]] = {}  # as it runs, and as it was typed
        self._code = self._line = self._began = self._short = self._bias = 0
        self.ended = 0
        """When the cell's last statement ended: its error is shown later."""

    def start(self) -> None:
        """Trace the user's innermost frame and those that it calls."""
        self._bias = self._calibrate()
        frame = user_frame(sys._getframe(1))
        if frame is not None:
            self._know(frame)
            frame.f_trace = self._changed
            self._code, self._line = id(frame.f_code), frame.f_lineno
        self._began, self.ended = perf_counter_ns(), 0
        sys.settrace(self._called)

    def stop(self) -> None:
        """Stop, unless the user's code has stopped it."""
        if sys.gettrace() == self._called:
            sys.settrace(None)
        if not self.ended:
            self.ended = perf_counter_ns()
            self._add(self._began, self.ended - self._began)

    def _know(self, frame: FrameType) -> None:
        code = frame.f_code
        if id(code) not in self._codes:
            self._codes[id(code)] = code, in_cell(frame)[0]

    def _called(self, frame: FrameType, event: str, given: Any) -> Any:
        if not is_users(frame.f_code.co_filename):
            return None
        self._know(frame)
        return self._changed(frame, event, given)

    def _changed(self, frame: FrameType, event: str, given: Any) -> Any:
        now = perf_counter_ns()
        spent = now - self._began - self._bias
        if self.ended:  # between two statements of the cell
            self.ended = 0
        elif spent >= SHORT:
            self._add(self._began, spent)
        elif spent > 0:
            self._short += spent
            if self._short > SAMPLE:
                self._add(now - self._short, self._short)
                self._short = 0
        at = frame if event != "return" else self._outer(frame)
        if at is None:
            self.ended = now
        else:
            self._code, self._line = id(at.f_code), at.f_lineno
        self._began = perf_counter_ns()  # our own time belongs to no line
        return self._changed

    def _outer(self, frame: FrameType) -> FrameType | None:
        """Return the traced frame that a frame returns to; None at the end of a statement."""
        outer = user_frame(frame.f_back)
        return outer if outer is not None and id(outer.f_code) in self._codes else None

    def _calibrate(self) -> int:
        """Return the nanoseconds that Python takes to call us, which a line seems to take."""

        def loop() -> None:
            for _ in range(_LOOP):
                pass

        def called(frame: FrameType, *_: Any) -> Any:
            self._know(frame)
            return self._changed

        rounds = []
        for _ in range(9):
            self._short = 0
            sys.settrace(called)
            try:
                loop()
            finally:
                sys.settrace(None)
            spent = sum(self._log[1::4]) + self._short
            rounds.append(spent // (2 * _LOOP))
            del self._log[:]
        self._short = 0
        return sorted(rounds)[len(rounds) // 2]

    def _add(self, start: int, duration: int) -> None:
        self._log.extend((start, duration, self._code, self._line))

    def segments(self) -> Iterator[tuple[int, int, UserLine]]:
        """Yield when a line began, for how many nanoseconds it ran, and the line."""
        known: dict[tuple[int, int], UserLine] = {}
        log = self._log
        for n in range(0, len(log), 4):
            key = log[n + 2], log[n + 3]
            if key[0] in self._codes and key not in known:
                code, typed = self._codes[key[0]]
                line = key[1] - code.co_firstlineno + typed.co_firstlineno
                function = "" if code.co_name.startswith("<") else code.co_name
                file = typed.co_filename
                known[key] = UserLine(line, source_of(file, line), function, file)
            if key in known:
                yield log[n], log[n + 1], known[key]
