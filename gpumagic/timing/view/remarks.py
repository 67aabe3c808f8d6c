"""Say what a comparison has beside its answer: doubts, changes, how and where it was measured."""

import math
import time
from collections.abc import Iterator, Sequence

from gpumagic.display.units import NOT_KNOWN, duration, size
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.change import Change
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view.verdict import at_point, both, by_words, percent, span

_TOLD_ELSEWHERE = ("", "reference", "not compared")
# A median whose 95 % interval is wider than this part of it is said to be uncertain: two devices
# are seldom compared for less.
_LOOSE = 0.05


def numbers(comparison: Comparison, where: str) -> str:
    """Whether the numbers are those of the first: ``"same to 3e-07"``, ``"DIFFERS: 0.4 in y"``."""
    found = [a for a in comparison.agreements if a.where == where]
    if not found:
        return "reference" if any(a.reference == where for a in comparison.agreements) else ""
    if worst := comparison.disagreement(where):
        by = "" if worst.largest is None else f" {worst.largest:.2g}"
        inside = f" in {worst.name}" if worst.name else ""
        return f"DIFFERS{':' if by or inside else ''}{by}{inside}"
    if any(a.same is None for a in found):
        return "not compared"
    largest = max(a.largest or 0.0 for a in found)
    return f"same to {largest:.0e}" if largest else "same"


def problems(comparison: Comparison) -> list[str]:
    """What the user must not overlook: an interrupt, an error, a time that is not certain."""
    said = []
    if comparison.interrupted:
        done = sum(t.median is not None for t in comparison.timings)
        planned = math.prod(map(len, comparison.sweep.values())) * len(comparison.devices)
        said.append(f"interrupted: {done} of {planned} timings have a median")
    failed: dict[str, str] = {}
    for t in comparison.timings:
        if t.error and t.error != "interrupted":
            # Of a sweep the first point is enough.
            failed.setdefault(f"{t.where}: {t.error}", at_point(t.values))
    said += [words + at for words, at in failed.items()]
    return list(dict.fromkeys([*said, *_uncertain(comparison)]))


def _uncertain(comparison: Comparison) -> Iterator[str]:
    """Of `Measurement`'s warning, and of medians that are not certain when the time was over."""
    wide = [t for t in comparison.timings if t.unsteady]
    single = [t for t in comparison.timings if len(t.seconds) == 1]
    others = [t for t in comparison.timings if not t.steady and not t.unsteady]
    loose = [t for t in others if _width(t) > _LOOSE]  # of one run it is 0
    if wide:
        worst = max(t.iqr or 0.0 for t in wide)
        yield (
            f"{_measured_at(wide)}: the repeats are spread widely (IQR {percent(worst)} of the"
            " median): the machine does other work, or changes its clock"
        )
    if single:
        yield f"{_measured_at(single)}: one run only, so that the spread is not known"
    if loose:
        yield (
            f"{_measured_at(loose)}: the time was over with the median known to within"
            f" {percent(max(map(_width, loose)))}; give more with --max-time"
        )


def _width(timing: Timing) -> float:
    """Of the median's 95 % interval, out of the median."""
    low, high = timing.interval or (0.0, 0.0)
    return (high - low) / timing.median if timing.median else 0.0


def _measured_at(timings: Sequence[Timing]) -> str:
    if len(timings) > 3 and timings[0].values:
        return f"{both(t.where for t in timings)} at {len(timings)} points"
    return both(f"{t.where}{at_point(t.values)}" for t in timings)


def change(comparison: Comparison) -> list[tuple[str, str]]:
    """Against the earlier comparison: each device and what became of it."""
    said = []
    for where in comparison.devices:
        found = [c for c in comparison.change if c.where == where]
        if found and comparison.sweep:
            said.append((where, "; ".join(_kinds(found))))
        elif found:
            said.append((where, f"{found[0]}{_between(found[0])}"))
    return said


def differences(comparison: Comparison) -> str:
    """What else was not the same then; ``""`` for nothing."""
    told = "; ".join(comparison.differences)
    return f"not the same then: {told}" if told and comparison.change else ""


def _between(change: Change) -> str:
    if change.verdict not in ("faster", "slower") or change.low is None or change.high is None:
        return ""
    edges = [change.low, change.high]
    return f" ({span(edges if change.verdict == 'faster' else [1 / e for e in edges])})"


def _kinds(changes: Sequence[Change]) -> Iterator[str]:
    """Of a sweep: at how many values it is faster, slower, the same …"""
    for kind in dict.fromkeys(c.verdict for c in changes):
        alike = [c for c in changes if c.verdict == kind]
        words = str(alike[0])
        if kind == "unsure":
            words = "one run only, so that no change can be told"
        elif kind in ("faster", "slower"):
            ratios = [c.ratio or 0.0 for c in alike]
            words = f"{span(ratios if kind == 'faster' else [1 / r for r in ratios])} {kind}"
        some = f"at {len(alike)} of {len(changes)} values"
        yield f"{words} {'at every value' if len(alike) == len(changes) else some}"


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
    timed = [t for t in comparison.timings if t.seconds]
    if timed and not comparison.sweep:
        counts = ", ".join(f"{t.where} {len(t.seconds):,} × {t.number:,}" for t in timed)
        yield f"repeats × runs in each: {counts}"


def _copies(comparison: Comparison) -> Iterator[str]:
    """Each device's inputs; the most of them, in a sweep."""
    found = []
    for where in comparison.devices:
        most = max(comparison.of(where), key=lambda t: t.copied)
        if most.copied:
            found.append(f"{size(most.copied)} to {where} in {duration(most.copy_seconds)}")
    if found:
        each = "each value" if comparison.sweep else "it began"
        up_to = "up to " if comparison.sweep else ""
        yield f"inputs copied before {each}, in none of the times: {up_to}{', '.join(found)}"


def _inside(comparison: Comparison) -> Iterator[str]:
    # In a sweep they differ in bytes from value to value: the last says it.
    said = {t.where: t.transfers for t in comparison.timings if t.transfers}
    last = " (at the last value)" if comparison.sweep else ""
    for words, wheres in by_words(said.items()).items():
        yield f"inside each run, on {both(wheres)}: {words}{last}"


def machine(comparison: Comparison) -> str:
    """Where and when: ``"NVIDIA H200 · AMD EPYC, 16 CPUs, 8 threads · torch 2.13.0 · …"``."""
    it = comparison.machine
    threads = f", torch on {it.threads}" if it.threads and it.threads != it.cpu_count else ""
    cpus = f", {it.cpu_count} CPU{'s' * (it.cpu_count > 1)}{threads}" if it.cpu_count else ""
    # Devices of one name together; the CPU has its own.
    alone = [t for t in comparison.timings if t.where in comparison.alone and t.where != "cpu"]
    named = by_words((t.where, t.name or "") for t in alone)
    parts = [
        *(f"{both(wheres)}: {name}" for name, wheres in named.items()),
        f"{it.cpu or NOT_KNOWN}{cpus}",
        f"torch {it.torch}",
        f"CUDA {it.cuda}" if it.cuda else "",
        f"driver {it.driver}" if it.driver else "",
        f"Python {it.python}",
        it.host or "",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(comparison.time)),
    ]
    return " · ".join(filter(None, parts))
