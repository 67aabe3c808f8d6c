"""Keep the last minutes: readings of each GPU, also across pauses, and which cells ran on it.

Any thread may read. GPUs may come and go: where one was not there it has None, and one that has
left the ring is forgotten.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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


_CHARTED = ("utilization", "memory_used", "power")
# Bytes by UUID and by holder; None where nobody asked who holds memory.
_Held = dict[str, dict[str, int]] | None


class History:
    """A ring of readings; a snapshot that follows the one before too soon is left out."""

    def __init__(self, entries: int = ENTRIES, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._moments: deque[tuple[float, dict[str, Reading], _Held]] = deque(maxlen=entries)

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
            self._moments.append((time, readings, _held(snapshot)))
            return True

    def since(self, time: float | None = None) -> dict[str, Any]:
        """What was read after a moment (everything that is kept if None), ready for JSON:
        ``{"time": […], "gpus": {uuid: {"utilization": […], "memory_used": […], "power": […],
        "held": {holder: […]}}}}``."""
        with self._lock:
            kept = list(self._moments)
        told = [moment for moment in kept if time is None or moment[0] > time]
        uuids = dict.fromkeys(uuid for _, readings, _ in kept for uuid in readings) if told else {}
        return {
            "time": [at for at, _, _ in told],
            "gpus": {
                uuid: {
                    **{
                        name: [getattr(readings.get(uuid), name, None) for _, readings, _ in told]
                        for name in _CHARTED
                    },
                    "held": _columns(uuid, [held for _, _, held in told]),
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
            for at, readings, _ in kept
            if time is None or at > time
            for reading in readings.values()
            if any(value is not None for value in reading[2:])
        ]


def _held(snapshot: Snapshot) -> _Held:
    """As ``heldBy`` in js/src/monitor/owners.ts: a GPU has what its MIG devices have too."""
    if not snapshot.processes:
        return None
    parents = {gpu.uuid: gpu.mig for gpu in snapshot.gpus}
    held: dict[str, dict[str, int]] = {}
    for process in snapshot.processes:
        book = (process.kernel or process.notebook) if process.owner == "books" else None
        holder = book or process.owner
        for uuid in filter(None, (process.uuid, parents.get(process.uuid))):
            by = held.setdefault(uuid, {})
            by[holder] = by.get(holder, 0) + (process.memory or 0)
    return held


def _columns(uuid: str, moments: Sequence[_Held]) -> dict[str, list[int | None]]:
    holders = dict.fromkeys(name for held in moments if held for name in held.get(uuid, ()))
    return {
        name: [None if held is None else held.get(uuid, {}).get(name, 0) for held in moments]
        for name in holders
    }


@dataclass(frozen=True)
class CellRun:
    """A cell that ran, or runs; mirrored in ``js/src/snapshot.ts``."""

    id: str  # what is told again of a run has the same
    kernel: str | None
    notebook: str | None
    count: int | None  # the number in brackets before the cell
    start: float  # Unix time
    end: float | None = None
    gpus: tuple[str, ...] = ()  # UUIDs of those on which its kernel was seen to hold memory

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**vars(self), "gpus": list(self.gpus)}


class CellRuns:
    """The newest runs, the oldest first; ``revision`` grows, and ``on_change`` is called, whenever
    one begins, ends, or is seen on another GPU."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._runs: dict[str, tuple[int, CellRun]] = {}
        self.revision = 0
        self.on_change: Callable[[], None] = lambda: None

    def keep(self, run: CellRun) -> None:
        """Add a run, or what is new of one."""
        with self._lock:
            self.revision += 1
            self._runs[run.id] = (self.revision, run)
            if len(self._runs) > self._most:
                del self._runs[next(iter(self._runs))]
        self.on_change()

    def get(self, name: str) -> CellRun | None:
        """The run of this id, if it is kept."""
        return self._runs.get(name, (0, None))[1]

    def end(self, name: str, when: float) -> None:
        """A run has ended."""
        run = self.get(name)
        if run is not None and run.end is None:
            self.keep(replace(run, end=when))

    def hold(self, name: str, uuids: Iterable[str]) -> None:
        """A run was seen to hold memory on these GPUs."""
        run = self.get(name)
        if run is not None and not set(uuids) <= set(run.gpus):
            self.keep(replace(run, gpus=tuple(sorted({*run.gpus, *uuids}))))

    def forget(self, unwanted: Callable[[CellRun], bool]) -> None:
        """Drop the runs for which this holds."""
        with self._lock:
            self._runs = {name: kept for name, kept in self._runs.items() if not unwanted(kept[1])}

    def since(self, revision: int = 0) -> list[CellRun]:
        """The runs that are otherwise than they were at a revision."""
        with self._lock:
            return [run for changed, run in self._runs.values() if changed > revision]
