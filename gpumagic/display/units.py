"""Bytes and seconds as people read them; what is not known is N/A, never 0."""

from __future__ import annotations

NOT_KNOWN = "N/A"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_GIB = 2**30


def size(count: float | None) -> str:
    """Bytes with three digits or fewer: ``"1.2 GiB"``, ``"512 MiB"``, ``"80 B"``, ``"N/A"``."""
    if count is None:
        return NOT_KNOWN
    value = float(count)
    for unit in _SIZES:
        # 999.95 KiB would round to four digits.
        if abs(value) < 1023.5 or unit == _SIZES[-1]:
            break
        value /= 1024
    digits = 0 if unit == "B" or abs(value) >= 99.95 else 1
    return f"{value:.{digits}f} {unit}"


def share(used: float | None, total: float | None) -> str:
    """Bytes out of bytes in one unit: ``"34.2 / 80.0 GiB"``; each side may be N/A."""
    if total is None:
        return size(used)
    divisor, unit = (_GIB, "GiB") if total >= _GIB else (2**20, "MiB")
    digits = 1 if total / divisor < 1000 else 0
    part = NOT_KNOWN if used is None else f"{used / divisor:.{digits}f}"
    return f"{part} / {total / divisor:.{digits}f} {unit}"


def age(seconds: float | None) -> str:
    """How long something has lived, in its two largest units: ``"4 s"``, ``"8 min"``,
    ``"2 h 5 min"``, ``"4 d 15 h"``, ``"N/A"``."""
    if seconds is None:
        return NOT_KNOWN
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min"


def duration(seconds: float | None) -> str:
    """Seconds with two or three digits: ``"1.24 s"``, ``"3.1 ms"``, ``"45 µs"``, ``"2 min 5 s"``,
    ``"N/A"``."""
    if seconds is None:
        return NOT_KNOWN
    if seconds < 0:
        return f"−{duration(-seconds)}"
    if seconds >= 59.95:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    if seconds >= 0.9995:
        return f"{seconds:.{2 if seconds < 9.995 else 1}f} s"
    for scale, unit in ((1e3, "ms"), (1e6, "µs")):
        value = seconds * scale
        if value >= 0.9995:
            return f"{value:.{1 if value < 9.95 else 0}f} {unit}"
    return f"{seconds * 1e9:.0f} ns"
