"""One timing: its statistics are Measurement's, and two differ only beyond their spreads."""

import pytest
from comparisons import around, timing
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.benchmark import Measurement, TaskSpec

from gpumagic.timing.comparison import Timing

TIMES = st.lists(st.floats(1e-6, 10), min_size=4, max_size=60).map(tuple)


@given(TIMES, st.integers(1, 50))
def test_statistics_are_those_of_torchs_measurement(seconds, number):
    made = Timing("cpu", seconds, number=number)
    times = [each * number for each in seconds]
    theirs = Measurement(number_per_run=number, raw_times=times, task_spec=TaskSpec("x", "pass"))
    assert made.median == pytest.approx(theirs.median, rel=1e-12)
    assert made.iqr == pytest.approx(theirs.iqr / theirs.median, rel=1e-6, abs=1e-12)
    assert made.noisy is theirs.has_warnings


def test_where_nothing_was_measured_nothing_is_known():
    failed = Timing("cuda:0", error="out of memory")
    assert failed.median is failed.iqr is failed.spread is failed.quartiles is None
    assert failed.host_median is failed.scaling is None
    assert not failed.noisy


def test_a_clock_that_does_not_move_is_no_crash():
    still = Timing("cpu", (0.0,) * 9)
    assert still.median == 0
    assert still.iqr is None
    assert not still.noisy
    assert not still.differs(still)


def test_scaling_is_against_one_after_the_other():
    assert Timing("cuda:0+cuda:1", (1.0,) * 9, alone=(1.9,) * 9).scaling == pytest.approx(1.9)
    assert Timing("cuda:0+cuda:1", (1.0,) * 9).scaling is None


@pytest.mark.parametrize(
    ("a", "b", "differ"),
    [
        (timing("a", 1.0), timing("b", 1.1), True),
        (timing("a", 1.0, 0.5), timing("b", 1.1, 0.5), False),  # the intervals meet
        # Of thousands the intervals are narrow, and the quartiles still say that it is nothing.
        (timing("a", 1.0, 0.1, 4001), timing("b", 1.02, 0.1, 4001), False),
        (Timing("a", (1.0,)), Timing("b", (2.0,)), True),
        (Timing("a"), Timing("b", (2.0,)), False),
    ],
)
def test_two_differ_beyond_both_spreads(a, b, differ):
    assert a.differs(b) is b.differs(a) is differ


@given(TIMES)
def test_none_differs_from_itself(seconds):
    assert not Timing("a", seconds).differs(Timing("b", seconds[::-1]))


@given(st.floats(1e-6, 10), st.floats(1.2, 100))
def test_a_fifth_apart_is_told_from_narrow_spreads_at_any_scale(median, ratio):
    slow, fast = Timing("a", around(median * ratio)), Timing("b", around(median))
    assert slow.differs(fast)
