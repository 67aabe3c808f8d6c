"""Tell what changed since an earlier comparison, by no less than both spreads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gpumagic.display.units import times
from gpumagic.timing.result.lookup import Lookup
from gpumagic.timing.result.timing import Timing
from gpumagic.usercode.sweep import key

_FACTS = {
    "host": "machine",
    "cpu": "CPU",
    "cpu_count": "CPU count",
    "threads": "threads of torch",
    "python": "Python",
    "torch": "torch",
    "cuda": "CUDA",
    "driver": "driver",
}
Verdict = Literal["faster", "slower", "same", "unsure", "new", "failed"]


@dataclass(frozen=True)
class Change:
    """One device at one value, now against then; of one run only it is "unsure"."""

    where: str
    verdict: Verdict
    ratio: float | None = None  # the earlier median out of the present one: 2.0 is twice as fast
    # What the ratio may be by the 95 % intervals of both medians.
    low: float | None = None
    high: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    def of(self, timing: Timing) -> bool:
        """Whether it is about that one."""
        return self.where == timing.where and key(self.values) == key(timing.values)

    def __str__(self) -> str:
        ratio = self.ratio or math.nan
        return {
            "new": "new",
            "failed": "no time",
            "same": "same",
            "unsure": f"{times(ratio)} as fast?",  # of one run, whose spread is not known
            "faster": f"{times(ratio)} faster",
            "slower": f"{times(1 / ratio)} slower",
        }[self.verdict]


def changes(now: Lookup, earlier: Lookup) -> tuple[Change, ...]:
    """Each timing against that of the same device and values before, as `Timing.differs` has it."""
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
    (low, high), (then_low, then_high) = now.interval, before.interval
    return Change(
        now.where,
        verdict,
        ratio=before.median / now.median,
        low=then_low / high if high else None,
        high=then_high / low if low else None,
        values=now.values,
    )


def unlike(now: Lookup, earlier: Lookup) -> tuple[str, ...]:
    """Why two comparisons are not of the same code on the same devices; nothing if they are."""
    found = _other_text(now, earlier)
    if now.devices != earlier.devices:
        found.append(f"{', '.join(earlier.devices)} then, {', '.join(now.devices)} now")
    return tuple(found)


def differences(now: Lookup, earlier: Lookup) -> tuple[str, ...]:
    """What else is different, so that the code need not be the reason: a line each."""
    found = []
    for attribute, name in _FACTS.items():
        was, is_ = getattr(earlier.machine, attribute), getattr(now.machine, attribute)
        if was != is_:
            found.append(f"{name} {_or(was)} then, {_or(is_)} now")
    versions = (earlier.machine.frameworks, now.machine.frameworks)
    for name in dict.fromkeys((*versions[0], *versions[1])):
        was, is_ = (each.get(name) for each in versions)
        if was != is_:
            found.append(f"{name} {_or(was)} then, {_or(is_)} now")
    then = {t.where: t for t in earlier.timings}
    for where, timing in {t.where: t for t in now.timings}.items():
        before = then.get(where, timing)
        if before.name != timing.name:
            found.append(f"{where}: {_or(before.name)} then, {_or(timing.name)} now")
        elif before.uuid != timing.uuid:
            found.append(f"{where}: another {_or(timing.name)} of the same name")
    return (*found, *_other_text(now, earlier))


def _other_text(now: Lookup, earlier: Lookup) -> list[str]:
    pairs = ((name, getattr(now, name), getattr(earlier, name)) for name in ("code", "setup"))
    return [f"another {name}" for name, is_, was in pairs if is_.strip() != was.strip()]


def _or(value: object) -> str:
    return "not known" if value is None else str(value)
