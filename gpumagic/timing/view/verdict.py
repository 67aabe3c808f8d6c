"""What a comparison says, in sentences: which device is faster, by how much, from where on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumagic.display.units import fine, times
from gpumagic.timing.comparison import Comparison
from gpumagic.timing.result.crossover import Crossover

# The median is measured to 1 %: less is no difference to speak of.
_EVEN = 1.01


def number(value: float) -> str:
    """A value of a sweep that is an estimate: ``"190"``, ``"2,000"``, ``"0.0013"``."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 10 else f"{rounded:g}"


def shown(value: object) -> str:
    """A value of a sweep: ``"16,384"``, ``"0.001"``, ``"float16"``."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    words = value if isinstance(value, str) else repr(value)
    words = " ".join(words.removeprefix("torch.").split())
    return words if len(words) <= 24 else words[:23] + "…"


def point(values: Mapping[str, Any]) -> str:
    """``"n = 256, batch = 4"``."""
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def both(words: Sequence[str]) -> str:
    """``"a"``, ``"a and b"``, ``"a, b and c"``."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""


def wrong(comparison: Comparison) -> list[str]:
    """Which device gave other numbers than the first: a fast wrong answer is no answer."""
    said = []
    for where in comparison.devices:
        found = [a for a in comparison.agreements if a.where == where and a.same is False]
        if not found:
            continue
        worst = max(found, key=lambda a: a.largest or 0.0)
        by = "" if worst.largest is None else f": {worst.largest:.2g} apart"
        inside = f" in {worst.name}" if worst.name else ""
        place = f" at {point(worst.values)}" if worst.values else ""
        # The reason may say no more than that.
        again = by and worst.reason.startswith(f"{worst.name} differs")
        why = f" ({worst.reason})" if worst.reason and not again else ""
        said.append(f"{where} gives other numbers than {worst.reference}{by}{inside}{place}{why}")
    return said


def answer(comparison: Comparison) -> list[str]:
    """The answer in a sentence or a few, the most important first; see `wrong` too."""
    if not any(t.median for t in comparison.timings):
        return ["nothing was measured"]
    said = _sweep(comparison) if comparison.sweep else _one(comparison)
    return said + list(_together(comparison))


def _real(comparison: Comparison) -> list[str]:
    """The devices whose times may be compared: alone, no virtual GPU, the right numbers."""
    virtual = {t.where for t in comparison.timings if t.virtual}
    timed = {t.where for t in comparison.timings if t.median}
    return [
        where
        for where in comparison.alone
        if where in timed and where not in virtual and not comparison.wrong(where)
    ]


def _virtual(comparison: Comparison) -> str:
    # The CPU may be one of several at the same time.
    found = (part for t in comparison.timings if t.virtual for part in t.where.split("+"))
    names = [name for name in dict.fromkeys(found) if name != "cpu"]
    if not names:
        return ""
    one = len(names) == 1
    return (
        f"{both(names)} {'is' if one else 'are'} virtual:"
        f" {'its' if one else 'their'} times are the CPU's and say nothing about a GPU"
    )


def _one(comparison: Comparison) -> list[str]:
    real = _real(comparison)
    virtual = _virtual(comparison)
    timed = {t.where: t for t in comparison.timings}
    if len(real) < 2:
        said = [f"{where} takes {fine(timed[where].median)}" for where in real]
        return [virtual, *said] if virtual else [] if wrong(comparison) else said
    medians = {where: timed[where].median or 0.0 for where in real}
    best = min(real, key=lambda where: medians[where])
    ratios = {w: medians[w] / medians[best] for w in real if medians[best]}
    equal = [w for w in real if ratios.get(w, 1) < _EVEN or not timed[w].differs(timed[best])]
    others = [w for w in real if w not in equal]
    if not others:
        return [f"{both(real)} do not differ by more than the spread", *filter(None, [virtual])]
    by = [f"{times(ratios[other])} faster than {other}" for other in others]
    said = [f"{both(equal)} {'is' if len(equal) == 1 else 'are'} {both(by)}"]
    return [*said, virtual] if virtual else said


def _sweep(comparison: Comparison) -> list[str]:
    real = _real(comparison)
    virtual = _virtual(comparison)
    said: dict[str, list[str]] = {}
    for fixed in comparison.panels:
        for other in real[1:]:
            if words := _pair(comparison, real[0], other, fixed):
                said.setdefault(words, []).append(point(fixed))
    lines = [
        words
        if len(comparison.panels) == 1 or len(where) == len(comparison.panels)
        else f"{both(where)}: {words}"
        for words, where in said.items()
    ]
    if len(real) < 2 and not virtual and not wrong(comparison):
        counts = {where: _count(comparison, where) for where in real}
        lines = [f"{w} was timed at {n} point{'s' * (n != 1)}" for w, n in counts.items()]
    return [*lines, virtual] if virtual else lines


def _pair(comparison: Comparison, first: str, other: str, fixed: Mapping[str, Any]) -> str:
    """How two devices compare along the axis."""
    axis = comparison.axis
    assert axis is not None
    pair = {first, other}
    flips = [c for c in crossovers(comparison, fixed) if {c.faster, c.slower} == pair]
    ratios = []
    differ = []
    for value in comparison.sweep[axis]:
        a, b = (comparison.at(where, {**fixed, axis: value}) for where in (first, other))
        if a is not None and b is not None and a.median and b.median:
            ratios.append(a.median / b.median)
            differ.append(a.differs(b))
    if not ratios:
        return ""
    if len(flips) == 1:
        faster, slower = flips[0].faster, flips[0].slower
        most = max(ratios) if faster == other else 1 / min(ratios)
        return f"{faster} is faster than {slower} from {at(flips[0])}, by up to {times(most)}"
    if flips:
        places = both([number(c.at) for c in flips])
        return f"{first} and {other} change places at {axis} ≈ {places}"
    if not any(differ):
        return f"{first} and {other} do not differ by more than the spread at any {axis}"
    faster, slower = (other, first)
    if sum(r > 1 for r, d in zip(ratios, differ, strict=True) if d) == 0:
        faster, slower = first, other
        ratios = [1 / r for r in ratios]
    low, high = times(max(min(ratios), 0.0)), times(max(ratios))
    if all(differ):
        by = low if low == high else f"{low.removesuffix(' ×')} to {high}"
        return f"{faster} is faster than {slower} at every {axis}: {by}"
    return f"{faster} is up to {high} faster than {slower}, at no {axis} slower beyond the spread"


def _count(comparison: Comparison, where: str) -> int:
    return sum(t.where == where and t.median is not None for t in comparison.timings)


def crossovers(comparison: Comparison, fixed: Mapping[str, Any]) -> list[Crossover]:
    """Those at one value of the other variable, without those of virtual GPUs."""
    real = set(_real(comparison))
    return [
        c
        for c in comparison.crossovers
        if {c.faster, c.slower} <= real and point(c.values) == point(fixed)
    ]


def at(crossover: Crossover) -> str:
    """``"n ≈ 190"``."""
    return f"{crossover.variable} ≈ {number(crossover.at)}"


def _together(comparison: Comparison) -> Iterable[str]:
    """How several at the same time scale: at the one point, or over a sweep's."""
    for where in comparison.devices:
        found = [t for t in comparison.timings if t.where == where and t.scaling]
        if not found:
            continue
        scaling = [t.scaling or 0.0 for t in found]
        low, high = times(min(scaling)), times(max(scaling))
        span = low if low == high else f"{low.removesuffix(' ×')} to {high}"
        virtual = " (virtual)" if any(t.virtual for t in found) else ""
        names = where.replace("+", " + ")
        yield f"{names}{virtual} at the same time: {span} of one after the other"
