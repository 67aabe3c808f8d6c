"""What a comparison says beside its answer: wrong numbers, doubts, changes, how it was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from gpumagic.display.units import NOT_KNOWN, duration, size, times
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.change import Change
from gpumagic.timing.result.timing import Agreement, Timing
from gpumagic.timing.view.verdict import both, point

_TOLD_ELSEWHERE = ("", "reference", "not compared")
# A median whose 95 % interval is wider than this part of it is said to be uncertain: two devices
# are seldom compared for less.
_LOOSE = 0.05


def numbers(comparison: Comparison, where: str) -> str:
    """Whether the numbers are those of the first: ``"same to 3e-07"``, ``"DIFFERS: 0.4 in y"``."""
    found = [a for a in comparison.agreements if a.where == where]
    if not found:
        return "reference" if any(a.reference == where for a in comparison.agreements) else ""
    wrong = [a for a in found if a.same is False]
    if wrong:
        return _differs(max(wrong, key=lambda a: a.largest or 0.0))
    if any(a.same is None for a in found):
        return "not compared"
    largest = max((a.largest or 0.0 for a in found), default=0.0)
    return f"same to {largest:.0e}" if largest else "same"


def _differs(agreement: Agreement) -> str:
    by = "" if agreement.largest is None else f" {agreement.largest:.2g}"
    inside = f" in {agreement.name}" if agreement.name else ""
    return f"DIFFERS{':' if by or inside else ''}{by}{inside}"


def problems(comparison: Comparison) -> list[str]:
    """What the user must not overlook: an interrupt, an error, a time that is not certain."""
    said = []
    if comparison.interrupted:
        done = sum(t.median is not None for t in comparison.timings)
        said.append(f"interrupted: {done} of {planned(comparison)} timings have a median")
    failed: dict[str, list[str]] = {}
    for t in comparison.timings:
        if t.error and t.error != "interrupted":
            failed.setdefault(f"{t.where}: {t.error}", []).append(point(t.values))
    said += [f"{words} at {places[0]}" if places[0] else words for words, places in failed.items()]
    said += _uncertain(comparison)
    return list(dict.fromkeys(said))


def planned(comparison: Comparison) -> int:
    """How many timings the whole would have."""
    count = len(comparison.devices)
    for values in comparison.sweep.values():
        count *= len(values)
    return count


def _uncertain(comparison: Comparison) -> list[str]:
    """Of `Measurement`'s warning, and of medians that are not certain when the time was over."""
    wide = [t for t in comparison.timings if t.unsteady]
    single = [t for t in comparison.timings if len(t.seconds) == 1]
    several = [t for t in comparison.timings if len(t.seconds) > 1]
    loose = [t for t in several if not t.steady and not t.unsteady and _width(t) > _LOOSE]
    said = []
    if wide:
        worst = max(wide, key=lambda t: t.iqr or 0.0)
        said.append(
            f"{_places(wide)}: the repeats are spread widely (IQR {percent(worst.iqr)} of the"
            " median): the machine does other work, or changes its clock"
        )
    if single:
        said.append(f"{_places(single)}: one run only, so that the spread is not known")
    if loose:
        said.append(
            f"{_places(loose)}: the time was over with the median known to within"
            f" {percent(max(map(_width, loose)))}; give more with --max-time"
        )
    return said


def _width(timing: Timing) -> float:
    """Of the median's 95 % interval, out of the median."""
    low, high = timing.interval or (0.0, 0.0)
    return (high - low) / timing.median if timing.median else 0.0


def _places(timings: Sequence[Timing]) -> str:
    if len(timings) > 3 and timings[0].values:
        names = list(dict.fromkeys(t.where for t in timings))
        return f"{both(names)} at {len(timings)} points"
    return both([f"{t.where} at {point(t.values)}" if t.values else t.where for t in timings])


def percent(part: float | None) -> str:
    """A share as people read it: ``"2.1 %"``, ``"34 %"``, ``""`` where it is not known."""
    if part is None:
        return ""
    return f"{100 * part:.{1 if part < 0.0995 else 0}f} %"


def change(comparison: Comparison) -> list[tuple[str, str]]:
    """Against the earlier comparison: each device and what became of it."""
    said = []
    for where in comparison.devices:
        found = [c for c in comparison.change if c.where == where]
        if not found:
            continue
        words = f"{found[0]}{_between(found[0])}"
        if comparison.sweep:
            kinds: dict[str, list[float]] = {}
            for c in found:
                kinds.setdefault(c.verdict, []).append(c.ratio or 0.0)
            words = "; ".join(_kinds(kinds, len(found)))
        said.append((where, words))
    return said


def differences(comparison: Comparison) -> str:
    """What else was not the same then; ``""`` for nothing."""
    told = "; ".join(comparison.differences)
    return f"not the same then: {told}" if told and comparison.change else ""


def _between(change: Change) -> str:
    if change.verdict not in ("faster", "slower") or change.low is None or change.high is None:
        return ""
    low, high = change.low, change.high
    if change.verdict == "slower":
        low, high = 1 / high, 1 / low
    return f" ({times(low).removesuffix(' ×')} to {times(high)})"


def _kinds(kinds: Mapping[str, Sequence[float]], count: int) -> Iterator[str]:
    words = {
        "same": "no change beyond the spread",
        "unsure": "one run only, so that no change can be told",
        "new": "not in the earlier run",
        "failed": "no time in this run",
    }
    for kind, ratios in kinds.items():
        where = "at every value" if len(ratios) == count else f"at {len(ratios)} of {count} values"
        if kind in words:
            yield f"{words[kind]} {where}"
            continue
        ratios = ratios if kind == "faster" else [1 / r for r in ratios]
        low, high = times(min(ratios)), times(max(ratios))
        by = low if low == high else f"{low.removesuffix(' ×')} to {high}"
        yield f"{by} {kind} {where}"


def measured(comparison: Comparison) -> list[str]:
    """How it was measured, a line each: inputs, transfers inside, what the user should know."""
    said = [*_repeats(comparison), *_copies(comparison), *_inside(comparison)]
    if comparison.sweep:
        compared = [(where, numbers(comparison, where)) for where in comparison.devices]
        told = [f"{where} {words}" for where, words in compared if words not in _TOLD_ELSEWHERE]
        said += [f"numbers: {', '.join(told)}"] if told else []
    reasons = {a.reason: None for a in comparison.agreements if a.same is None and a.reason}
    said += [f"numbers not compared: {reason}" for reason in reasons]
    return [*said, *comparison.notes]


def _repeats(comparison: Comparison) -> Iterator[str]:
    if comparison.sweep:
        return
    found = [
        f"{t.where} {len(t.seconds):,} × {t.number:,}" for t in comparison.timings if t.seconds
    ]
    if found:
        yield f"repeats × runs in each: {', '.join(found)}"


def _copies(comparison: Comparison) -> Iterator[str]:
    """Each device's inputs; the most of them, in a sweep."""
    found = []
    for where in comparison.devices:
        copied = [t for t in comparison.timings if t.where == where and t.copied]
        if copied:
            most = max(copied, key=lambda t: t.copied)
            found.append(f"{size(most.copied)} to {where} in {duration(most.copy_seconds)}")
    if found:
        each = "each value" if comparison.sweep else "it began"
        up_to = "up to " if comparison.sweep else ""
        yield f"inputs copied before {each}, in none of the times: {up_to}{', '.join(found)}"


def _inside(comparison: Comparison) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for t in comparison.timings:
        if t.transfers:
            found.setdefault(t.transfers, []).append(t.where)
    if comparison.sweep and len(found) > 2:
        # They differ in bytes from value to value: the last says it.
        last = {t.where: t.transfers for t in comparison.timings if t.transfers}
        found = {}
        for where, transfers in last.items():
            found.setdefault(transfers, []).append(where)
        found = {f"{words} (at the last value)": places for words, places in found.items()}
    for words, places in found.items():
        yield f"inside each run, on {both(list(dict.fromkeys(places)))}: {words}"


def machine(comparison: Comparison) -> str:
    """Where and when: ``"NVIDIA H200 · AMD EPYC, 16 CPUs, 8 threads · torch 2.13.0 · …"``."""
    it = comparison.machine
    threads = f", torch on {it.threads}" if it.threads and it.threads != it.cpu_count else ""
    cpus = f", {it.cpu_count} CPU{'s' * (it.cpu_count > 1)}{threads}" if it.cpu_count else ""
    parts = [
        *_names(comparison),
        f"{it.cpu or NOT_KNOWN}{cpus}",
        f"torch {it.torch}",
        f"CUDA {it.cuda}" if it.cuda else "",
        f"driver {it.driver}" if it.driver else "",
        f"Python {it.python}",
        it.host or "",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(comparison.time)),
    ]
    return " · ".join(filter(None, parts))


def _names(comparison: Comparison) -> Iterator[str]:
    """Devices of one name together; the CPU has its own place."""
    found: dict[str, list[str]] = {}
    for t in comparison.timings:
        if t.name and t.where in comparison.alone and t.where != "cpu":
            found.setdefault(t.name, []).append(t.where)
    for name, places in found.items():
        yield f"{both(list(dict.fromkeys(places)))}: {name}"
