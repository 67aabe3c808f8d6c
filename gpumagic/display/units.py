"""Format bytes, seconds, rates and lists for people; an unknown value is "N/A"."""

from collections.abc import Iterable

NOT_KNOWN = "N/A"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SECONDS = ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))
_MANY = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def some(names: Iterable[str], most: int = 4) -> str:
    """Join the first `most` names and count the others: ``"X, y, net, loss and 3 more"``."""
    every = list(names)
    more = len(every) - most
    return ", ".join(every[:most]) + (f" and {more} more" if more > 0 else "")


def both(words: Iterable[str]) -> str:
    """Join words without duplicates: ``"a"``, ``"a and b"``, ``"a, b and c"``."""
    *first, last = dict.fromkeys(words) or [""]
    return f"{', '.join(first)} and {last}" if first else last


def many(count: int, word: str) -> str:
    """Return a count with its noun: ``"1 tensor"``, ``"3,000 tensors"``."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def size(count: float | None) -> str:
    """Format bytes with up to four digits: ``"1.2 GiB"``, ``"512 MiB"``, ``"80 B"``, ``"N/A"``."""
    if count is None:
        return NOT_KNOWN
    value = float(count)
    for unit in _SIZES:
        # From 1023.5 KiB on, use MiB, because the number would be rounded to 1024.
        if abs(value) < 1023.5 or unit == _SIZES[-1]:
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def share(used: float | None, total: float | None) -> str:
    """Format used and total bytes in one unit: ``"34.2 / 80.0 GiB"``. The total may be None."""
    if total is None:
        return size(used)
    divisor, unit = (2**30, "GiB") if total >= 2**30 else (2**20, "MiB")
    digits = 1 if total / divisor < 1000 else 0
    part = NOT_KNOWN if used is None else f"{used / divisor:.{digits}f}"
    return f"{part} / {total / divisor:.{digits}f} {unit}"


def age(seconds: float) -> str:
    """Format an age: ``"4 s"``, ``"8 min"``, ``"2 h 5 min"``, ``"4 d 15 h"``."""
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def duration(seconds: float | None) -> str:
    """Format seconds with two or three digits: ``"1.24 s"``, ``"45 µs"``, ``"2 min 5 s"``."""
    if seconds is None:
        return NOT_KNOWN
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    scaled, prefix = _scaled(seconds, _SECONDS)
    digits = 0 if prefix == "n" else (scaled < 9.95) + (prefix == "")
    return f"{scaled:.{digits}f} {prefix}s"


def fine(seconds: float | None) -> str:
    """Format seconds with three digits, for comparisons: ``"3.10 ms"``, ``"448 µs"``."""
    if seconds is None or abs(seconds) >= 59.95:
        return duration(seconds)
    return f"{_digits(seconds, _SECONDS)}s"


def tick(seconds: float) -> str:
    """Format seconds as an axis label: ``"10 µs"``, ``"2.5 ms"``, ``"100 s"``."""
    scaled, prefix = _scaled(seconds, _SECONDS)
    return f"{scaled:.{3 if prefix == 'n' else 4}g} {prefix}s"


def rate(each_second: float) -> str:
    """Format a rate per second with three digits: ``"448 /s"``, ``"80.6 k/s"``."""
    return f"{_digits(each_second, _MANY)}/s"


def times(ratio: float) -> str:
    """Format a ratio with three digits, or three decimals near 1: ``"1.32 ×"``, ``"1.004 ×"``."""
    if ratio >= 99.95:
        return f"{ratio:,.0f} ×"
    near = 0.9 <= ratio < 1.095 and round(ratio, 3) != 1
    return f"{ratio:.{1 if ratio >= 9.995 else 3 if near else 2}f} ×"


def _scaled(value: float, scales: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    # From 999.5 ms on, use seconds, because the number would be rounded to 1000.
    scale, prefix = next((s for s in scales if abs(value) >= 0.9995 * s[0]), scales[-1])
    return value / scale, prefix


def _digits(value: float, scales: tuple[tuple[float, str], ...]) -> str:
    if not value:
        return "0 "
    scaled, prefix = _scaled(value, scales)
    digits = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    return f"{scaled:.{0 if prefix == 'n' else digits}f} {prefix}"  # clocks resolve whole ns only
