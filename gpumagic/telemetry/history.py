"""Keep the last minutes of each GPU in a ring of readings, also across pauses.

Any thread may read. GPUs may come and go: where one was not there it has None, and one that has
left the ring is forgotten.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

from gpumagic.telemetry.snapshot import Snapshot

ENTRIES = 600
INTERVAL_S = 1.0
# A tick may come a little early.
_TOLERANCE = 0.9


class Reading(NamedTuple):
    """One GPU at one moment: seconds of Unix time, percent, bytes, °C, watts; None: not known."""

    time: float
    uuid: str
    utilization: float | None
    memory_used: int | None
    temperature: float | None
    power: float | None


_CHARTED = ("utilization", "memory_used")


class History:
    """A ring of readings; a snapshot that follows the one before too soon is left out."""

    def __init__(self, entries: int = ENTRIES, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._moments: deque[tuple[float, dict[str, Reading]]] = deque(maxlen=entries)

    def __len__(self) -> int:
        return len(self._moments)

    def add(self, snapshot: Snapshot) -> bool:
        """Keep a snapshot's readings; False where it came too soon after the one before."""
        time = snapshot.time
        readings = {
            gpu.uuid: Reading(
                time, gpu.uuid, gpu.utilization, gpu.memory_used, gpu.temperature, gpu.power
            )
            for gpu in snapshot.gpus
        }
        with self._lock:
            # The clock was set back: what was later than now is not history.
            while self._moments and self._moments[-1][0] > time:
                self._moments.pop()
            if self._moments and time - self._moments[-1][0] < self._interval_s * _TOLERANCE:
                return False
            self._moments.append((time, readings))
            return True

    def since(self, time: float | None = None) -> dict[str, Any]:
        """What was read after a moment (everything that is kept if None), ready for JSON.

        ``{"time": […], "gpus": {uuid: {"utilization": […], "memory_used": […]}}}``: the n-th value
        of each belongs to the n-th time; percent and bytes, None where not known.
        """
        with self._lock:
            kept = list(self._moments)
        told = [moment for moment in kept if time is None or moment[0] > time]
        uuids = dict.fromkeys(uuid for _, readings in kept for uuid in readings) if told else {}
        return {
            "time": [at for at, _ in told],
            "gpus": {
                uuid: {
                    name: [getattr(readings.get(uuid), name, None) for _, readings in told]
                    for name in _CHARTED
                }
                for uuid in uuids
            },
        }

    def readings(self, time: float | None = None) -> list[Reading]:
        """What was read after a moment, oldest first: one per moment and GPU that was there."""
        with self._lock:
            kept = list(self._moments)
        return [
            reading
            for at, readings in kept
            if time is None or at > time
            for reading in readings.values()
            if any(value is not None for value in reading[2:])
        ]
