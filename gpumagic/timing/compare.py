"""Implement `gpumagic.compare`: time the same code on several devices and for several values."""

import contextvars
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

from gpumagic import faults
from gpumagic.device import cuda_state
from gpumagic.display.table import view
from gpumagic.errors import GpuError, as_typed, note
from gpumagic.frameworks.known import Needed
from gpumagic.isolation.settings import deferred, kept
from gpumagic.telemetry.history import board
from gpumagic.timing.comparison import Comparison, Timing
from gpumagic.timing.comparison_view import bars
from gpumagic.timing.measurement import Measuring, Target, Task, where_of
from gpumagic.timing.runner import Repeats, Stopwatch
from gpumagic.usercode import sweep as sweeping
from gpumagic.usercode.program import namespace_of, program
from gpumagic.usercode.values import comes_from

_PERIOD_S = 0.1  # seconds between two reports of the progress
_BEGIN = "inputs and first run"
_ERRORS = ("torch.OutOfMemoryError", "tensorflow.errors.ResourceExhaustedError")
_MESSAGES = ("DefaultCPUAllocator", "RESOURCE_EXHAUSTED: Out of memory")
_PRINTED = "the output of the code is shown for its first run only"


@dataclass(frozen=True)
class Progress:
    """The progress of a comparison."""

    title: str  # the first line of the code
    where: str  # the measured device, or devices: "cuda:0+cuda:1"
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's variable: {"n": 64}
    stage: str = _BEGIN  # followed by "warm up" and "timing"
    done: int = 0  # finished measurements, each of one device at one value
    total: int = 1
    # For each device: name, median so far, and state ("waiting", a stage, "done", or an error).
    bars: tuple[tuple[str, float | None, str], ...] = ()

    def __str__(self) -> str:
        """Return a line such as ``"cuda:0 · n = 256 · timing · 2 of 3"``."""
        parts = [self.where, *(f"{name} = {value}" for name, value in self.values.items())]
        count = f"{self.done + 1} of {self.total}" if self.total > 1 else ""
        return " · ".join(filter(None, (*parts, self.stage, count)))


def compare(
    code: str | Callable[[], Any],
    devices: Iterable[object] | str | None = None,
    *,
    setup: str = "",
    sweep: Mapping[str, Iterable[Any]] | None = None,
    items: float | str | None = None,
    max_time: float = 5.0,
    namespace: dict[str, Any] | None = None,
    against: Comparison | Literal["last"] | None = None,
    progress: Callable[[Progress], object] | None = None,
    filename: str | None = None,
    text: str | None = None,
    stopwatch: Stopwatch | None = None,
) -> Comparison:
    """Time `code` on each device, on copies of the variables that the code reads.

    For each device and each value of `sweep`, the variables are copied, `setup` runs, and then the
    code runs once. The results of this first run are compared between the devices. Next, the code
    runs until its time is steady. Timed repeats follow, at least one. They end when the median's
    95 % confidence interval is narrower than 1 % of the median, or after `max_time`.

    Parameters
    ----------
    code : str or callable
        The code of one run.
    devices : iterable or str, optional
        Such as ``"cpu"``, ``"cuda:1"`` or ``0``; ``"0+1"`` means both GPUs at the same time.
        None: the CPU and every GPU.
    setup : str
        Python code that runs untimed before the code, for each device and value.
    sweep : mapping, optional
        The values that a variable takes: ``{"n": [64, 256]}``.
    items : float or str, optional
        Number of items in one run, to compute the throughput; or an expression for this number,
        such as ``"len(sentences)"``. The expression may use the sweep's variable.
    max_time : float
        Maximum seconds for each device and value; copying, `setup` and the first run do not count.
    namespace : dict, optional
        The variables of the code. None: the globals of the function, or of the caller.
    against : Comparison or "last", optional
        An earlier comparison to compare with; ``"last"``: the last comparison of this process.
    progress : callable, optional
        Called with a `Progress`, at most ten times a second, and never during a timed run.
    filename, text : str, optional
        `filename` is the name of the code in tracebacks. `text` is shown in place of the code.
    stopwatch : Stopwatch, optional
        The clock to use, and the frameworks whose devices are synchronized.

    Returns
    -------
    Comparison
        The timings. After Ctrl-C, ``interrupted`` is True, and later measurements are missing.

    Raises
    ------
    GpuError
        If an argument is invalid, or a device does not exist or is given twice.
    Exception
        An error in the code, with a note that names the device and the line. If the device has
        finished another value of the sweep, the error is not raised, but stored in the timing. An
        out-of-memory error is raised only if there is one device and one value.
    """
    if namespace is None:
        namespace = namespace_of(code, sys._getframe(1))
    cuda_state.check()
    if not (max_time > 0 and math.isfinite(max_time)):
        raise GpuError(f"max_time={max_time} is not a number above 0; type one, such as max_time=5")
    needed = Needed.by(namespace, setup, code)
    wanted = targets(devices, needed)
    values = sweeping.check(sweep) if sweep else {}
    made = program(code, namespace, setup=setup, filename=filename, text=text)
    points = sweeping.points(values)
    counts = sweeping.items_per_run(items, namespace, points)
    comparing = Comparing(
        program=made,
        targets=wanted,
        needed=needed,
        namespace=namespace,
        max_time=max_time,
        stopwatch=stopwatch or Stopwatch(needed.frameworks),
        items={sweeping.key(point): n for point, n in zip(points, counts, strict=True)},
        points=points,
        tell=progress or (lambda now: None),
        notes=dict.fromkeys(filter(None, (d.note for d in chain.from_iterable(wanted)))),
    )
    try:
        contextvars.copy_context().run(comparing.run)  # discards changes to context variables
    finally:
        board.post(None)
    nothing = f"there is no GPU to compare with; {as_typed('%gpus --virtual 2')} makes two"
    alone = [nothing] if devices is None and len(wanted) == 1 else []
    result = Comparison(
        code=made.text.strip("\n"),
        timings=tuple(comparing.timings),
        agreements=tuple(comparing.agreeing.found),
        time=time.time(),
        sweep=values,
        setup=setup,
        notes=(*alone, *sweeping.unread(values, made, namespace), *comparing.notes),
        interrupted=comparing.interrupted,
    )
    earlier = last_comparison() if against == "last" else against
    if isinstance(earlier, Comparison):
        result = result.against(earlier)
    _last[:] = [result]
    with faults.kept("drawing a comparison for the monitor"):
        board.keep(repr(result), result.time, **view(result).panel(result))
    return result


def targets(given: Iterable[object] | str | None, needed: Needed) -> tuple[Target, ...]:
    """Return a tuple of devices for each name in `given`. None means the CPU and every GPU."""
    if given is None:
        return tuple((device,) for device in [needed.find("cpu"), *needed.devices()])
    if isinstance(given, str) or not isinstance(given, Iterable):
        given = [given]
    found: dict[str, Target] = {}
    for target in (target for one in given for target in _named(one, needed)):
        # If GPU 2 is missing, `2?` means a CPU with a `note`. A second such CPU is no error.
        if (where := where_of(target)) in found and not (target[0].note or found[where][0].note):
            raise GpuError(f"{where} is named twice; type it once")
        found[where] = target
    if not found:
        raise GpuError("no device in the list; type cpu 0, or leave the list out for all devices")
    return tuple(found.values())


def _named(one: object, needed: Needed) -> list[Target]:
    if not isinstance(one, str):
        return [(needed.find(one),)]
    found: list[Target] = []
    # Blanks and commas separate devices. Blanks next to a plus do not.
    for part in re.split(r"\s*,\s*|\s+", re.sub(r"\s*\+\s*", "+", one.strip(" ,"))):
        if part.lower() == "all" and (every := needed.devices()):
            found += [(device,) for device in every]
            continue
        if "+" in part and not all(part.split("+")):
            raise GpuError(f"a device is missing in {part}; type two or more, such as 0+1")
        target = tuple(needed.find(name) for name in part.split("+"))
        if len(set(map(str, target))) < len(target):
            raise GpuError(f"{part} names a device twice; type different ones, such as 0+1")
        found.append(target)
    return found


_last: list[Comparison] = []


def last_comparison() -> Comparison | None:
    """Return the last comparison of this process; None before the first."""
    return _last[0] if _last else None


@dataclass(kw_only=True)
class Comparing(Task):
    """All measurements of a comparison: the sweep's first value on all devices, then the next."""

    points: Sequence[Mapping[str, Any]]
    tell: Callable[[Progress], object]
    notes: dict[str, None]
    timings: list[Timing] = field(default_factory=list)
    interrupted: bool = False
    _reported: float = -math.inf
    # For each device, the first point of the sweep at which memory ran out.
    _full: dict[str, Mapping[str, Any]] = field(default_factory=dict)

    def run(self) -> None:
        """Measure everything. Ctrl-C ends this early, and the timings so far are kept."""
        try:
            try:
                for values in self.points:
                    for target in self.targets:
                        if not self._cannot_fit(where_of(target), values):
                            self._measure(target, values)
            finally:
                with deferred():
                    self.agreeing.forget()
                    cuda_state.give_back()
        except KeyboardInterrupt:
            self.interrupted = True
        if self.interrupted:  # not in the handler, where the traceback keeps objects alive
            cuda_state.give_back()

    def _cannot_fit(self, where: str, values: Mapping[str, Any]) -> bool:
        points = values, self._full.get(where, {})
        now, full = (next(map(sweeping.number, point.values()), None) for point in points)
        return now is not None and full is not None and now >= full

    def _measure(self, target: Target, values: Mapping[str, Any]) -> None:
        where = where_of(target)
        tell = partial(self._tell, where, values)
        one = Measuring(self, target, values, tell)
        failure: str | None = None
        try:
            tell(_BEGIN)
            with kept():
                one.run()
        except KeyboardInterrupt:
            self._add(one, None if one.timing().seconds else "interrupted")
            raise
        except Exception as error:
            line = _line_of(error, self.program.filename)
            if _is_out_of_memory(error) and len(self.targets) * len(self.points) > 1:
                failure = "out of memory"
                self._full.setdefault(where, values)
            elif any(t.where == where and t.seconds for t in self.timings):
                failure = faults.in_words(error) + line
            else:
                at = "".join(f", {name} = {value!r}" for name, value in values.items())
                note(error, f"timed on {where}{at}{line}")
                raise
        self._add(one, failure)
        # Outside the handler, because the exception's traceback would keep the memory alive.
        if failure is not None:
            cuda_state.give_back()

    def _tell(
        self, where: str, values: Mapping[str, Any], stage: str, repeats: Repeats | None = None
    ) -> None:
        if (now := self.stopwatch.clock()) - self._reported < _PERIOD_S:
            return
        self._reported = now
        wheres = map(where_of, self.targets)
        states: dict[str, tuple[float | None, str]] = dict.fromkeys(wheres, (None, "waiting"))
        for timing in self.timings:
            if sweeping.key(timing.values) == sweeping.key(values):
                states[timing.where] = timing.median, timing.error or "done"
        states[where] = repeats.median() if repeats and repeats.laps else None, stage
        title = self.program.text.strip().partition("\n")[0].rstrip()
        done, total = len(self.timings), len(self.points) * len(states)
        shown = tuple((name, *bar) for name, bar in states.items())
        progress = Progress(title, where, dict(values), stage, done, total, shown)
        with faults.kept("showing the progress of a comparison"):
            board.post({"line": f"{progress.title} · {progress}", "bars": bars(progress.bars)})
            self.tell(progress)

    def _add(self, one: Measuring, error: str | None) -> None:
        self.timings.append(one.timing(error))
        self.notes |= dict.fromkeys((*one.notes, *([_PRINTED] if one.quiet.dropped else [])))


def _is_out_of_memory(error: BaseException) -> bool:
    known = isinstance(error, MemoryError) or comes_from(type(error), *_ERRORS)
    # The errors of torch's CPU allocator and of JAX can be recognized only by the message.
    return known or any(words in str(error) for words in _MESSAGES)


def _line_of(error: BaseException, filename: str) -> str:
    """Return the innermost line of `filename` in a traceback, as ``", line 3"``; or empty."""
    trace = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_code.co_filename == filename]
    return f", line {lines[-1]}" if lines else ""
