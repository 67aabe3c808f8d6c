"""Follow what one client of the stream wants, and send it the newest of each kind of message.

Nothing that it sends raises. One message is under way at a time, and what comes meanwhile replaces
what waits: a client on a slow line gets fewer snapshots and not older ones.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpumagic.server.kernels import KernelCells
from gpumagic.telemetry.sampler import PERIODS_S, TOLERANCE

LONGEST_MESSAGE = 4096
"""Bytes; who sends more is cut off."""


@dataclass(frozen=True)
class Want:
    """What one client wants."""

    period_s: float = 1.0
    processes: bool = False
    past: bool = False  # the history is to be sent once
    since: float | None = None  # only what came after this moment (Unix time), all if None


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
    since = _number(message.get("since"))
    misread = since is None and message.get("since") is not None
    if period_s is None or not isinstance(processes, bool) or misread:
        return None
    least, greatest = PERIODS_S
    return Want(min(max(period_s, least), greatest), processes, "since" in message, since)


def _number(value: object) -> float | None:
    """A finite number; None for anything else, and true and false are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class Outbox:
    """Sends to one client, on the event loop; the future of ``write`` is done when a message has
    left this process."""

    def __init__(self, write: Callable[[bytes], asyncio.Future[None]], cells: KernelCells) -> None:
        self._write = write
        self._cells = cells
        self._waits: dict[str, bytes] = {}
        self._told = cells.revision
        self._due = -math.inf
        self._under_way = False
        self._closed = False
        self.want = Want()

    def ask(self, want: Want) -> None:
        """The client asked for something else."""
        # Who becomes impatient does not wait until the longer period is over.
        self._due = min(self._due, time.monotonic() + want.period_s)
        self.want = want

    def snapshot(self, message: bytes) -> None:
        """There is a new snapshot, which this client may not want yet."""
        now = time.monotonic()
        period = self.want.period_s
        if now < self._due - TOLERANCE * period:
            return
        # In step with the ticks, and never a burst after a pause.
        self._due = max(self._due + period, now + period / 2)
        self._waits["snapshot"] = message
        self.flush()

    def history(self, message: bytes) -> None:
        """The past, as it was asked for."""
        self._waits["history"] = message
        self.flush()

    def flush(self) -> None:
        """Send what waits, if nothing is under way."""
        if self._under_way or self._closed:
            return
        message = self._next()
        if message is not None:
            self._under_way = True
            self._write(message).add_done_callback(self._written)

    def close(self) -> None:
        """The client is gone: send nothing more and keep nothing."""
        self._closed = True
        self._waits = {}

    def _next(self) -> bytes | None:
        for kind in ("snapshot", "history"):
            if kind in self._waits:
                return self._waits.pop(kind)
        if self._told < self._cells.revision:
            told, self._told = self._told, self._cells.revision
            return self._cells.news(told)
        return None

    def _written(self, future: asyncio.Future[None]) -> None:
        self._under_way = False
        # Asked for even if it is not looked at: an unread error is logged, with a traceback.
        if future.cancelled() or future.exception() is not None:
            self.close()
        self.flush()
