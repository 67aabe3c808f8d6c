"""Record what is measured: the devices, the times, their spread, and the progress."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

from gpumagic import faults
from gpumagic.device import Device
from gpumagic.display.units import age, duration
from gpumagic.errors import GpuError
from gpumagic.frameworks.known import Needed
from gpumagic.usercode.values import comes_from


@dataclass(frozen=True)
class TimedDevices:
    """One device, or several at the same time."""

    parts: tuple[Device, ...]

    @property
    def where(self) -> str:
        """``"cuda:1"``, or ``"cuda:0+cuda:1"``."""
        return "+".join(str(device) for device in self.parts)

    @property
    def note(self) -> str | None:
        """Why another device than the requested one was used."""
        return next((device.note for device in self.parts if device.note), None)


def targets(given: Iterable[object] | str | None, needed: Needed) -> tuple[TimedDevices, ...]:
    """Return the named targets in order; the CPU and every GPU if None."""
    if given is None:
        return tuple(TimedDevices((d,)) for d in [needed.find("cpu"), *needed.devices()])
    single = isinstance(given, (str, int, Device)) or comes_from(type(given), "torch.device")
    if single or not isinstance(given, Iterable):
        given = [given]
    found: dict[str, TimedDevices] = {}
    for one in given:
        for target in _named(one, needed):
            if target.where in found:
                said = target.note or found[target.where].note
                raise GpuError(
                    f"{target.where} is named twice{f' ({said})' if said else ''}; type it once"
                )
            found[target.where] = target
    if not found:
        raise GpuError("no device is named; type some, such as cpu 0, or none for all of them")
    return tuple(found.values())


def _named(one: object, needed: Needed) -> list[TimedDevices]:
    if not isinstance(one, str):
        return [TimedDevices((needed.find(one),))]
    made = []
    # A blank next to a comma or a plus separates nothing.
    for part in re.split(r"\s*,\s*|\s+", re.sub(r"\s*\+\s*", "+", one.strip(" ,"))):
        if part.lower() == "all" and (every := needed.devices()):
            made += [TimedDevices((device,)) for device in every]
        else:
            if "+" in part and not all(part.split("+")):
                raise GpuError(f"a device is missing in {part}; type two or more, such as 0+1")
            parts = tuple(needed.find(name) for name in part.split("+"))
            if len({str(device) for device in parts}) < len(parts):
                raise GpuError(f"{part} names a device twice; type different ones, such as 0+1")
            made.append(TimedDevices(parts))
    return made


CONFIDENCE = 0.95
# Fewer repeats have no 95 % interval: 2 · 0.5⁵ is more than 5 %.
LEAST = 6


@dataclass(frozen=True)
class Timing:
    """One device, at one value of the sweep; its times are seconds of one run."""

    where: str  # "cpu", "cuda:1", or "cuda:0+cuda:1" for two at the same time
    # For each repeat: from its first statement until every device was done.
    seconds: tuple[float, ...] = ()
    # The same, until Python continued; less than `seconds` if the device was still busy.
    host: tuple[float, ...] = ()
    number: int = 1  # runs in each repeat, whose mean is one of `seconds`
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's variables: {"n": 256}
    name: str | None = None  # the device's
    virtual: bool = False  # its times are the CPU's
    copied: int = 0  # bytes of the inputs, copied once before
    copy_seconds: float = 0.0  # not part of `seconds`
    # Seconds of compiling in the first run, not part of `seconds`; None if unknown.
    compiled: float | None = None
    # Seconds of the first run with tracing and compiling, if these are not known separately.
    first: float | None = None
    # Peak bytes of the allocator above those held before the run, by device; unknown if missing.
    peak: Mapping[str, int] = field(default_factory=dict)
    # Copies between devices and waits in one run, as the ledger says it.
    transfers: str = ""
    alone: tuple[float, ...] = ()  # for two at the same time: the same runs one after the other
    # Why there are no `seconds`: "out of memory", "interrupted" or an exception's line.
    error: str | None = None
    items: float | None = None  # items in one run there
    steady: bool = True  # False if the time limit came before the median settled

    @cached_property
    def median(self) -> float | None:
        """Seconds of one run; None if nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @cached_property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile of the repeats, in seconds."""
        return quartiles(self.seconds) if self.seconds else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median; see `interval` for fewer than six repeats."""
        return interval(self.seconds) if self.seconds else None

    @property
    def iqr(self) -> float | None:
        """The interquartile range relative to the median; None for fewer than four repeats."""
        if self.quartiles is None or len(self.seconds) < 4 or not self.median:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    def differs(self, other: Timing) -> bool:
        """Whether two medians differ by more than both spreads."""
        # With thousands of repeats the 95 % interval is narrower than the difference between two
        # runs of a program. So neither median may lie between the other's quartiles either.
        low, high = sorted((self, other), key=lambda t: t.median or 0.0)
        if not (low.interval and high.interval and low.quartiles and high.quartiles):
            return False
        apart = low.interval[1] < high.interval[0] and low.quartiles[1] < (high.median or 0.0)
        return apart and (low.median or 0.0) < high.quartiles[0]

    @property
    def unsteady(self) -> bool:
        """Whether the repeats are noisy, by the rule of torch.utils.benchmark's Measurement."""
        return self.iqr is not None and self.iqr >= 0.1

    @property
    def host_median(self) -> float | None:
        """Seconds until Python continued; None if unknown."""
        return statistics.median(self.host) if self.host else None

    @property
    def scaling(self) -> float | None:
        """For ``0+1``: how much faster both together are than one after the other."""
        return statistics.median(self.alone) / self.median if self.alone and self.median else None

    def rate(self, items: float | None = None) -> float | None:
        """Return items per second, of `items` if it has none; two devices process twice as many."""
        worked = (self.items or items or 0) * (self.where.count("+") + 1)
        return worked / self.median if worked and self.median else None


@dataclass(frozen=True)
class Agreement:
    """Whether a device's results agree with the first one's."""

    where: str
    reference: str
    same: bool | None  # None if they were not compared
    # The largest absolute difference, and the result's name.
    largest: float | None = None
    name: str | None = None
    # Why they were not compared, or how they differ.
    reason: str = ""
    # The sweep's variable; empty without a sweep, or if all values agree equally.
    values: Mapping[str, Any] = field(default_factory=dict)


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, for any distribution.

    It lies between the j-th smallest and the j-th largest (J.-Y. Le Boudec, Performance Evaluation
    of Computer and Communication Systems, 2010, theorem 2.1 and its table in appendix A). For fewer
    than `LEAST` values it is the whole range, which covers the median at 94 % for five, 50 % for
    two.
    """
    ordered = sorted(seconds)
    rank = _rank(len(ordered))
    return ordered[rank - 1], ordered[-rank]


@lru_cache(maxsize=128)
def _rank(count: int) -> int:
    if count < LEAST:
        return 1
    if count > 70:
        return max(math.floor(0.5 * count - 0.980 * math.sqrt(count)), 1)
    below, rank, limit = 0, 0, (1 - CONFIDENCE) / 2 * 2**count
    while below + math.comb(count, rank) <= limit:
        below += math.comb(count, rank)
        rank += 1
    return rank


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile, interpolated as by `torch.quantile` and Measurement."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, third


Stage = Literal["copy", "warm up", "timing", "done"]
_PERIOD_S = 0.1  # between two reports of the progress


@dataclass(frozen=True)
class Progress:
    """The progress of a comparison."""

    title: str  # the first line of the code
    where: str  # the device being measured
    values: Mapping[str, Any] = field(default_factory=dict)  # of the sweep's variable
    stage: Stage = "copy"
    repeat: int = 0  # that were timed; 0 in the other stages
    done: int = 0  # measurements, each of one device at one value
    total: int = 1
    elapsed: float = 0.0  # seconds
    remaining: float | None = (
        None  # seconds, estimated from finished measurements; None before the first
    )
    # For each device: where, its median so far, and `"waiting"`, a stage, `"done"`, or an error.
    bars: tuple[tuple[str, float | None, str], ...] = ()

    def __str__(self) -> str:
        """``"cuda:0 · n = 256 · repeat 12 · 2 of 3 devices · about 4 s left"``."""
        parts = [self.where, *(f"{name} = {value}" for name, value in self.values.items())]
        if self.stage == "timing":
            parts.append(f"repeat {self.repeat}" if self.repeat else "first run")
        else:
            parts.append("inputs and first run" if self.stage == "copy" else self.stage)
        if self.total > 1:
            kind = "" if self.values else " devices"
            parts.append(f"{min(self.done + 1, self.total)} of {self.total}{kind}")
        # 0 means that the estimate was too short.
        if self.remaining:
            parts.append(f"about {age(max(self.remaining, 1))} left")
        return " · ".join(part for part in parts if part)

    @property
    def share(self) -> float | None:
        """The finished part of the time; None while the rest is unknown."""
        if self.remaining is None:
            return None
        return self.elapsed / ((self.elapsed + self.remaining) or 1.0)

    def posted(self) -> dict[str, Any]:
        """Return JSON for the monitor: a line, and a bar for each device."""
        return {"line": f"{self.title} · {self}", "bars": bars(self.bars)}


def bars(medians: Sequence[tuple[str, float | None, str]]) -> list[dict[str, Any]]:
    """Return each device's share of the slowest median; its state if it has no median."""
    spelled = {"copy": "copying"}
    slowest = max((seconds for _, seconds, _ in medians if seconds), default=0.0)
    return [
        {
            "where": where,
            "share": seconds / slowest if seconds else 0.0,
            "text": duration(seconds) if seconds is not None else spelled.get(state, state),
        }
        for where, seconds, state in medians
    ]


class Reporter:
    """Call `call` at most ten times a second; its errors do not end the comparison."""

    def __init__(
        self,
        call: Callable[[Progress], object],
        title: str,
        wheres: Sequence[str],
        total: int,
        clock: Callable[[], float],
    ) -> None:
        self._call, self._clock = call, clock
        self._now = Progress(title, wheres[0], total=total)
        self._bars: dict[str, tuple[float | None, str]] = dict.fromkeys(wheres, (None, "waiting"))
        self._began = self._begun = clock()
        self._told = -math.inf

    @property
    def due(self) -> bool:
        """Whether the next report is due."""
        return self._clock() - self._told >= _PERIOD_S

    def begin(self, where: str, values: Mapping[str, Any]) -> None:
        """Report that the measurement of a device at a value begins."""
        if values != self._now.values:
            self._bars = dict.fromkeys(self._bars, (None, "waiting"))
        self._now = replace(self._now, where=where, values=dict(values))
        self._begun = self._clock()
        self.at("copy")

    def at(self, stage: Stage, repeat: int = 0, median: float | None = None) -> None:
        """Report the stage and the median so far."""
        self._now = replace(self._now, stage=stage, repeat=repeat)
        self._bars[self._now.where] = median, stage
        self._tell()

    def end(self, median: float | None, state: str = "done") -> None:
        """Report that the measurement has ended."""
        self._now = replace(self._now, done=self._now.done + 1)
        self._bars[self._now.where] = median, state
        self._tell()

    def close(self) -> None:
        """Report that everything is done."""
        self._now = replace(self._now, stage="done")
        self._told = -math.inf
        self._tell()

    def _tell(self) -> None:
        if not self.due:
            return
        now = self._told = self._clock()
        bars = tuple((where, *bar) for where, bar in self._bars.items())
        with faults.kept("showing how far a comparison is"):
            elapsed, remaining = now - self._began, self._remaining(now)
            self._call(replace(self._now, elapsed=elapsed, remaining=remaining, bars=bars))

    def _remaining(self, now: float) -> float | None:
        done = self._now.done
        if self._now.stage == "done":
            return 0.0
        if not done:
            return None
        each = (self._begun - self._began) / done
        rest = max(self._now.total - done - 1, 0) * each
        # A first run may take longer and says nothing about the following runs.
        return rest + max(each - (now - self._begun), 0.0)
