"""The last snapshot, who waits for a newer one, and what is said while the driver stalls."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from gpumagic.telemetry.snapshot import Problem, Snapshot


@dataclass(frozen=True)
class Wish:
    """Somebody who waits for one snapshot that was read at this moment or later."""

    future: Future[Snapshot]
    processes: bool
    not_before: float


class Latest:
    """Moments are in seconds of one monotonic clock; whoever calls this holds the lock.

    Parameters
    ----------
    clock : callable
        Seconds of Unix time.

    Attributes
    ----------
    wishes : list of Wish
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._read_at = -math.inf
        self._had_processes = False
        self.wishes: list[Wish] = []

    def put(self, snapshot: Snapshot, read_at: float, processes: bool) -> None:
        self._snapshot = snapshot
        self._read_at = read_at
        self._had_processes = processes

    def get(self, now: float, stalled_s: float | None) -> Snapshot | None:
        """The last snapshot; with its age and a Problem if the driver has stalled for so long."""
        if stalled_s is None:
            return self._snapshot
        last = self._snapshot or Snapshot(self._clock())
        age = round(now - self._read_at, 1)
        return replace(
            last,
            gpus=tuple(replace(gpu, age=age) for gpu in last.gpus),
            problems=(*last.problems, _stalled(stalled_s)),
        )

    def grants(self, wish: Wish) -> bool:
        """Whether the last snapshot is what somebody waits for."""
        return self._read_at >= wish.not_before and (self._had_processes or not wish.processes)

    def granted(self, *, every: bool = False) -> list[Wish]:
        """Those who wait no longer."""
        granted = [wish for wish in self.wishes if every or self.grants(wish)]
        self.wishes = [wish for wish in self.wishes if wish not in granted]
        return granted

    def empty(self) -> Snapshot:
        """For who has to be told something where nothing was read."""
        return self._snapshot or Snapshot(self._clock())


def _stalled(seconds: float) -> Problem:
    return Problem(
        "stalled",
        f"NVIDIA's driver has not answered for {seconds:.0f} s; what is shown is from before",
        "wait: waking an idle GPU takes seconds (sudo nvidia-smi -pm 1 keeps it awake); "
        "if it goes on, see dmesg, and restart the machine",
    )
