"""Count the copies between devices of a run, and its waits: torch's, and those of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from gpumagic import faults
from gpumagic.ledger import ledger_view
from gpumagic.ledger.counts import Tally
from gpumagic.ledger.entry import Ledger, merged
from gpumagic.timing.measure.stopwatch import Stopwatch
from gpumagic.usercode.values import torch_here

_WATCHING = "watching the copies of a timed run"


class Transfers:
    """Counts within; a ledger that cannot be kept is no reason not to measure."""

    def __init__(self, stopwatch: Stopwatch, told: Callable[[str], object]) -> None:
        self._stopwatch = stopwatch
        self._told = told  # of what there was, once it is over
        self._tally = Tally()
        self._watch: Any = None
        self._counting = ExitStack()

    def __enter__(self) -> Transfers:
        with faults.kept(_WATCHING):
            if torch_here() is not None and self._stopwatch.devices.started():
                from gpumagic.ledger.watch import watch

                self._watch = watch(warn=False, beside=False).start()
        for framework in self._stopwatch.others:
            with faults.kept(_WATCHING):
                self._counting.enter_context(framework.count(self._tally, strict=False))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with faults.kept(_WATCHING):
            self._counting.close()
        with faults.kept(_WATCHING):
            ledgers = [self._tally.ledger()]
            if self._watch is not None:
                self._watch.stop()
                ledgers.append(self._watch.ledger)
            entries = merged(entry for ledger in ledgers for entry in ledger)
            self._told(ledger_view.line(Ledger(entries)))
