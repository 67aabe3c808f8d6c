"""Store recent GPU readings, cell runs, and this kernel's `%%gputime` and `%%gpufit` results."""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any
from uuid import uuid4

from gpumagic import faults
from gpumagic.telemetry.snapshot import ProcessSample, Snapshot

KEPT = 50


class Board:
    """The running and the finished measurements of this kernel, for the monitor to show."""

    def __init__(self) -> None:
        self._listeners: dict[Callable[[], object], None] = {}
        self.now: dict[str, Any] | None = None  # the running measurement's progress, as JSON
        self.entries: list[dict[str, Any]] = []  # finished measurements as JSON, the newest first

    def post(self, progress: dict[str, Any] | None) -> None:
        """Set the progress of the running measurement, as JSON; None when the measurement ends."""
        self.now = progress
        self._tell()

    def keep(self, text: str, time: float, title: str, bars: list[dict[str, Any]]) -> None:
        """Add a result. Each bar has ``where``, ``text`` and ``share`` (of the longest time)."""
        made = {"id": uuid4().hex, "title": title, "text": text, "bars": bars, "time": time}
        self.entries = [made, *self.entries][:KEPT]
        self._tell()

    def subscribe(self, call: Callable[[], object]) -> Callable[[], object]:
        """Call `call` after every change; return a function that unsubscribes `call`."""
        self._listeners[call] = None
        return lambda: self._listeners.pop(call, None)

    def _tell(self) -> None:
        for call in list(self._listeners):
            # A view that fails must not end the measurement.
            with faults.kept("showing a measurement"):
                call()


board = Board()
_CHARTED = ("utilization", "memory_used", "power")
_Readings = tuple[float | None, int | None, float | None]
# Bytes by GPU, then by kernel, notebook or `ProcessSample.owner`; None if no process is listed.
_Held = dict[str, Counter[str]] | None


class History:
    """A thread-safe ring buffer of GPU readings, about one per second."""

    def __init__(self, entries: int = 600) -> None:
        self._lock = threading.Lock()
        self._moments: deque[tuple[float, dict[str, _Readings], _Held]] = deque(maxlen=entries)

    def add(self, snapshot: Snapshot) -> bool:
        """Add a snapshot's readings. If the snapshot is too early, skip it and return False."""
        time, values = snapshot.time, attrgetter(*_CHARTED)
        readings: dict[str, _Readings] = {gpu.uuid: values(gpu) for gpu in snapshot.gpus}
        with self._lock:
            # If the clock was set back, drop readings that now lie in the future.
            while self._moments and self._moments[-1][0] > time:
                self._moments.pop()
            # Keep one reading per second. The limit is 0.9 s, because snapshots may be a bit early.
            if self._moments and time - self._moments[-1][0] < 0.9:
                return False
            self._moments.append((time, readings, _held(snapshot)))
            return True

    def since(self, time: float | None = None) -> dict[str, Any]:
        """Return the readings after `time` (all if None): {"time": […], "gpus": {uuid: {…}}}."""
        with self._lock:
            kept = list(self._moments)
        moments = [moment for moment in kept if time is None or moment[0] > time]
        gpus: dict[str, dict[str, Any]] = {}
        for uuid in dict.fromkeys(uuid for _, found, _ in kept if moments for uuid in found):
            its = [readings.get(uuid, (None, None, None)) for _, readings, _ in moments]
            gpus[uuid] = {name: [one[n] for one in its] for n, name in enumerate(_CHARTED)}
            gpus[uuid]["held"] = _columns(uuid, [held for _, _, held in moments])
        return {"time": [at for at, _, _ in moments], "gpus": gpus}


def _held(snapshot: Snapshot) -> _Held:
    """Return the bytes by GPU and holder. ``holders`` in js/src/monitor/owners.ts does the same."""
    if not snapshot.processes:
        return None
    parents = {gpu.uuid: gpu.mig for gpu in snapshot.gpus}
    held = defaultdict[str, Counter[str]](Counter)
    for process in snapshot.processes:
        book = (process.kernel or process.notebook) if process.owner == "books" else None
        for uuid in filter(None, (process.uuid, parents.get(process.uuid))):
            held[uuid][book or process.owner] += process.memory or 0
    return held


def _columns(uuid: str, moments: Sequence[_Held]) -> dict[str, list[int | None]]:
    holders = dict.fromkeys(name for held in moments if held for name in held.get(uuid, ()))
    return {
        name: [None if held is None else held.get(uuid, Counter())[name] for held in moments]
        for name in holders
    }


@dataclass(frozen=True)
class CellRun:
    """A running or finished cell; mirrored in ``js/src/snapshot.ts``."""

    id: str  # each update of a run has the same id
    kernel: str | None
    notebook: str | None
    count: int | None  # the number in ``In [7]``
    start: float  # Unix time
    end: float | None = None
    gpus: tuple[str, ...] = ()  # UUIDs of the GPUs that the cell used


class CellRuns:
    """The last `most` runs of cells. `keep` increases ``revision`` and calls ``on_change``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.RLock()
        self._runs: dict[str, tuple[int, CellRun]] = {}
        # Memory of the kernel's processes when a run began: by run id, then by GPU's UUID and pid.
        self._before: dict[str, dict[tuple[str, int], int | None]] = {}
        self.revision = 0
        self.on_change: Callable[[], None] = lambda: None

    def keep(self, run: CellRun) -> None:
        with self._lock:
            self.revision += 1
            self._runs[run.id] = (self.revision, run)
            for oldest in list(self._runs)[: -self._most]:
                del self._runs[oldest]
                self._before.pop(oldest, None)
        self.on_change()

    def get(self, run_id: str) -> CellRun | None:
        return self._runs.get(run_id, (0, None))[1]

    def end(self, run_id: str, when: float) -> None:
        if (run := self.get(run_id)) and run.end is None:
            self.keep(replace(run, end=when))

    def start(self, run_id: str, processes: Iterable[ProcessSample]) -> None:
        self._before[run_id] = {(one.uuid, one.pid): one.memory for one in processes}

    def use(self, run_id: str, snapshot: Snapshot, processes: Iterable[ProcessSample]) -> None:
        """Record GPUs where a process computes, or holds more or less memory than at `start`."""
        if (run := self.get(run_id)) is None:
            return
        load = {gpu.uuid: gpu.utilization for gpu in snapshot.gpus}
        before = self._before.get(run_id, {})
        used = set(run.gpus)
        for one in processes:
            # Without a process's utilization, use the GPU's. If both are unknown, record the GPU.
            busy = load.get(one.uuid) if one.utilization is None else one.utilization
            if busy is None or busy > 0 or one.memory != before.get((one.uuid, one.pid)):
                used.add(one.uuid)
        if len(used) > len(run.gpus):
            self.keep(replace(run, gpus=tuple(sorted(used))))

    def forget(self, unwanted: Callable[[CellRun], bool]) -> None:
        with self._lock:
            self._runs = {name: kept for name, kept in self._runs.items() if not unwanted(kept[1])}
            self._before = {name: held for name, held in self._before.items() if name in self._runs}

    def since(self, revision: int = 0) -> list[CellRun]:
        with self._lock:
            return [run for changed, run in self._runs.values() if changed > revision]
