"""Show the ledger of every cell while `%gpuwatch` is on, where `%%ongpu` does not report it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpumagic import faults
from gpumagic.errors import torch_needed

if TYPE_CHECKING:
    from gpumagic.ledger.watch import watch


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

    def begin(self) -> "watch | None":
        """Count from now on; nothing is while it is off."""
        if not self.on:
            return None
        with faults.kept("starting the ledger of a cell for %gpuwatch"):
            from gpumagic.ledger.watch import watch

            return watch(strict=self._strict).start()

    def end(self, watched: "watch", *, shown: bool) -> None:
        """Show what was counted, unless `%%ongpu` has shown it."""
        with faults.kept("showing the ledger of a cell for %gpuwatch"):
            from gpumagic.ledger.ledger_view import LedgerLine

            watched.stop()
            line = LedgerLine(watched.ledger)
            if repr(line) and not shown:
                self._show(watched.ledger if self._report else line)
