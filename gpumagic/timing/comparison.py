"""Record the times that `%%gputime` and `compare` measured, and compare the devices."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from gpumagic import device as names
from gpumagic.device import Device
from gpumagic.display import table
from gpumagic.display.units import both
from gpumagic.errors import GpuError, library_needed
from gpumagic.moving.moved import Left, reasons
from gpumagic.timing.agreement import Agreement
from gpumagic.usercode import sweep as sweeping

if TYPE_CHECKING:
    from pandas import DataFrame


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, for any distribution.
    The ends are the j-th smallest and largest values (J.-Y. Le Boudec, Performance Evaluation of
    Computer and Communication Systems, 2010, theorem 2.1), with an approximation for j."""
    ordered, count = sorted(seconds), len(seconds)
    rank = max(math.floor(0.5 * count - 0.98 * math.sqrt(count)), 1)
    return ordered[rank - 1], ordered[-rank]


@dataclass(frozen=True)
class Timing:
    """The times of one device, at one value of the sweep's variable."""

    where: str  # "cpu", "cuda:1", or "cuda:0+cuda:1" for two devices at the same time
    seconds: tuple[float, ...] = ()  # time of one run in each repeat, until every device was done
    host: tuple[float, ...] = ()  # time of one run in each repeat, until Python continued
    number: int = 1  # runs in each repeat; `seconds` has the mean of these runs
    values: Mapping[str, Any] = field(default_factory=dict)  # variable and value: {"n": 256}
    name: str | None = None  # the device's model
    virtual: bool = False  # whether a device is a virtual GPU; then the times are the CPU's
    copied: int = 0  # bytes of the inputs, which are copied once before the first run
    copy_seconds: float = 0.0  # seconds of copying the inputs; not part of `seconds`
    first: float | None = None  # seconds of the first run, which may include compiling
    peak: Mapping[str, int] = field(default_factory=dict)  # peak bytes by device, without inputs
    unused: str = ""  # the GPUs in `where` on which torch ran nothing; empty if none, or unknown
    left: tuple[Left, ...] = ()  # variables whose tensors stayed on their devices
    transfers: str = ""  # copies and waits in the first run, as text
    alone: tuple[float, ...] = ()  # seconds of one run on several devices, one after the other
    error: str | None = None  # why there are no `seconds`, such as "out of memory"
    items: float | None = None  # items that one run processes; None if unknown

    @cached_property
    def median(self) -> float | None:
        """Seconds of one run; None if nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @cached_property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile in seconds, interpolated like `torch.quantile`."""
        if not self.seconds:
            return None
        known = self.seconds if len(self.seconds) > 1 else self.seconds * 2
        first, _, third = statistics.quantiles(known, n=4, method="inclusive")
        return first, third

    @cached_property
    def spread(self) -> tuple[float, float] | None:
        """The range of seconds that covers the quartiles and the `interval`."""
        # With many repeats, the interval is too narrow; with few, the quartiles are too narrow.
        if self.quartiles is None:
            return None
        low, high = interval(self.seconds)
        return min(low, self.quartiles[0]), max(high, self.quartiles[1])

    @property
    def elsewhere(self) -> str:
        """A sentence saying that the code did not use the timed device, and why; else empty."""
        used = {device for device, nbytes in self.peak.items() if nbytes}
        others = sorted(used) if used.isdisjoint(self.where.split("+")) else []
        why = reasons(x for x in self.left if not others or x.device in others)
        if others:
            why = why or ", which it names in `device=` or `.to()`"
            return f"{self.where}: the code ran on {', '.join(others)}{why}"
        return f"torch ran nothing on {self.unused}{why}" if self.unused and self.seconds else ""

    @property
    def iqr(self) -> float | None:
        """The interquartile range relative to the median; None for fewer than four repeats."""
        if len(self.seconds) < 4 or not (self.quartiles and self.median):
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    @property
    def noisy(self) -> bool:
        """Whether the IQR is 10 % or more, as in torch.utils.benchmark's Measurement."""
        return self.iqr is not None and self.iqr >= 0.1

    def differs(self, other: "Timing") -> bool:
        """Whether the spreads of two timings do not overlap."""
        if self.spread is None or other.spread is None:
            return False
        return self.spread[1] < other.spread[0] or other.spread[1] < self.spread[0]

    def ratio(self, other: "Timing | None") -> float:
        """Return this median divided by another timing's median; NaN if either is unknown."""
        median = other.median if other is not None else None
        return self.median / median if self.median and median else math.nan

    @property
    def host_median(self) -> float | None:
        """Median of `host`; None if unknown."""
        return statistics.median(self.host) if self.host else None

    @property
    def scaling(self) -> float | None:
        """How many times faster the devices are together than in turn; None for one device."""
        return statistics.median(self.alone) / self.median if self.alone and self.median else None

    @property
    def rate(self) -> float | None:
        """Items per second, of all devices together; None if unknown."""
        worked = (self.items or 0) * (self.where.count("+") + 1)
        return worked / self.median if worked and self.median else None


@dataclass(frozen=True)
class Crossover:
    """A value of the sweep's variable from which one device is faster than another."""

    faster: str
    slower: str
    at: float  # the value, interpolated between two measured values
    seconds: float  # time of both devices at this value, interpolated


@dataclass(frozen=True, repr=False)
class Comparison(table.Shown):
    """The same code, timed on several devices."""

    _view = "gpumagic.timing.comparison_view"
    code: str
    timings: tuple[Timing, ...]  # in the order in which they were measured
    agreements: tuple[Agreement, ...]  # between the first device and each other device
    time: float  # Unix time of the end
    # The requested values, including values that were not measured: {"n": (64, 256)}.
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    setup: str = ""
    notes: tuple[str, ...] = ()  # remarks on the measurement, one line each
    interrupted: bool = False  # whether Ctrl-C ended the measurement
    earlier: "Comparison | None" = None  # the comparison against which changes are shown

    @property
    def title(self) -> str:
        """The first line of the code that is not a comment, shortened if it is long."""
        lines = (line.strip() for line in self.code.splitlines())
        code = (line for line in lines if line and not line.startswith("#"))
        return table.short(next(code, "no code"), 60)

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices, in order; ``"cpu+cuda:0"`` is two devices together."""
        return tuple(dict.fromkeys(t.where for t in self.timings))

    @cached_property
    def alone(self) -> tuple[str, ...]:
        """The devices that ran alone; all devices if none did."""
        return tuple(where for where in self.devices if "+" not in where) or self.devices

    @cached_property
    def virtual(self) -> tuple[str, ...]:
        """The names of the virtual GPUs."""
        parts = (part for t in self.timings if t.virtual for part in t.where.split("+"))
        return tuple(dict.fromkeys(part for part in parts if part != "cpu"))

    @cached_property
    def comparable(self) -> tuple[str, ...]:
        """The devices in `alone` that are real, were used and timed, and show no disagreement."""
        timed = {t.where for t in self.timings if t.median and not (t.virtual or t.elsewhere)}
        return tuple(w for w in self.alone if w in timed and not self.disagreement(w))

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """The measured points, such as ``{"n": 256}``, in the order of measurement."""
        return list({sweeping.key(t.values): dict(t.values) for t in self.timings}.values())

    @cached_property
    def _by_point(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], Timing]:
        return {(t.where, sweeping.key(t.values)): t for t in self.timings}

    def at(self, where: str, values: Mapping[str, Any]) -> Timing | None:
        """Return the timing of a device at one point, or None."""
        return self._by_point.get((where, sweeping.key(values)))

    def disagreement(self, where: str) -> Agreement | None:
        """Return the first `Agreement` that found different results on a device, or None."""
        return next((a for a in self.agreements if a.where == where and a.same is False), None)

    def _named(self, where: object) -> str:
        if str(where) in self.devices:  # also "mps", which resolve_one accepts only on a Mac
            return str(where)
        parts = {part.partition(":") for name in self.devices for part in name.split("+")}
        known = [Device(kind, ordinal=int(n)) for kind, _, n in parts if n]  # type: ignore[arg-type]
        with suppress(GpuError):
            asked = [str(names.resolve_one(part.strip(), known)) for part in str(where).split("+")]
            for name in self.devices:
                if sorted(asked) == sorted(name.split("+")):
                    return name
        there = ", ".join(self.devices)
        raise GpuError(f"{sweeping.label(where)} is not in this comparison; it has {there}")

    def timing(self, where: object, **values: Any) -> Timing:
        """Return a device's timing. In a sweep, give the value too, such as ``n=256``.
        Raises `GpuError` if there is no such timing."""
        name = self._named(where)
        if (found := self.at(name, values)) is None:
            asked = ", ".join(f"{v} = {sweeping.label(x)}" for v, x in values.items())
            known = ", ".join(f"{v}={sweeping.label(x[0])}" for v, x in self.sweep.items())
            type_ = f"see .sweep for its values, such as {known}" if known else "omit the value"
            at = f"at {asked}" if asked else "without a value"
            raise GpuError(f"{name} was not timed {at}; {type_}")
        return found

    def median(self, where: object, **values: Any) -> float:
        """Return the median seconds of one run; raise GpuError if there is no time."""
        if (found := self.timing(where, **values)).median is None:
            raise GpuError(f"{found.where} has no time: {found.error or 'it was not measured'}")
        return found.median

    def speedup(self, where: object, reference: object, **values: Any) -> float:
        """Return how many times faster `where` is than `reference`; neither may be virtual."""
        self._real(where, reference)
        return self.median(reference, **values) / self.median(where, **values)

    def _real(self, *asked: object) -> set[str]:
        found = {self._named(where) for where in asked}
        parts = {part for name in found for part in name.split("+")}
        if virtual := [where for where in self.virtual if where in parts]:
            raise GpuError(f"{of_virtual(virtual)}; see .median()")
        return found

    @property
    def best(self) -> str:
        """The device in `alone` that is fastest, or fastest at the most values of a sweep. Devices
        whose results differed do not count. Raises `GpuError` if no device is left with a time."""
        right = [where for where in self.alone if not self.disagreement(where)]
        known = ([t for w in right if (t := self.at(w, p)) and t.median] for p in self.points)
        wins = Counter(min(ts, key=lambda t: t.median or 0.0).where for ts in known if ts)
        if not wins:
            raise GpuError("nothing was measured, so no device is the fastest")
        return wins.most_common(1)[0][0]

    @cached_property
    def crossovers(self) -> tuple[Crossover, ...]:
        """The crossovers of `comparable` devices; empty if a value of the sweep is not a number."""
        found = []
        for name, values in self.sweep.items():
            known = sorted((x, v) for v in values if (x := sweeping.number(v)) is not None)
            if len(known) < len(values):
                continue
            for pair in combinations(self.comparable, 2):
                a, b = ([self.at(where, {name: value}) for _, value in known] for where in pair)
                for x, seconds, now in flips([x for x, _ in known], a, b):
                    found.append(Crossover(pair[now], pair[1 - now], x, seconds))
        return tuple(found)

    def crossover(self, a: object, b: object) -> float | None:
        """Return the sweep's largest value at which the faster of two devices changes, or None.
        The value is interpolated on log-log scales. Differences within the spread do not count.
        Raises `GpuError` for an unknown or virtual device."""
        pair = self._real(a, b)
        return max((c.at for c in self.crossovers if {c.faster, c.slower} == pair), default=None)

    @property
    def remarks(self) -> list[str]:
        """All remarks on the measurement and its precision; the text shows only the first few."""
        return list(table.view(self).remarks(self))

    def against(self, earlier: "Comparison") -> "Comparison":
        """Return a copy that also shows what changed since an earlier comparison."""
        return replace(self, earlier=replace(earlier, earlier=None))

    def to_pandas(self) -> "DataFrame":
        """Return a DataFrame with one row for each timing. Needs pandas."""
        with library_needed("pandas", "to_pandas()", "pandas"):
            import pandas
        return pandas.DataFrame([_row(timing) for timing in self.timings])


def of_virtual(names: Sequence[str]) -> str:
    """Return the reason why the times of these virtual GPUs are not compared."""
    are, their = ("is", "its") if len(names) == 1 else ("are", "their")
    return f"{both(names)} {are} virtual: {their} times are the CPU's and say nothing about a GPU"


def flips(
    xs: Sequence[float], a: Sequence[Timing | None], b: Sequence[Timing | None]
) -> list[tuple[float, float, int]]:
    """Return `(x, seconds, n)` of each crossover. From x on, `a` is faster if n is 0, else `b`."""
    known = [  # on log-log scales; linear in x if some x is not positive
        (x, math.log(one.ratio(other)), one.median)
        for x, one, other in zip(xs, a, b, strict=True)
        if one and other and one.differs(other) and one.median and other.median
    ]
    found = []
    for (x0, before, first), (x1, after, second) in pairwise(known):
        if before * after < 0:
            part = before / (before - after)
            x = x0 * (x1 / x0) ** part if min(xs) > 0 else x0 + (x1 - x0) * part
            found.append((x, first * (second / first) ** part, int(after > 0)))
    return found


def _row(timing: Timing) -> dict[str, Any]:
    low, high = timing.spread or (None, None)
    return {
        "where": timing.where,
        **timing.values,
        "median_s": timing.median,
        "low_s": low,
        "high_s": high,
        "host_s": timing.host_median,
        "repeats": len(timing.seconds),
        "items_per_s": timing.rate,
        "first_s": timing.first,
        "peak_bytes": max(timing.peak.values(), default=None),
        "copied_bytes": timing.copied,
        "copy_s": timing.copy_seconds,
        "error": timing.error,
    }
