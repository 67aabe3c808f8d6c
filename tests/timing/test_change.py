"""Against an earlier comparison: a verdict only beyond both spreads, and what else is different."""

import pickle

import pytest
from comparisons import comparison, cubes, timing, two
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.timing.timing import Timing


def verdicts(now, earlier):
    return [c.verdict for c in now.against(earlier).change]


@pytest.mark.parametrize(
    ("now", "then", "verdict", "words"),
    [
        (timing("cpu", 1.0), timing("cpu", 1.32), "faster", "1.32 × faster"),
        (timing("cpu", 1.32), timing("cpu", 1.0), "slower", "1.32 × slower"),
        (timing("cpu", 1.0), timing("cpu", 1.0), "same", "same"),
        (timing("cpu", 1.0, 0.4), timing("cpu", 1.1, 0.4), "same", "same"),
        (timing("cpu", 1.0), timing("cuda:0", 1.0), "new", "new"),
        (timing("cpu", 1.0), Timing("cpu", error="out of memory"), "new", "new"),
        (Timing("cpu", error="out of memory"), timing("cpu", 1.0), "failed", "no time"),
        (
            Timing("cpu", (1.0,)),
            timing("cpu", 2.0),
            "unsure",
            "2.00 × as fast?",
        ),
    ],
)
def test_the_verdict(now, then, verdict, words):
    (found,) = comparison(now).against(comparison(then)).change
    assert found.verdict == verdict
    assert str(found) == words


@given(st.floats(1e-6, 10), st.floats(1.1, 50), st.floats(0.001, 0.05))
def test_the_ratio_is_the_other_way_round_backwards(median, by, spread):
    slow, fast = timing("cpu", median * by, spread), timing("cpu", median, spread)
    (faster,) = comparison(fast).against(comparison(slow)).change
    (slower,) = comparison(slow).against(comparison(fast)).change
    assert (faster.verdict, slower.verdict) == ("faster", "slower")
    assert faster.ratio == pytest.approx(by) == pytest.approx(1 / slower.ratio)


def test_a_sweep_is_compared_value_by_value():
    now, earlier = cubes(), cubes((64, 128))
    assert verdicts(now, earlier) == ["same"] * 4 + ["new"] * 6


def test_the_same_run_shows_no_difference():
    found = two().against(two())
    assert found.differences == ()
    assert {c.verdict for c in found.change} == {"same"}


def test_what_else_is_different_is_told():
    earlier = two(code="A @ A", setup="A = 1")
    assert two().against(earlier).differences == ("another code", "another setup")


def test_the_last_one_is_compared_only_where_code_and_devices_are_the_same():
    now = two()
    assert now.against(two(notes=("x",)), alike=True).change
    other = now.against(two(code="A @ A"), alike=True)
    assert other.change == ()
    assert "not compared with the last one: another code" in repr(other)
    fewer = now.against(comparison(timing("cpu", 1.0)), alike=True)
    assert "not compared with the last one: cpu then, cpu, cuda:0 now" in repr(fewer)


def test_a_comparison_is_kept_with_pickle():
    found = two().against(two(notes=("x",)))
    assert pickle.loads(pickle.dumps(found)) == found
