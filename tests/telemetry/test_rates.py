"""Counters to rates: by the clock, and never what cannot be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.telemetry.source import Rates

MOST = 1e9


class At:
    """Rates with a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rates = Rates(clock=lambda: self.now)

    def read(self, value: float | None, now: float) -> float | None:
        self.now = now
        return self.rates.per_second("a", value, MOST)


def test_the_increase_over_the_time() -> None:
    at = At()
    assert at.read(100, 10.0) is None
    assert at.read(400, 11.5) == 200
    assert at.read(400, 12.0) == 0
    assert at.rates.per_second("b", 0, MOST) is None


def test_a_reset_and_a_pause_are_not_known() -> None:
    at = At()
    at.read(2**40, 1.0)
    assert at.read(5, 2.0) is None
    assert at.read(10, 3.0) == 5
    assert at.read(20, 300.0) is None
    assert at.read(None, 301.0) is None
    assert at.read(40, 302.0) is None


def test_more_than_is_possible_is_not_known() -> None:
    at = At()
    at.read(0, 1.0)
    assert at.read(2**63, 2.0) is None


@given(st.lists(st.integers(0, 2**64 - 1), max_size=9))
def test_never_negative_and_never_too_much(values: list[int]) -> None:
    rates = Rates(clock=iter(range(99)).__next__)
    for value in values:
        rate = rates.per_second("a", value, MOST)
        assert rate is None or 0 <= rate <= MOST
