"""Show the ledger of every cell while `%gpuwatch` is on, where `%%ongpu` does not report it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpumagic import faults
from gpumagic.magics.ongpu import CellHooks, RunningCell


class Watched:
    """Counts copies and waits in the cells of one IPython shell, while it is on."""

    def __init__(self, cells: CellHooks, show: Callable[[Any], object]) -> None:
        self._cells = cells
        self._show = show
        self._report = self._strict = False

    @property
    def on(self) -> bool:
        return self._cells.watched is self

    def start(self, *, report: bool, strict: bool) -> None:
        """Count from now on, in the rest of the running cell too."""
        self.stop()
        self._cells.watched, self._report, self._strict = self, report, strict
        self.begin(self._cells.running())

    def stop(self) -> None:
        """Count no longer, and show what was counted."""
        self._cells.watched = None
        for cell in reversed(self._cells.stack):
            self.end(cell)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of the running cell meanwhile, since counting takes time."""
        counted = [cell for cell in self._cells.stack[-1:] if cell.watch]
        for cell in counted:
            self.end(cell)
        try:
            yield
        finally:
            for cell in counted:
                self.begin(cell)

    def begin(self, cell: RunningCell) -> None:
        """Begin to count in a cell."""
        with faults.kept("starting the ledger of a cell for %gpuwatch"):
            from gpumagic.frameworks.watching import watch

            cell.watch = watch(strict=self._strict, warn=False).start()

    def end(self, cell: RunningCell) -> None:
        """Show what was counted in a cell, unless `%%ongpu` has shown it."""
        watched, cell.watch = cell.watch, None
        if watched is None:
            return
        with faults.kept("showing the ledger of a cell for %gpuwatch"):
            from gpumagic.ledger.ledger_view import LedgerLine

            watched.stop()
            line = LedgerLine(watched.ledger)
            if repr(line) and not cell.reported:
                self._show(watched.ledger if self._report else line)
