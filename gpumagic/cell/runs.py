"""Run one cell for several frameworks at once, as one: each is placed, and one report says it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gpumagic.cell.report import Report, keep_last
from gpumagic.device import Device
from gpumagic.ledger.entry import Ledger, merged
from gpumagic.moving.moved import all_of


class OneRun(Protocol):
    """A cell in progress for one framework."""

    device: Device
    left_out: float

    def start(self, line: Callable[[], Any] | None = None) -> None: ...

    def finish(self, error: BaseException | None = None) -> Report | None: ...


class Runs:
    """The runs of one cell; each is as good as the only one."""

    def __init__(self, runs: Sequence[OneRun]) -> None:
        self._runs = list(runs)
        self.device = self._runs[0].device

    @property
    def left_out(self) -> float:
        """Seconds that are none of the cell's."""
        return self._runs[0].left_out

    @left_out.setter
    def left_out(self, seconds: float) -> None:
        for run in self._runs:
            run.left_out = seconds

    def start(self, line: Callable[[], Any] | None = None) -> None:
        """Start all, or raise what one raised, and none runs."""
        for n, run in enumerate(self._runs):
            try:
                run.start(line)
            except BaseException:
                for begun in reversed(self._runs[:n]):
                    begun.finish(None)
                raise

    def finish(self, error: BaseException | None = None) -> Report | None:
        """Finish all, in the opposite order, and say what happened in one report."""
        reports = [report for run in reversed(self._runs) if (report := run.finish(error))]
        if not reports:
            return None
        report = in_one(reports[::-1])
        keep_last(report)
        return report


def in_one(reports: Sequence[Report]) -> Report:
    """One report of what several say of the same cell."""
    first = reports[0]
    if len(reports) == 1:
        return first
    entries = merged(entry for report in reports for entry in report.ledger)
    worked = [report for report in reports if report.touched or report.elsewhere]
    returned = [report.returned for report in reports if report.returned is not None]
    faults = [report.fault for report in reports if report.fault]
    return replace(
        first,
        seconds=max(report.seconds for report in reports),
        moved=tuple(moved for report in reports for moved in report.moved),
        left=tuple(left for report in reports for left in report.left),
        move_seconds=sum(report.move_seconds for report in reports),
        returned=all_of(returned) if returned else None,
        stays=any(report.stays for report in reports),
        memory=tuple(memory for report in reports for memory in report.memory),
        ledger=Ledger(entries, any(report.ledger.virtual for report in reports)),
        ledger_complete=all(report.ledger_complete for report in reports),
        elsewhere=worked[0].elsewhere if worked and all(r.elsewhere for r in worked) else "",
        waited=all(report.waited for report in reports),
        fault=faults[0] if faults else None,
    )
