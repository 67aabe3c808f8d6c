"""What a sampler asks, and the guard around it: whatever it raises is told and logged once."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Protocol

from gpumagic.telemetry.snapshot import Problem, Snapshot

_log = logging.getLogger(__name__)


class Source(Protocol):
    """Always asked on the same thread while somebody watches.

    It may also have ``chore(*, processes: bool) -> float``, which does one thing that is too dear
    for a tick, if one is due, and returns in how many seconds the next one is.
    """

    def take(self, *, processes: bool, paced: bool) -> Snapshot:
        """``paced``: read each thing as often as its kind needs, and else tell what was read."""


class Guarded:
    """A source that never raises.

    Parameters
    ----------
    source : Source
    clock : callable
        Seconds of Unix time.
    """

    def __init__(self, source: Source, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock
        self._said: set[str] = set()

    def take(self, processes: bool) -> Snapshot:
        """A snapshot; where that fails, one that says so."""
        try:
            return self._source.take(processes=processes, paced=True)
        except Exception as error:  # noqa: BLE001  whatever is wrong is told, and the next may do
            self._say(f"a snapshot of the GPUs failed: {error!r}")
            return Snapshot(self._clock(), problems=(_failed(error),))

    def chore(self, processes: bool) -> float:
        """Do one thing that is due; in how many seconds the next one is."""
        chore = getattr(self._source, "chore", None)
        if chore is None:
            return math.inf
        try:
            return float(chore(processes=processes))
        except Exception as error:  # noqa: BLE001  the next tick tells what is wrong
            self._say(f"a reading of the GPUs failed: {error!r}")
            return math.inf

    def _say(self, text: str) -> None:
        """Log it once: what goes wrong at each tick would fill the log."""
        if text not in self._said:
            self._said.add(text)
            _log.warning(text)


def _failed(error: Exception) -> Problem:
    return Problem(
        "snapshot-failed",
        f"gpumagic could not take a snapshot ({type(error).__name__}: {error})",
        "report it to gpumagic with this line; it tries again by itself",
    )
