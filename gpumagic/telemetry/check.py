"""Record what the doctor looked at, and leave of what is wrong the first cause."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    ok: bool | None  # None where it is neither right nor wrong, or follows from what is wrong
    found: str
    cure: str = ""  # where ok is False


def first_cause(checks: Iterable[Check]) -> list[Check]:
    """The same, from the hardware up: what is wrong after the first only follows from it."""
    found: list[Check] = []
    for check in checks:
        follows = check.ok is False and any(one.ok is False for one in found)
        found.append(replace(check, ok=None, cure="") if follows else check)
    return found
