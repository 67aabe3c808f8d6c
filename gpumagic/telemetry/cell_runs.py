"""Record which cells ran when, and on which GPUs; mirrored in ``js/src/snapshot.ts``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class CellRun:
    """A cell that ran, or runs (``end`` is None); what is told again of a run has the same id.

    ``count`` is the number in brackets before the cell, ``start`` and ``end`` are Unix time,
    ``gpus`` the UUIDs of the GPUs on which its kernel was seen to hold memory.
    """

    id: str
    kernel: str | None
    notebook: str | None
    count: int | None
    start: float
    end: float | None = None
    gpus: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "gpus": list(self.gpus)}


class CellRuns:
    """The runs that are kept, the oldest first, at most ``most``; any thread may read and write.

    ``revision`` grows whenever a run begins, ends, or is seen on another GPU; then ``on_change`` is
    called.
    """

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
