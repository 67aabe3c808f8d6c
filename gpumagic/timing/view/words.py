"""Spell values, points, ratios and lists, in the one way in which a comparison says them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gpumagic.display.units import times

_LONGEST = 24


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
    return words if len(words) <= _LONGEST else words[: _LONGEST - 1] + "…"


def point(values: Mapping[str, Any]) -> str:
    """``"n = 256, batch = 4"``."""
    return ", ".join(f"{name} = {shown(value)}" for name, value in values.items())


def at_point(values: Mapping[str, Any]) -> str:
    """``" at n = 256"``, or nothing without a sweep."""
    return f" at {point(values)}" if values else ""


def both(words: Iterable[str]) -> str:
    """``"a"``, ``"a and b"``, ``"a, b and c"``, each once."""
    *first, last = dict.fromkeys(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def span(ratios: Sequence[float]) -> str:
    """The least and the largest of ratios: ``"3.75 to 30.0 ×"``, ``"2.00 ×"``."""
    low, high = times(min(ratios)), times(max(ratios))
    return low if low == high else f"{low.removesuffix(' ×')} to {high}"


def percent(part: float) -> str:
    """A share as people read it: ``"2.1 %"``, ``"34 %"``."""
    return f"{100 * part:.{1 if part < 0.0995 else 0}f} %"


def by_words(said: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Of pairs of a device and what is said of it: the devices by what is said."""
    found: dict[str, list[str]] = {}
    for where, words in said:
        if words:
            found.setdefault(words, []).append(where)
    return found
