"""Parse counters that NVML has by number, many in one call; each has its own code and time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

FieldId = int | tuple[int, int]
"""A number of ``NVML_FI_DEV_…``, or that and its scope, such as a link."""

ALL_LINKS = 0xFFFFFFFF
"""The scope that sums a counter over all NVLinks."""

# By NVML's valueType: the member of its union, and whether a counter of that type wraps soon.
_TYPES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_NARROW = (1, 5, 6)
_SUCCESS, _INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND = 0, 2, 3, 13
# An older driver does not know a newer number.
UNSUPPORTED = (_INVALID_ARGUMENT, _NOT_SUPPORTED, _FUNCTION_NOT_FOUND)


@dataclass(frozen=True)
class Field:
    """A value; ``at_us`` in microseconds of the driver's clock, None where it does not say;
    ``narrow`` where it has 32 bits or fewer and may have wrapped unseen."""

    value: float
    at_us: int | None
    narrow: bool


def parse(
    ids: Iterable[FieldId], answers: Iterable[Any]
) -> tuple[dict[FieldId, Field], set[FieldId]]:
    """What was answered, and what this GPU or driver does not have."""
    found: dict[FieldId, Field] = {}
    missing: set[FieldId] = set()
    for name, answer in zip(ids, answers, strict=True):
        code, kind = int(answer.nvmlReturn), int(answer.valueType)
        if code == _SUCCESS and kind in _TYPES:
            value = getattr(answer.value, _TYPES[kind])
            stamp = int(answer.timestamp)
            found[name] = Field(value, stamp if stamp > 0 else None, kind in _NARROW)
        elif code in UNSUPPORTED:
            missing.add(name)
    return found, missing
