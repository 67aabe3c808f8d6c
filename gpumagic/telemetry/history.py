"""The last minutes of each GPU in columns of numbers: small, thread-safe, and kept across pauses.

A ring of times, and beside it one array per GPU and reading; NaN stands for "not known". GPUs may
come and go: one that was not there has None, and one that has left the ring is forgotten.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from itertools import chain
from math import isnan, nan
from typing import Any, NamedTuple

from gpumagic.telemetry.snapshot import GpuSample, Snapshot

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


_READINGS = Reading._fields[2:]
_CHARTED = ("utilization", "memory_used")


class History:
    """A ring of readings.

    Parameters
    ----------
    entries : int
        How many moments are kept.
    interval_s : float
        Snapshots that follow the one before sooner than this are left out.
    """

    def __init__(self, entries: int = ENTRIES, interval_s: float = INTERVAL_S) -> None:
        self._size = entries
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._times = array("d", [nan]) * entries
        self._columns: dict[str, tuple[array[float], ...]] = {}
        self._seen: dict[str, int] = {}
        # The number of the next entry; it lies at this number modulo the size.
        self._next = 0
        self._first = 0

    def __len__(self) -> int:
        return self._next - self._first

    def add(self, snapshot: Snapshot) -> bool:
        """Keep a snapshot's readings; False where it came too soon after the one before."""
        with self._lock:
            # The clock was set back: what was later than now is not history.
            while len(self) and self._times[(self._next - 1) % self._size] > snapshot.time:
                self._next -= 1
            if len(self):
                before = self._times[(self._next - 1) % self._size]
                if snapshot.time - before < self._interval_s * _TOLERANCE:
                    return False
            place = self._next % self._size
            self._times[place] = snapshot.time
            for gpu in snapshot.gpus:
                self._seen[gpu.uuid] = self._next
                if gpu.uuid not in self._columns:
                    columns = tuple(array("d", [nan]) * self._size for _ in _READINGS)
                    self._columns[gpu.uuid] = columns
            present = {gpu.uuid: gpu for gpu in snapshot.gpus}
            for uuid, columns in self._columns.items():
                for column, value in zip(columns, _readings(present.get(uuid)), strict=True):
                    column[place] = value
            self._next += 1
            self._first = max(self._first, self._next - self._size)
            for uuid in [uuid for uuid, seen in self._seen.items() if seen < self._first]:
                del self._seen[uuid], self._columns[uuid]
            return True

    def since(self, time: float | None = None) -> dict[str, Any]:
        """What was read after a moment, ready for JSON.

        Parameters
        ----------
        time : float, optional
            Seconds of Unix time; everything that is kept if None.

        Returns
        -------
        dict
            ``{"time": […], "gpus": {uuid: {"utilization": […], "memory_used": […]}}}``: the n-th
            value of each belongs to the n-th time; percent and bytes, None where not known.
        """
        with self._lock:
            begin = self._begin(time)
            count = self._next - begin
            gpus = {
                uuid: {
                    name: [_known(name, value) for value in self._cut(column, begin)]
                    for name, column in zip(_READINGS, columns, strict=True)
                    if name in _CHARTED
                }
                for uuid, columns in self._columns.items()
                if count
            }
            return {"time": list(self._cut(self._times, begin)), "gpus": gpus}

    def rows(self, time: float | None = None) -> list[Reading]:
        """What was read after a moment, oldest first: a row per moment and GPU that was there."""
        with self._lock:
            begin = self._begin(time)
            times = list(self._cut(self._times, begin))
            found = [
                (at, uuid, values)
                for uuid, columns in self._columns.items()
                for at, *values in zip(
                    times, *(self._cut(column, begin) for column in columns), strict=True
                )
            ]
        rows = [
            Reading(at, uuid, *(_known(*pair) for pair in zip(_READINGS, values, strict=True)))
            for at, uuid, values in found
            if not all(map(isnan, values))
        ]
        return sorted(rows, key=lambda row: row.time)

    def _begin(self, time: float | None) -> int:
        begin = self._next
        while begin > self._first:
            if time is not None and self._times[(begin - 1) % self._size] <= time:
                break
            begin -= 1
        return begin

    def _cut(self, column: array[float], begin: int) -> Iterator[float]:
        start, stop = begin % self._size, self._next % self._size
        if begin == self._next:
            return iter(())
        if start < stop:
            return iter(column[start:stop])
        return chain(column[start:], column[:stop])


def _readings(gpu: GpuSample | None) -> Iterator[float]:
    for name in _READINGS:
        value = None if gpu is None else getattr(gpu, name)
        yield nan if value is None else float(value)


def _known(name: str, value: float) -> Any:
    if isnan(value):
        return None
    return int(value) if name == "memory_used" else value
