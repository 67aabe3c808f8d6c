"""Predict the ledger: what crosses between devices in a dry run, by the user's line.

The record is the ledger's own, so table and advice are those of a real run; times are not known.
"""

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

from gpumagic.ledger.attribute import count_for
from gpumagic.ledger.counts import Count
from gpumagic.ledger.entry import Ledger, merged
from gpumagic.ledger.via import locate
from gpumagic.usercode.timed_code import in_cell


class Crossings:
    """Counts copies and waits as a watch does, from what the fakes' operators would do."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, ...], Count] = {}
        self.silent = False  # while that is moved which is reported by itself

    def note(self, copy: bool, operator: str, source: str, destination: str, nbytes: int) -> None:
        """Count a copy, or a wait of the host, that the running line would make."""
        if self.silent or source == destination or "meta" in (source, destination):
            return
        inner = _caller(sys._getframe(1))
        user, how = locate(inner)
        at = (None, 0) if user is None else in_cell(user)
        key = (copy, operator, source, destination, how, at)
        count = self._counts.get(key)
        if count is None:
            count = count_for(copy, operator, source, destination, how, user, inner)
            self._counts[key] = count
        count.count += 1
        count.calls += 1
        count.nbytes += nbytes

    def ledger(self, virtual: bool) -> Ledger:
        """What was counted."""
        entries = (replace(count.entry(), seconds=None) for count in self._counts.values())
        return Ledger(merged(entries), virtual)


def _caller(frame: FrameType | None) -> FrameType | None:
    """What would call the operator in a real run, where no mode stands in between."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(__package__):
        frame = frame.f_back
    return frame
