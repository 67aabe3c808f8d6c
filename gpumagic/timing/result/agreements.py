"""Whether each device gave the numbers of the first, at every value of a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpumagic.timing.result.agreement import agree
from gpumagic.timing.result.timing import Agreement

_IN_PLACE = "each device goes on from what the one before has left, in place"


class Agreeing:
    """Keeps what the first device gave at one value, and the worst agreement of each other one.

    Parameters
    ----------
    in_place : bool
        Nothing can be compared then: the inputs of the second are not those of the first.
    """

    def __init__(self, in_place: bool) -> None:
        self._in_place = in_place
        self._at: dict[str, Any] | None = None
        self._first: tuple[str, dict[str, Any], frozenset[str]] | None = None
        self._worst: dict[str, Agreement] = {}

    def add(
        self, where: str, values: Mapping[str, Any], numbers: dict[str, Any], drawn: frozenset[str]
    ) -> None:
        """Compare what a device gave.

        Parameters
        ----------
        where : str
        values : mapping
        numbers : dict
            By name.
        drawn : frozenset of str
            Kinds of devices whose generators it drew from.
        """
        if self._first is None or self._at != dict(values):
            self._at, self._first = dict(values), (where, numbers, drawn)
            return
        reference, expected, drew = self._first
        if self._in_place:
            found = Agreement(where, reference, None, reason=_IN_PLACE)
        else:
            found = agree(reference, expected, where, numbers, drew != drawn)
        if found.same is not True:
            found = replace(found, values=dict(values))
        known = self._worst.get(where)
        if known is None or _badness(found) > _badness(known):
            self._worst[where] = found

    def agreements(self) -> tuple[Agreement, ...]:
        """One for each device but the first."""
        return tuple(self._worst.values())

    def forget(self) -> None:
        """Let go of the numbers."""
        self._first = None


def _badness(found: Agreement) -> tuple[int, float]:
    order = {True: 0, None: 1, False: 2}[found.same]
    # NaN, an infinity against a number, is beyond every difference.
    largest = found.largest if found.largest is not None else -1.0
    return order, float("inf") if largest != largest else largest
