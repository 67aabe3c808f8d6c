"""The history as a file of comma-separated values, a part at a time."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from itertools import islice

from gpumagic.telemetry.history import Reading

HEADER = (
    "time (s since 1970, UTC)",
    "uuid",
    "utilization (%)",
    "memory used (B)",
    "temperature (°C)",
    "power (W)",
)
_ROWS = 2000


def parts(rows: Sequence[Reading]) -> Iterator[str]:
    """The file, some thousand rows at a time; what is not known is an empty field."""
    left = iter(rows)
    part: list[Sequence[object]] = [HEADER]
    while part:
        text = io.StringIO()
        csv.writer(text).writerows(part)
        yield text.getvalue()
        part = list(islice(left, _ROWS))
