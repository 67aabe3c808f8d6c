"""Look up timings by device and value, find crossings, and compare with an earlier run.

A device may have any of the usual spellings, and need not be on this machine.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, pairwise
from typing import Any, Literal

from gpumagic import device as names
from gpumagic.device import Device
from gpumagic.display.units import both, times
from gpumagic.errors import GpuError
from gpumagic.timing.timing import Agreement, Timing
from gpumagic.usercode import sweep as sweeping
from gpumagic.usercode.sweep import key


@dataclass(frozen=True)
class Crossover:
    """The value `at` which another device becomes the faster one; both take `seconds` there."""

    faster: str
    slower: str
    variable: str
    at: float
    seconds: float


def virtual(names: Sequence[str]) -> str:
    """Return why times of these virtual GPUs are compared with nothing."""
    are, their = ("is", "its") if len(names) == 1 else ("are", "their")
    return f"{both(names)} {are} virtual: {their} times are the CPU's and say nothing about a GPU"


class Lookup:
    """The lookups of a `Comparison`."""

    timings: tuple[Timing, ...]
    agreements: tuple[Agreement, ...]
    sweep: Mapping[str, tuple[Any, ...]]

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """Each WHERE once, in order."""
        return tuple(dict.fromkeys(t.where for t in self.timings))

    @cached_property
    def alone(self) -> tuple[str, ...]:
        """The devices that ran alone; all devices if none did."""
        return tuple(where for where in self.devices if "+" not in where) or self.devices

    @cached_property
    def virtual(self) -> tuple[str, ...]:
        """The virtual GPUs; the CPU may run together with one."""
        parts = (part for t in self.timings if t.virtual for part in t.where.split("+"))
        return tuple(dict.fromkeys(part for part in parts if part != "cpu"))

    @cached_property
    def comparable(self) -> tuple[str, ...]:
        """The devices that ran alone and have times, are not virtual, and whose results agree."""
        timed = {t.where for t in self.timings if t.median and not t.virtual}
        return tuple(w for w in self.alone if w in timed and not self.disagreement(w))

    @cached_property
    def points(self) -> list[dict[str, Any]]:
        """The points that have timings, in the order of measuring."""
        return list({sweeping.key(t.values): dict(t.values) for t in self.timings}.values())

    @cached_property
    def _by_point(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], Timing]:
        return {(t.where, sweeping.key(t.values)): t for t in self.timings}

    def at(self, where: str, values: Mapping[str, Any]) -> Timing | None:
        """Return the timing of one of `devices` at one point; None if it was not measured."""
        return self._by_point.get((where, sweeping.key(values)))

    def among(self, where: object) -> str:
        """Return the one of `devices` that `where` names; raise `GpuError` if there is none."""
        if where in self.devices:
            return str(where)
        parts = {part for name in self.devices for part in name.split("+")}
        ordinals = sorted(int(part[5:]) for part in parts if part.startswith("cuda:"))
        known = [Device("cuda", ordinal=ordinal) for ordinal in ordinals]
        with suppress(GpuError):
            asked = [str(names.resolve_one(part.strip(), known)) for part in str(where).split("+")]
            for name in self.devices:
                if sorted(asked) == sorted(name.split("+")):
                    return name
        has = ", ".join(self.devices)
        raise GpuError(f"{sweeping.label(where)} is not in this comparison; it has {has}")

    def timing(self, where: object, **values: Any) -> Timing:
        """Return the timing of one device, at one value of the sweep.

        Parameters
        ----------
        where : object
            As anywhere: ``"cuda:0"``, ``0``, ``"cpu"``; ``"0+1"``.
        **values
            The sweep's variable: ``n=256``.

        Raises
        ------
        GpuError
            It is not in this comparison.
        """
        name = self.among(where)
        if set(values) != set(self.sweep):
            wanted = ", ".join(f"{v}={sweeping.label(x[0])}" for v, x in self.sweep.items())
            raise GpuError(
                f"the sweep is over {', '.join(self.sweep)}; say at which value: {wanted}"
                if self.sweep
                else f"there is no sweep over {', '.join(values)}; leave it out"
            )
        found = self.at(name, values)
        if found is None:
            asked = ", ".join(f"{v} = {sweeping.label(x)}" for v, x in values.items())
            raise GpuError(f"{name} was not timed at {asked}; see .sweep for its values")
        return found

    def median(self, where: object, **values: Any) -> float:
        """Return seconds of one run. Raises `GpuError` like `timing`, and if there is no time."""
        found = self.timing(where, **values)
        if found.median is None:
            raise GpuError(f"{found.where} has no time: {found.error or 'it was not measured'}")
        return found.median

    def of(self, where: str) -> list[Timing]:
        """Return one device's timings, in the order of measuring."""
        return [t for t in self.timings if t.where == where]

    def disagreement(self, where: str) -> Agreement | None:
        """Return the worst disagreement of a device with the first; None if its results agree."""
        found = [a for a in self.agreements if a.where == where and a.same is False]
        return max(found, key=lambda a: a.largest or 0.0, default=None)

    @cached_property
    def axis(self) -> str | None:
        """The variable of the sweep; None without a sweep."""
        return next(iter(self.sweep), None)

    @cached_property
    def crossovers(self) -> tuple[Crossover, ...]:
        """Where the order of two `comparable` devices changes; the values must be numbers."""
        name = self.axis
        values = self.sweep[name] if name else ()
        known = [(x, value) for value in values if (x := sweeping.number(value)) is not None]
        if name is None or len(known) < len(values):
            return ()
        known.sort(key=lambda pair: pair[0])
        found = []
        for a, b in combinations(self.comparable, 2):
            first, second = (
                [self.at(where, {name: value}) for _, value in known] for where in (a, b)
            )
            for x, seconds, now in flips([x for x, _ in known], first, second):
                faster, slower = (a, b) if now == 0 else (b, a)
                found.append(Crossover(faster, slower, name, x, seconds))
        return tuple(found)


def flips(
    xs: Sequence[float], a: Sequence[Timing | None], b: Sequence[Timing | None]
) -> list[tuple[float, float, int]]:
    """Return where the order changes by more than both spreads: x, seconds, and the faster one.

    Interpolates between two x on a log-log line, or a straight line if some x is not positive.
    """
    known = [
        (x, first, second)
        for x, first, second in zip(xs, a, b, strict=True)
        if first is not None and second is not None and first.median and second.median
    ]
    decided = [
        (n, int(_ratio(first, second) > 0))
        for n, (_, first, second) in enumerate(known)
        if first.differs(second)
    ]
    log = all(x > 0 for x in xs)
    return [
        (*_cross(known[before : after + 1], now, log), now)
        for (before, then), (after, now) in pairwise(decided)
        if then != now
    ]


def _ratio(a: Timing, b: Timing) -> float:
    """Return the logarithm of the ratio of the medians."""
    return math.log((a.median or 1.0) / (b.median or 1.0))


def _cross(
    known: Sequence[tuple[float, Timing, Timing]], now: int, log: bool
) -> tuple[float, float]:
    """Return the last intersection of two lines whose ends have a different order."""
    for (x0, a0, b0), (x1, a1, b1) in reversed(list(pairwise(known))):
        was, is_ = _ratio(a0, b0), _ratio(a1, b1)
        # If now == 0, `a` is faster beyond it.
        if (was >= 0 > is_) if now == 0 else (was <= 0 < is_):
            part = was / (was - is_)
            x = x0 * (x1 / x0) ** part if log else x0 + (x1 - x0) * part
            return x, (a0.median or 1.0) * math.exp(_ratio(a1, a0) * part)
    x, a, b = known[-1]
    return x, math.sqrt((a.median or 1.0) * (b.median or 1.0))


Verdict = Literal["faster", "slower", "same", "unsure", "new", "failed"]


@dataclass(frozen=True)
class Change:
    """The change of one device at one value; "unsure" if there is only one run."""

    where: str
    verdict: Verdict
    ratio: float | None = None  # earlier median / present median: 2.0 is twice as fast
    values: Mapping[str, Any] = field(default_factory=dict)

    def of(self, timing: Timing) -> bool:
        """Whether it is the change of this timing."""
        return self.where == timing.where and key(self.values) == key(timing.values)

    def __str__(self) -> str:
        ratio = self.ratio or math.nan
        return {
            "new": "new",
            "failed": "no time",
            "same": "same",
            "unsure": f"{times(ratio)} as fast?",  # one run, so no spread
            "faster": f"{times(ratio)} faster",
            "slower": f"{times(1 / ratio)} slower",
        }[self.verdict]


def changes(now: Lookup, earlier: Lookup) -> tuple[Change, ...]:
    """Return each timing's change from the earlier one of the same device and value."""
    return tuple(_change(t, earlier.at(t.where, t.values)) for t in now.timings)


def _change(now: Timing, before: Timing | None) -> Change:
    if not now.median or now.interval is None:
        return Change(now.where, "failed", values=now.values)
    if before is None or not before.median or before.interval is None:
        return Change(now.where, "new", values=now.values)
    verdict: Verdict = "same"
    if min(len(now.seconds), len(before.seconds)) < 2:
        verdict = "unsure"
    elif now.differs(before):
        verdict = "faster" if now.median < before.median else "slower"
    return Change(now.where, verdict, before.median / now.median, now.values)


def unlike(now: Lookup, earlier: Lookup) -> tuple[str, ...]:
    """Return why two comparisons have different code or devices; empty if they do not."""
    found = other_text(now, earlier)
    if now.devices == earlier.devices:
        return found
    return (*found, f"{', '.join(earlier.devices)} then, {', '.join(now.devices)} now")


def other_text(now: Lookup, earlier: Lookup) -> tuple[str, ...]:
    """Return whether the code or the set-up differs, a line each."""
    pairs = ((name, getattr(now, name), getattr(earlier, name)) for name in ("code", "setup"))
    return tuple(f"another {name}" for name, is_, was in pairs if is_.strip() != was.strip())
