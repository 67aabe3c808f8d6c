"""Say in sentences which device is faster, from which value on, and how sure that is.

All values, points, ratios and lists of a comparison are formatted here. A device with other
results, or a virtual GPU, is never called fast.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from gpumagic.display.units import both, duration, fine, size, times
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.lookup import Crossover, virtual
from gpumagic.timing.timing import Timing
from gpumagic.usercode.sweep import label


def wrong(comparison: Comparison) -> list[str]:
    """Return the devices whose results differ from the first: a fast wrong answer is no answer."""
    found = filter(None, map(comparison.disagreement, comparison.devices))
    return [
        f"{f.where} gives other numbers than {f.reference}{at_point(f.values)}: {f.reason}"
        for f in found
    ]


def answer(comparison: Comparison) -> list[str]:
    """Return the answer in a few sentences, the most important first; see `wrong` too."""
    if not any(t.median for t in comparison.timings):
        return ["nothing was measured"]
    compared = _pairs if comparison.sweep else _order
    said = compared(comparison, comparison.comparable) if len(comparison.comparable) > 1 else []
    said += [virtual(names)] if (names := comparison.virtual) else []
    return [
        *(said or map(partial(_single, comparison), comparison.comparable)),
        *_together(comparison),
    ]


def _single(comparison: Comparison, where: str) -> str:
    """Return the time of a device that is compared with no other."""
    medians = [t.median for t in comparison.of(where) if t.median is not None]
    count = f"was timed at {len(medians)} point{'s' * (len(medians) != 1)}"
    return f"{where} {count if comparison.sweep else f'takes {fine(medians[0])}'}"


def one_line(comparison: Comparison) -> str:
    """Return the result of a single device, without a sweep, as one line; else empty."""
    asked = comparison.sweep or comparison.items or comparison.setup
    if len(comparison.timings) != 1 or asked or comparison.change or comparison.differences:
        return ""
    (timing,) = comparison.timings
    if timing.median is None or timing.alone:
        return ""
    name = f"{timing.where}{' (virtual)' * timing.virtual}"
    spread = f"IQR {percent(timing.iqr)}, " if timing.iqr is not None else ""
    count, number = len(timing.seconds), timing.number
    repeats = f"{count:,} repeat{'s' * (count > 1)} of {number:,} run{'s' * (number > 1)}"
    told = f", compiled in {duration(timing.compiled)}" if timing.compiled else ""
    told += f", the first run in {duration(timing.first)}" if timing.first else ""
    return f"{name} takes {fine(timing.median)} ({spread}{repeats}){told}"


def _order(comparison: Comparison, real: Sequence[str]) -> list[str]:
    """Return the fastest devices, and by how much they are faster than the others."""
    timed = [t for t in comparison.timings if t.where in real]
    best = min(timed, key=lambda t: t.median or 0.0)
    equal = [t.where for t in timed if not t.differs(best)]
    by = [
        f"{times((t.median or 0.0) / (best.median or 1.0))} faster than {t.where}"
        for t in timed
        if t.where not in equal
    ]
    if not by:
        return [f"{both(real)} do not differ by more than the spread"]
    return [f"{both(equal)} {'is' if len(equal) == 1 else 'are'} {both(by)}"]


def _pairs(comparison: Comparison, real: Sequence[str]) -> list[str]:
    """Compare the first device of a sweep with each other one."""
    return [words for other in real[1:] if (words := _pair(comparison, real[0], other))]


def _pair(comparison: Comparison, first: str, other: str) -> str:
    """Compare two devices along the sweep."""
    axis = comparison.axis or ""
    pairs = [
        (a, b)
        for value in comparison.sweep[axis]
        if (a := comparison.at(first, {axis: value})) and a.median
        if (b := comparison.at(other, {axis: value})) and b.median
    ]
    flips = [c for c in comparison.crossovers if {c.faster, c.slower} == {first, other}]
    if len(flips) > 1:
        places = both(estimate(c.at) for c in flips)
        return f"{first} and {other} change places at {axis} ≈ {places}"
    apart = [(a.median or 0.0) / (b.median or 1.0) for a, b in pairs if a.differs(b)]
    if not apart:
        return f"{first} and {other} do not differ by more than the spread" if pairs else ""
    if flips:
        faster, slower = flips[0].faster, flips[0].slower
    elif min(apart) < 1 < max(apart):  # the values are no numbers, so nothing crosses
        return f"{first} and {other} are each faster at some {axis}"
    else:
        faster, slower = (other, first) if max(apart) > 1 else (first, other)
    ratios = apart if faster == other else [1 / ratio for ratio in apart]
    most = times(max(ratios))
    if flips:
        return f"{faster} is faster than {slower} from {at(flips[0])}, by up to {most}"
    if len(apart) == len(pairs):
        return f"{faster} is faster than {slower} at every {axis}: {span(ratios)}"
    return f"{faster} is up to {most} faster than {slower}"


def at(crossover: Crossover) -> str:
    """``"n ≈ 190"``."""
    return f"{crossover.variable} ≈ {estimate(crossover.at)}"


def _together(comparison: Comparison) -> Iterable[str]:
    """Return the scaling of several devices at the same time."""
    for where in comparison.devices:
        if scales := [t.scaling for t in comparison.of(where) if t.scaling]:
            by, names = span(scales).removesuffix(" ×"), where.replace("+", " + ")
            yield f"{names} at the same time: {by} times as fast as one after the other"


def estimate(value: float) -> str:
    """Format an estimated value of a sweep: ``"190"``, ``"2,000"``, ``"0.0013"``."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:g}"


def spelled(value: object) -> str:
    """Format a value of a sweep: ``"16,384"``, ``"0.001"``, ``"float16"``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return label(value, 24)


def point(values: Mapping[str, Any]) -> str:
    """``"n = 256, batch = 4"``."""
    return ", ".join(f"{name} = {spelled(value)}" for name, value in values.items())


def at_point(values: Mapping[str, Any]) -> str:
    """``" at n = 256"``, or nothing without a sweep."""
    return f" at {point(values)}" if values else ""


def span(ratios: Sequence[float]) -> str:
    """Format the range of ratios: ``"3.75 to 30.0 ×"``, ``"2.00 ×"``."""
    low, high = times(min(ratios)), times(max(ratios))
    return low if low == high else f"{low.removesuffix(' ×')} to {high}"


def percent(part: float) -> str:
    """Format a share: ``"2.1 %"``, ``"34 %"``."""
    return f"{100 * part:.{1 if part < 0.0995 else 0}f} %"


def by_words(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Group devices by a sentence about them, from pairs of a device and a sentence."""
    found: dict[str, list[str]] = {}
    for where, words in said:
        if words:
            found.setdefault(words, []).append(where)
    return found


# A median is called uncertain if its 95 % interval is wider than this part of it: smaller
# differences between two devices seldom matter.
_LOOSE = 0.05


def numbers(comparison: Comparison, where: str) -> str:
    """Return the agreement with the first device: ``"same to 3e-07"``, ``"DIFFERS: 0.4 in y"``."""
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


def interrupted(comparison: Comparison) -> list[str]:
    """Return how much was measured before an interrupt; empty without one."""
    if not comparison.interrupted:
        return []
    done = sum(t.median is not None for t in comparison.timings)
    planned = math.prod(map(len, comparison.sweep.values())) * len(comparison.devices)
    return [f"interrupted: {done} of {planned} timings have a median"]


def failed(comparison: Comparison) -> list[str]:
    """Return each device's errors; the first point of a sweep is enough."""
    found: dict[str, str] = {}
    for t in comparison.timings:
        if t.error and t.error != "interrupted":
            found.setdefault(f"{t.where}: {t.error}", at_point(t.values))
    return [words + at for words, at in found.items()]


def uncertain(comparison: Comparison) -> Iterator[str]:
    """Yield the medians that are noisy, of one run, or unsettled at the time limit."""
    wide = [t for t in comparison.timings if t.unsteady]
    single = [t for t in comparison.timings if len(t.seconds) == 1]
    others = [t for t in comparison.timings if not t.steady and not t.unsteady]
    loose = [t for t in others if _width(t) > _LOOSE]  # 0 for one run
    if wide:
        worst = max(t.iqr or 0.0 for t in wide)
        yield (
            f"{_measured_at(wide)}: noisy (IQR {percent(worst)} of the median): other work on the"
            " machine, or a changing clock"
        )
    if single:
        yield f"{_measured_at(single)}: only one run, so no spread"
    if loose:
        yield (
            f"{_measured_at(loose)}: time limit reached before the median settled; raise --max-time"
        )


def _width(timing: Timing) -> float:
    """Return the width of the 95 % interval, relative to the median."""
    low, high = timing.interval or (0.0, 0.0)
    return (high - low) / timing.median if timing.median else 0.0


def _measured_at(timings: Sequence[Timing]) -> str:
    if len(timings) > 3 and timings[0].values:
        return f"{both(t.where for t in timings)} at {len(timings)} points"
    return both(f"{t.where}{at_point(t.values)}" for t in timings)


def differences(comparison: Comparison) -> list[str]:
    """Return other differences from the earlier run, or why it was not compared."""
    told = "; ".join(comparison.differences)
    what = "differs from the earlier run" if comparison.change else "not compared with the last one"
    return [f"{what}: {told}"] if told else []


def compared_numbers(comparison: Comparison) -> Iterator[str]:
    """Yield why results were not compared, and in a sweep how well the others agree."""
    reasons = {a.reason: None for a in comparison.agreements if a.same is None and a.reason}
    yield from (f"numbers not compared: {reason}" for reason in reasons)
    known = [(where, numbers(comparison, where)) for where in comparison.devices]
    told = [f"{where} {words}" for where, words in known if words.startswith("same")]
    if told and comparison.sweep:
        yield f"numbers: {', '.join(told)}"


def copies(comparison: Comparison) -> Iterator[str]:
    """Yield the bytes of each device's inputs; in a sweep, the largest."""
    most = [max(comparison.of(w), key=lambda t: t.copied) for w in comparison.devices]
    found = [
        f"{size(t.copied)} to {t.where} in {duration(t.copy_seconds)}" for t in most if t.copied
    ]
    if found:
        up_to = "up to " if comparison.sweep else ""
        yield f"not timed: copying the inputs ({up_to}{', '.join(found)})"


def inside(comparison: Comparison) -> Iterator[str]:
    """Return the copies between devices and the waits in one run of each device."""
    # The bytes differ between the values of a sweep: show the last.
    said = {t.where: t.transfers for t in comparison.timings}
    last = " (at the last value)" if comparison.sweep else ""
    for words, wheres in by_words(said.items()).items():
        yield f"inside each run, on {both(wheres)}: {words}{last}"


def models(comparison: Comparison) -> Iterator[str]:
    """Yield each GPU's model: ``"cuda:0 and cuda:1: NVIDIA H200"``."""
    gpus = [t for t in comparison.timings if t.where in comparison.alone and not t.virtual]
    named = by_words((t.where, t.name or "") for t in gpus if t.where != "cpu")
    yield from (f"{both(wheres)}: {name}" for name, wheres in named.items())
