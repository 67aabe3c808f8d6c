"""Guard what a sampler asks: whatever it raises is kept, told in the snapshot, and never raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gpumagic.telemetry.report_once import report_once
from gpumagic.telemetry.snapshot import Problem, Snapshot


class Source(Protocol):
    """What a sampler asks, always on the same thread while somebody watches."""

    def take(self, *, processes: bool, patience: float) -> Snapshot:
        """The machine now; a reading may be `patience` times its interval old."""

    def chore(self, *, processes: bool, seconds: float) -> None:
        """Read ahead what is expensive and due, for at most so long."""


class Guarded:
    """A source that never raises."""

    def __init__(self, source: Source, clock: Callable[[], float]) -> None:
        self._source = source
        self._clock = clock

    def take(self, processes: bool, patience: float) -> Snapshot:
        """A snapshot; where that fails, one that says so."""
        try:
            return self._source.take(processes=processes, patience=patience)
        except Exception as error:  # noqa: BLE001  kept and told, and the next may succeed
            report_once("taking a snapshot of the GPUs", error)
            problem = Problem(
                "snapshot-failed",
                f"gpumagic could not take a snapshot ({type(error).__name__}: {error})",
                "report it to gpumagic with this line; it tries again by itself",
            )
            return Snapshot(self._clock(), problems=(problem,))

    def chore(self, processes: bool, seconds: float) -> None:
        """Read ahead what is due."""
        try:
            self._source.chore(processes=processes, seconds=seconds)
        except Exception as error:  # noqa: BLE001  kept; the next tick shows what is wrong
            report_once("reading the GPUs ahead", error)


def stalled(seconds: float) -> Problem:
    """What is said while a call has not come back for so long."""
    return Problem(
        "stalled",
        f"NVIDIA's driver has not answered for {seconds:.0f} s; what is shown is from before",
        "wait: waking an idle GPU takes seconds (sudo nvidia-smi -pm 1 keeps it awake); "
        "if it goes on, see dmesg, and restart the machine",
    )
