"""Say what a comparison has beside its answer: doubts, changes, how and where it was measured."""

import math
import time
from collections.abc import Iterator, Sequence

from gpumagic.display.units import NOT_KNOWN, duration, size
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.timing import Timing
from gpumagic.timing.view.verdict import at_point, both, by_words, percent

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
    """What the user must not overlook: an interrupt, an error."""
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
    return [*said, *(words + at for words, at in failed.items())]


def uncertain(comparison: Comparison) -> Iterator[str]:
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
            f"{_measured_at(loose)}: the time was over before the median was certain; give more"
            " with --max-time"
        )


def _width(timing: Timing) -> float:
    """Of the median's 95 % interval, out of the median."""
    low, high = timing.interval or (0.0, 0.0)
    return (high - low) / timing.median if timing.median else 0.0


def _measured_at(timings: Sequence[Timing]) -> str:
    if len(timings) > 3 and timings[0].values:
        return f"{both(t.where for t in timings)} at {len(timings)} points"
    return both(f"{t.where}{at_point(t.values)}" for t in timings)


def differences(comparison: Comparison) -> list[str]:
    """What else was not the same in the earlier run, or why it was not compared with it."""
    told = "; ".join(comparison.differences)
    what = "not the same then" if comparison.change else "not compared with the last one"
    return [f"{what}: {told}"] if told else []


def measured(comparison: Comparison) -> list[str]:
    """How it was measured, a line each: inputs, transfers inside, what the user should know."""
    said = [*_repeats(comparison), *_copies(comparison), *_compiled(comparison)]
    said += inside(comparison)
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


def _compiled(comparison: Comparison) -> Iterator[str]:
    """How long each device's first runs of a sweep compiled; without one the table has it."""
    for kind, said in (
        ("compiled", "compiled at each value, in none of the times"),
        ("first", "first run of each value, with tracing and compiling, in none of the times"),
    ):
        known = {w: [getattr(t, kind) or 0.0 for t in comparison.of(w)] for w in comparison.devices}
        found = [
            f"{where} in {duration(max(times))}" for where, times in known.items() if any(times)
        ]
        if found and comparison.sweep:
            yield f"{said}: up to {', '.join(found)}"


def inside(comparison: Comparison) -> Iterator[str]:
    """The copies between devices and the waits within one run of each."""
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
        f"torch {it.torch}" if it.torch else "",
        *(f"{name} {version}" for name, version in it.frameworks.items()),
        f"CUDA {it.cuda}" if it.cuda else "",
        f"driver {it.driver}" if it.driver else "",
        f"Python {it.python}",
        it.host or "",
        time.strftime("%Y-%m-%d %H:%M", time.localtime(comparison.time)),
    ]
    return " · ".join(filter(None, parts))
