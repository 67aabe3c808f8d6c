"""Record what was measured: one `Timing` for each device and value of a sweep."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch.utils.benchmark import Measurement, TaskSpec

from gpumagic.timing.result import spread


@dataclass(frozen=True)
class Timing:
    """One device, at one value of the sweep; its times are seconds of one run."""

    where: str  # "cpu", "cuda:1", or "cuda:0+cuda:1" for two at the same time
    # One for each repeat: from its first statement until every device was done.
    seconds: tuple[float, ...] = ()
    # The same, until Python went on; less than `seconds` where the device was still busy.
    host: tuple[float, ...] = ()
    # The same by the devices' own events; None where there is no GPU.
    device: tuple[float, ...] | None = None
    number: int = 1  # runs in each repeat, whose mean is one of `seconds`
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's variables: {"n": 256}
    name: str | None = None  # the device's
    uuid: str | None = None
    virtual: bool = False  # its times are the CPU's
    copied: int = 0  # bytes of the inputs, copied there once before
    copy_seconds: float = 0.0  # what that took; in none of `seconds`
    # The most bytes that torch's allocator held while it ran, by device; no entry is not known.
    peak: Mapping[str, int] = field(default_factory=dict)
    # What one run copied between devices and waited for, as the ledger says it.
    transfers: str = ""
    energy: float | None = None  # joules of one run, by NVML's counter
    alone: tuple[float, ...] = ()  # of two together: the same runs one device after the other
    # Why there are no `seconds`: "out of memory", "interrupted" or an exception's line.
    error: str | None = None
    items: float | None = None  # what one run works through there
    steady: bool = True  # False where the time limit came before the median was certain

    @cached_property
    def measurement(self) -> Measurement | None:
        """The repeats as torch's own benchmark has them; None where nothing was measured."""
        if not self.seconds:
            return None
        task = TaskSpec(stmt=self.where, setup="pass", label=self.where)
        times = [each * self.number for each in self.seconds]
        return Measurement(number_per_run=self.number, raw_times=times, task_spec=task)

    @cached_property
    def median(self) -> float | None:
        """Seconds of one run; None where nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @cached_property
    def quartiles(self) -> tuple[float, float] | None:
        """Seconds that a quarter, and that three quarters, of the repeats took at most."""
        return spread.quartiles(self.seconds) if self.seconds else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median; see `spread.interval` for fewer than six repeats."""
        return spread.interval(self.seconds) if self.seconds else None

    @property
    def iqr(self) -> float | None:
        """From the first quartile to the third, out of the median: 0.02 is 2 %.

        None for fewer than four repeats, of which Measurement does not say it either.
        """
        if self.quartiles is None or len(self.seconds) < 4 or not self.median:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    def differs(self, other: Timing) -> bool:
        """Whether two medians differ by more than both spreads.

        The 95 % intervals of both do not meet, and neither median lies between the other's
        quartiles: of thousands of repeats the interval is narrower than what one run of a program
        differs from the next, which the quartiles tell better.
        """
        low, high = sorted((self, other), key=lambda t: t.median or 0.0)
        if not (low.interval and high.interval and low.quartiles and high.quartiles):
            return False
        apart = low.interval[1] < high.interval[0] and low.quartiles[1] < (high.median or 0.0)
        return apart and (low.median or 0.0) < high.quartiles[0]

    @property
    def unsteady(self) -> bool:
        """Whether Measurement warns that the repeats are spread widely."""
        # It divides by the median.
        return bool(self.median) and self.measurement is not None and self.measurement.has_warnings

    @property
    def host_median(self) -> float | None:
        """Seconds until Python went on; None where that is not known."""
        return _median(self.host)

    @property
    def device_median(self) -> float | None:
        """Seconds by the devices' own events; None where there are none."""
        return _median(self.device)

    @property
    def scaling(self) -> float | None:
        """Of ``0+1``: how much sooner both are done than one after the other."""
        alone = _median(self.alone)
        return alone / self.median if alone is not None and self.median else None

    def rate(self, items: float | None = None) -> float | None:
        """Items a second, of `items` where it has none of its own; None where that is not known.

        Two devices at the same time work through two of them.
        """
        worked = (self.items or items or 0) * (self.where.count("+") + 1)
        return worked / self.median if worked and self.median else None

    @property
    def together(self) -> bool:
        """Whether this is the code on several devices at the same time."""
        return "+" in self.where


@dataclass(frozen=True)
class Agreement:
    """Whether a device gave the numbers that the first one gave."""

    where: str
    reference: str
    same: bool | None  # None where they were not compared
    # The largest absolute difference, and the name of the result that it is in.
    largest: float | None = None
    name: str | None = None
    # Why they were not compared, or how they differ.
    reason: str = ""
    # The sweep's variables; empty without a sweep, or where all values agree alike.
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Machine:
    """Where it was measured: what it has, and how many threads torch uses."""

    host: str | None
    cpu: str | None
    cpu_count: int | None
    threads: int | None
    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None


def _median(seconds: tuple[float, ...] | None) -> float | None:
    return statistics.median(seconds) if seconds else None
