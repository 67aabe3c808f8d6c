"""Parse what a client of the stream asks for; nothing that it sends raises."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from gpumagic.telemetry.subscription import PERIODS_S

LONGEST_MESSAGE = 4096
"""Bytes; who sends more is cut off."""


@dataclass(frozen=True)
class Want:
    """What one client wants.

    ``past``: the history is to be sent once; ``since``: only what came after this moment of it
    (Unix time), all that is kept if None.
    """

    period_s: float = 1.0
    processes: bool = False
    past: bool = False
    since: float | None = None


def parse_want(text: str | bytes, before: Want) -> Want | None:
    """What a message asks for, None if malformed; what it does not mention stays as before."""
    if isinstance(text, bytes):
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("type") != "want":
        return None
    period_s = _number(message.get("period", before.period_s))
    processes = message.get("processes", before.processes)
    past, since = "since" in message, None
    if message.get("since") is not None:
        since = _number(message["since"])
        past = since is not None
    if period_s is None or not isinstance(processes, bool) or past != ("since" in message):
        return None
    return Want(clamp(period_s), processes, past, since)


def clamp(period_s: float) -> float:
    """The nearest period that is allowed, in seconds."""
    least, greatest = PERIODS_S
    return min(max(period_s, least), greatest)


def _number(value: object) -> float | None:
    """A finite number; None for anything else, and true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
