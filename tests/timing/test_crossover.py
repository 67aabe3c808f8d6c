"""Where curves cross: found where it is, and only where the order flips beyond the spreads."""

import pytest
from comparisons import comparison, cubes, timing
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.timing.comparison import flips

XS = [1.0, 10.0, 100.0, 1000.0]


def curve(*medians, spread=0.01):
    return [None if m is None else timing("x", m, spread) for m in medians]


def test_power_laws_cross_where_algebra_says():
    found = cubes()
    (crossing,) = found.crossovers
    # 1e-6 (n / 64)³ = 3e-5
    assert crossing.at == pytest.approx(64 * 30 ** (1 / 3), rel=1e-6)
    assert crossing.seconds == pytest.approx(3e-5, rel=1e-6)
    assert (crossing.faster, crossing.slower) == ("cuda:0", "cpu")
    assert found.crossover("cpu", 0) == found.crossover("cuda:0", "cpu") == crossing.at


@given(
    st.floats(-2, 3), st.floats(-2, 3), st.floats(0.05, 2.95), st.sampled_from([1.0, 1e-6, 30.0])
)
def test_two_straight_lines_in_log_log(slope, other, where, scale):
    if abs(slope - other) < 0.3:
        return
    at = 10**where
    a = curve(*(scale * (x / at) ** slope for x in XS), spread=1e-6)
    b = curve(*(scale * (x / at) ** other for x in XS), spread=1e-6)
    ((x, seconds, now),) = flips(XS, a, b)
    assert x == pytest.approx(at, rel=1e-3)
    assert seconds == pytest.approx(scale, rel=1e-2)
    assert now == (0 if slope < other else 1)
    assert flips(XS, b, a)[0][0] == pytest.approx(x)


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [
        (curve(1, 1, 1, 1), curve(2, 2, 2, 2), 0),
        (curve(1, 1, 4, 4), curve(2, 2, 2, 2), 1),
        (curve(1, 4, 1, 4), curve(2, 2, 2, 2), 3),
        # Within the spread nothing flips, however the medians lie.
        (curve(1, 1.01, 0.99, 1.01, spread=0.2), curve(1.005, 1, 1, 1, spread=0.2), 0),
        # In the middle it cannot be told; at the ends it can.
        (curve(1, 2.001, 1.999, 4), curve(2, 2, 2, 2), 1),
        (curve(1, None, None, 4), curve(2, 2, None, 2), 1),
        (curve(None, None, 1, 4), curve(2, 2, None, 2), 0),
        (curve(None, None, None, None), curve(2, 2, 2, 2), 0),
    ],
)
def test_an_order_flips_beyond_the_spreads_or_not(a, b, count):
    assert len(flips(XS, a, b)) == count


@given(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4), st.floats(1e-3, 0.5))
def test_a_crossing_lies_between_the_values_and_the_last_says_who_is_faster(medians, spread):
    a, b = curve(*medians, spread=spread), curve(1, 1, 1, 1, spread=spread)
    found = flips(XS, a, b)
    assert [x for x, _, _ in found] == sorted(x for x, _, _ in found)
    assert all(XS[0] <= x <= XS[-1] for x, _, _ in found)
    decided = [m for m, t in zip(medians, a, strict=True) if t.differs(b[0])]
    if found:
        assert found[-1][2] == (0 if decided[-1] < 1 else 1)


def test_values_below_zero_are_on_a_straight_axis():
    (found,) = flips([-1.0, 1.0], curve(1, 4), curve(2, 2))
    assert found[0] == pytest.approx(0.0, abs=1e-9)


def test_a_curve_that_ends_early_has_the_crossing_before():
    assert len(cubes(fails=512).crossovers) == 1
    assert cubes(fails=128).crossovers == ()


def test_words_have_no_crossing():
    timings = [
        timing(where, seconds, values={"how": how})
        for how, a, b in (("mean", 1, 2), ("sum", 2, 1))
        for where, seconds in (("cpu", a), ("cuda:0", b))
    ]
    assert comparison(*timings, sweep={"how": ("mean", "sum")}).crossovers == ()
