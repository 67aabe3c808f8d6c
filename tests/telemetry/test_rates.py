"""Counters to rates: by their own time, and never what cannot be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.nvml import Field
from gpumagic.telemetry.nvml_source import Rates

MOST = 1e9


def field(value: float, at_s: float | None = None, narrow: bool = False) -> Field:
    return Field(value, None if at_s is None else int(at_s * 1e6), narrow)


def test_by_the_counters_own_time() -> None:
    rates = Rates(clock=lambda: 0.0)
    assert rates.per_second("a", field(100, 5.0), MOST) is None
    assert rates.per_second("a", field(400, 6.5), MOST) == 200
    assert rates.per_second("b", field(0, 6.5), MOST) is None


def test_by_the_clock_where_a_counter_has_no_time() -> None:
    now = [10.0]
    rates = Rates(clock=lambda: now[0])
    rates.per_second("a", field(100), MOST)
    now[0] = 12.0
    assert rates.per_second("a", field(100), MOST) == 0
    now[0] = 12.5
    assert rates.per_second("a", field(110), MOST) == 20


def test_a_counter_that_was_not_read_anew_keeps_its_rate() -> None:
    rates = Rates()
    for value, at in ((0, 1.0), (50, 2.0)):
        rates.per_second("a", field(value, at), MOST)
    assert rates.per_second("a", field(50, 2.0), MOST) == 50


def test_a_wrap_a_reset_and_a_pause_are_not_known() -> None:
    rates = Rates()
    rates.per_second("a", field(2**40, 1.0), MOST)
    assert rates.per_second("a", field(5, 2.0), MOST) is None
    assert rates.per_second("a", field(10, 3.0), MOST) == 5
    assert rates.per_second("a", field(20, 300.0), MOST) is None
    assert rates.per_second("a", field(30, 299.0), MOST) is None
    assert rates.per_second("a", None, MOST) is None
    assert rates.per_second("a", field(40, 300.0), MOST) is None


def test_more_than_the_link_can_do_is_not_known() -> None:
    rates = Rates()
    rates.per_second("a", field(0, 1.0), MOST)
    assert rates.per_second("a", field(2**63, 2.0), MOST) is None


def test_few_bits_may_have_wrapped_unseen() -> None:
    rates = Rates()
    rates.per_second("fast", field(0, 1.0, narrow=True), 64e9)
    assert rates.per_second("fast", field(5, 2.0, narrow=True), 64e9) is None
    rates.per_second("slow", field(0, 1.0, narrow=True), 1e6)
    assert rates.per_second("slow", field(5, 2.0, narrow=True), 1e6) == 5


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.none() | st.integers(0, 2**40)), max_size=9)
)
def test_never_negative_and_never_too_much(readings: list[tuple[int, int | None]]) -> None:
    rates = Rates(clock=iter(range(99)).__next__)
    for value, at_us in readings:
        rate = rates.per_second("a", Field(value, at_us, False), MOST)
        assert rate is None or 0 <= rate <= MOST
