"""Show the ledger of every cell while `%gpuwatch` is on, where `%%ongpu` does not report it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpumagic import faults
from gpumagic.errors import torch_needed


class Watched:
    """Watches the cells of one IPython shell."""

    def __init__(self, shell: Any, show: Callable[[Any], object]) -> None:
        self.shell = shell
        self.on = False
        self._show = show
        self._options: dict[str, bool] = {}
        self._threads = threading.local()  # a subshell runs its cells on a thread of its own

    @property
    def _stack(self) -> list[Any]:
        stack: list[Any] = self._threads.__dict__.setdefault("stack", [])
        return stack

    def start(self, *, report: bool = False, strict: bool = False) -> None:
        """Watch from now on, the rest of the running cell included."""
        with torch_needed("%gpuwatch"):
            import gpumagic.ledger.watch  # noqa: F401
        self.stop()
        self._options = {"report": report, "strict": strict}
        self.on = True
        self.shell.events.register("pre_run_cell", self._pre_run_cell)
        self.shell.events.register("post_run_cell", self._post_run_cell)
        self._pre_run_cell(None)

    def stop(self) -> None:
        """Watch no longer."""
        if not self.on:
            return
        self.on = False
        self.shell.events.unregister("pre_run_cell", self._pre_run_cell)
        self.shell.events.unregister("post_run_cell", self._post_run_cell)
        while self._stack:
            self._finish()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing of the running cell meanwhile, since counting takes time."""
        counting = bool(self._stack)
        if counting:
            self._finish()
        try:
            yield
        finally:
            if counting:
                self._pre_run_cell(None)

    def _pre_run_cell(self, info: object) -> None:
        with faults.kept("starting the ledger of a cell for %gpuwatch"):
            from gpumagic.cell.run import last_report
            from gpumagic.ledger.watch import watch

            self._stack.append((watch(strict=self._options["strict"]).start(), last_report()))

    def _post_run_cell(self, result: Any = None) -> None:
        raw = getattr(getattr(result, "info", None), "raw_cell", None)
        if (raw is None or raw.strip()) and self._stack:  # an empty cell's start is not announced
            with faults.kept("showing the ledger of a cell for %gpuwatch"):
                self._finish()

    def _finish(self) -> None:
        from gpumagic.cell.run import last_report
        from gpumagic.ledger.ledger_view import LedgerLine

        watched, before = self._stack.pop()
        watched.stop()
        ledger = watched.ledger
        line = LedgerLine(ledger)
        if repr(line) and last_report() is before:  # else `%%ongpu` has shown it
            self._show(ledger if self._options["report"] else line)
