"""Time the same code on several devices, and at several values: `gpumagic.compare`.

Guarantees: Ctrl-C keeps what is finished, and process-wide settings are restored. The last
comparison is kept, and the monitor shows the progress.
"""

import contextvars
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from gpumagic import faults
from gpumagic.device import cuda_state
from gpumagic.display.table import view
from gpumagic.errors import GpuError, as_typed
from gpumagic.frameworks.known import Needed
from gpumagic.isolation.settings import Randomness, deferred, kept
from gpumagic.telemetry.history import board
from gpumagic.timing.agreement import Agreeing
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.measurement import (
    Measuring,
    Task,
    is_out_of_memory,
    say_where,
    short,
)
from gpumagic.timing.runner import Stopwatch
from gpumagic.timing.timing import Progress, Reporter, TimedDevices, Timing, targets
from gpumagic.usercode import sweep as sweeping
from gpumagic.usercode.program import program
from gpumagic.usercode.values import torch_here

_OUT_OF_MEMORY, _INTERRUPTED = "out of memory", "interrupted"
_PRINTED = "what the code prints or displays is shown of its first run only"


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
    """Time `code` on each device, on copies of the variables that it reads.

    On each device, and at each value of a sweep: its inputs are copied there, `setup` runs, the
    code runs once (its results are compared between the devices, and its copies counted), then
    again until it is steady, then in repeats until the 95 % interval of the median is narrower
    than 1 % of it, or `max_time` is reached. A run that takes longer than a fifth of `max_time`
    has no warm-up but the first run; it is repeated at least once, however long it takes.

    Parameters
    ----------
    code : str or callable
        What one run is.
    devices : iterable or str, optional
        ``"cpu"``, ``"cuda:1"``, ``0``, ``"0+1"`` for two at the same time; the CPU and every GPU
        if None.
    setup : str
        Python code to run before, on each device and at each value, untimed.
    sweep : mapping, optional
        The values that a variable takes: ``{"n": [64, 256]}``.
    items : float or str, optional
        Items in one run, for the throughput; or an expression for it, such as
        ``"len(sentences)"`` or ``"n * n"``, in which the sweep's variable has its value.
    max_time : float
        Seconds for each device and value, without copying and the first run.
    namespace : dict, optional
        The variables of the code; if None, those of the function, or the caller's.
    against : Comparison or "last", optional
        An earlier comparison, to say what changed; "last" counts only with the same code and
        devices.
    progress : callable, optional
        Called with a `Progress`, ten times a second at most, never while something is timed.
    filename : str, optional
        Where `code` is from, for tracebacks.
    text : str, optional
        How `code` is shown, if it was generated from other text.
    stopwatch : Stopwatch, optional
        Another clock, or other devices, to measure with.

    Returns
    -------
    Comparison
        After Ctrl-C it has the finished timings, and ``interrupted`` is True.

    Raises
    ------
    GpuError
        No such device, the same device twice, no code, or a wrong sweep.
    Exception
        The code's own error, with a note of the device and the line. At later values of a sweep the
        error is noted in the timing instead, and so is a device that is out of memory.
    """
    if namespace is None:
        own = getattr(inspect.unwrap(code), "__globals__", None) if callable(code) else None
        caller = inspect.currentframe()
        outer = caller.f_back.f_globals if caller and caller.f_back else {}
        namespace = own if own is not None else outer
    cuda_state.check()
    needed = Needed.by(namespace, setup, code)
    wanted = targets(devices, needed)
    _check(max_time)
    values = sweeping.check(sweep) if sweep else {}
    made = program(code, namespace, setup=setup, filename=filename, text=text)
    points = sweeping.points(values)
    each = sweeping.worked_through(items, namespace, points)
    by_point = {sweeping.key(point): count for point, count in zip(points, each, strict=True)}
    stopwatch = stopwatch or Stopwatch(others=needed.others)

    def told(now: Progress) -> None:
        board.post(now.posted())
        if progress is not None:
            progress(now)

    title = made.text.strip().partition("\n")[0].rstrip()
    total, wheres = len(points) * len(wanted), [target.where for target in wanted]
    task = Task(
        made,
        wanted,
        needed,
        namespace,
        max_time,
        stopwatch,
        Randomness(),
        Reporter(told, title, wheres, total, stopwatch.clock),
        Agreeing(),
        by_point,
    )
    comparing = Comparing(task, points)
    try:
        contextvars.copy_context().run(comparing.run)  # its settings end with it
    finally:
        board.post(None)
    result = Comparison(
        code=made.text.strip("\n"),
        timings=tuple(comparing.timings),
        agreements=tuple(task.agreeing.worst.values()),
        time=time.time(),
        sweep=values,
        items=each[0] if len(set(each)) == 1 else None,
        setup=setup,
        notes=(
            *([_no_gpu()] if devices is None and len(wanted) == 1 else []),
            *sweeping.unread(values, made, namespace),
            *comparing.notes,
        ),
        interrupted=comparing.interrupted,
    )
    earlier = last_comparison() if against == "last" else against
    if isinstance(earlier, Comparison):
        result = result.against(earlier, alike=against == "last")
    _last[:] = [result]
    # A view that fails must not lose minutes of measuring.
    with faults.kept("drawing a comparison for the monitor"):
        board.keep(repr(result), result.time, **view(result).panel(result))
    return result


def _no_gpu() -> str:
    virtual = as_typed("%gpus --virtual 2")
    return f"there is no GPU to compare with; {virtual} makes two to try it with"


_last: list[Comparison] = []


def last_comparison() -> Comparison | None:
    """Return the last comparison of this process; None before the first."""
    return _last[0] if _last else None


def _check(max_time: float) -> None:
    if not (max_time > 0 and math.isfinite(max_time)):
        raise GpuError(f"max_time={max_time} is not a number above 0; type one, such as max_time=5")


class Comparing:
    """All measurements: each value on every device before the next."""

    def __init__(self, task: Task, points: Sequence[Mapping[str, Any]]) -> None:
        self.timings: list[Timing] = []
        self.notes: dict[str, None] = dict.fromkeys(t.note for t in task.targets if t.note)
        self.interrupted = False
        self._task, self._points = task, points
        self._added: Measuring | None = None
        self._ended: dict[str, list[Mapping[str, Any]]] = {}

    def run(self) -> None:
        """Measure; Ctrl-C ends it, and finished timings are kept."""
        try:
            try:
                for values in self._points:
                    for target in self._task.targets:
                        if not self._is_beyond(target.where, values):
                            self._measure(target, values)
                self._task.reporter.close()
            finally:
                with deferred():
                    self._task.agreeing.forget()
                    _give_back()
        except KeyboardInterrupt:
            self.interrupted = True
            self._leave_out()
        if self.interrupted:  # only now: until here the exception's traceback kept its objects
            _give_back()

    def _leave_out(self) -> None:
        """Add timings without a time for the devices that were not measured."""
        known = {timing.where for timing in self.timings}
        at = self.timings[-1].values if self.timings else self._points[0]
        for target in self._task.targets:
            if target.where not in known:
                self.timings.append(Measuring(self._task, target, at).timing(_INTERRUPTED))

    def _measure(self, target: TimedDevices, values: Mapping[str, Any]) -> None:
        task = self._task
        one = Measuring(task, target, values)
        failure: str | None = None
        try:
            task.reporter.begin(target.where, values)
            with kept():
                one.run()
            self._add(one, None)
        except KeyboardInterrupt:
            self._add(one, None if one.timing().seconds else _INTERRUPTED)
            raise
        except Exception as error:
            if is_out_of_memory(error) and len(task.targets) * len(self._points) > 1:
                failure = _OUT_OF_MEMORY
                self._ended.setdefault(target.where, []).append(values)
            elif any(t.where == target.where and t.seconds for t in self.timings):
                failure = short(error, task.program.filename)
            else:
                say_where(error, task.program.filename, one.failed, values)
                raise
        # Outside the handler: the exception's traceback would keep the memory.
        if failure is not None:
            self._add(one, failure)
            _give_back()

    def _add(self, one: Measuring, error: str | None) -> None:
        if self._added is one:  # an interrupt came just after
            return
        timing = one.timing(error)
        self.timings.append(timing)
        self._added = one
        self.notes |= dict.fromkeys((*one.notes, *([_PRINTED] if one.quiet.dropped else [])))
        self._task.reporter.end(timing.median, error or "done")

    def _is_beyond(self, where: str, values: Mapping[str, Any]) -> bool:
        """Whether the device was out of memory at this or a smaller value."""
        for ended in self._ended.get(where, []):
            with suppress(TypeError):
                if all(values[name] >= value for name, value in ended.items()):
                    return True
        return False


def _give_back() -> None:
    """Empty torch's cache, which the copies have filled."""
    cuda_state.collect()
    torch = torch_here()
    if torch is None:
        return
    # A failed GPU raises here too; the cell's own error says more.
    with suppress(RuntimeError, AssertionError):
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        elif torch.xpu.is_initialized():
            torch.xpu.empty_cache()
        elif torch.backends.mps.is_available():
            torch.mps.empty_cache()
