"""Show the ledger of every cell while `%gpuwatch` is on, where `%%ongpu` does not report it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumagic import faults
from gpumagic.errors import torch_needed

if TYPE_CHECKING:
    from gpumagic.cell.report import Report
    from gpumagic.ledger.watch import watch


@dataclass(frozen=True)
class Counting:
    """A cell whose copies and waits are counted, and the report that was the last before it."""

    watch: "watch"
    before: "Report | None"


class Watched:
    """Counts in the cells of one IPython shell, while it is on."""

    def __init__(self, show: Callable[[Any], object]) -> None:
        self.on = False
        self._show = show
        self._report = self._strict = False

    def turn_on(self, *, report: bool, strict: bool) -> None:
        with torch_needed("%gpuwatch"):
            import gpumagic.ledger.watch  # noqa: F401
        self.on, self._report, self._strict = True, report, strict

    def begin(self) -> Counting | None:
        """Count from now on; nothing is while it is off."""
        if not self.on:
            return None
        with faults.kept("starting the ledger of a cell for %gpuwatch"):
            from gpumagic.cell.run import last_report
            from gpumagic.ledger.watch import watch

            return Counting(watch(strict=self._strict).start(), last_report())

    def end(self, counting: Counting) -> None:
        """Show what was counted."""
        with faults.kept("showing the ledger of a cell for %gpuwatch"):
            from gpumagic.cell.run import last_report
            from gpumagic.ledger.ledger_view import LedgerLine

            counting.watch.stop()
            ledger = counting.watch.ledger
            line = LedgerLine(ledger)
            if repr(line) and last_report() is counting.before:  # else `%%ongpu` has shown it
                self._show(ledger if self._report else line)
