"""What may be typed after --sweep, and what is said when it may not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.errors import GpuError
from gpumagic.usercode.sweep import MOST_POINTS, parse

INTS = st.integers(-(2**40), 2**40)


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("n=64,256,1024", (64, 256, 1024)),
        (" n = 64 , 256 ", (64, 256)),
        ("n=1_000", (1000,)),
        ("n=100..1000:300", (100, 400, 700, 1000)),
        ("n=1..4", (1, 2, 3, 4)),
        ("n=10..1:-3", (10, 7, 4, 1)),
        ("n=0.1..0.5:0.1", (0.1, 0.2, 0.3, 0.4, 0.5)),
        ("n=pow2:1..16", (1, 2, 4, 8, 16)),
        ("n=pow2:3..20", (4, 8, 16)),
        ("n=pow10:0.01..1", (0.01, 0.1, 1)),
        ("n=1e-3,.5,-2.", (1e-3, 0.5, -2.0)),
        ("n=1..3,8,pow2:16..32", (1, 2, 3, 8, 16, 32)),
        ("n=mean,sum,'a-b'", ("mean", "sum", "a-b")),
        ("n=True,False,None", (True, False, None)),
    ],
)
def test_what_may_be_typed(typed, values):
    found = parse(typed)
    assert found == {"n": values}
    assert [type(v) for v in found["n"]] == [type(v) for v in values]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("n", "a value is missing"),
        ("=3", "cannot be a variable's name"),
        ("for=1", "'for' cannot be a variable's name"),
        ("n=", "a value is missing"),
        ("n=1,,2", "a value is missing"),
        ("n=1,1", "n = 1 is given twice"),
        ("n=1..9:0", "steps of 0 do not reach 9 from 1"),
        ("n=9..1", "steps of 1 do not reach 1 from 9; type --sweep n=1..9"),
        ("n=pow2:0..8", "no power of 2 in that range"),
        ("n=pow2:5..7", "no power of 2 in that range"),
        ("n=pow1:1..8", "no power of 1 in that range"),
        ("n=pow2:1..8:2", "powers have no step"),
        ("n=1..9:1e-300", "has more than 1,000 values"),
        ("n=1..1001", "has more than 1,000 values"),
        ("n=1e999", "too large"),
        ("n=1__0", "not a number"),
        ("n=2*3", "2*3 is not a value"),
    ],
)
def test_what_may_not_is_said_in_a_line_with_what_to_type(typed, said):
    with pytest.raises(GpuError) as caught:
        parse(typed)
    line = str(caught.value)
    assert said in line
    assert "\n" not in line
    assert ";" in line


@given(st.lists(INTS, min_size=1, max_size=30, unique=True))
def test_numbers_come_back_as_they_were_typed(values):
    assert parse("n=" + ",".join(map(str, values))) == {"n": tuple(values)}


@given(INTS, st.integers(0, 999), st.integers(1, 10**6))
def test_a_range_has_both_ends_and_equal_steps(first, more, step):
    (found,) = parse(f"n={first}..{first + more * step}:{step}").values()
    assert found == tuple(range(first, first + more * step + 1, step))


@given(st.integers(2, 40), st.integers(1, 10**9), st.integers(1, 10**9))
def test_powers_are_all_those_between(base, low, high):
    low, high = sorted((low, high))
    expected = tuple(base**k for k in range(64) if low <= base**k <= high)
    if expected:
        assert parse(f"n=pow{base}:{low}..{high}") == {"n": expected}
    else:
        with pytest.raises(GpuError, match="no power of"):
            parse(f"n=pow{base}:{low}..{high}")


@given(st.text(max_size=30))
def test_any_text_gives_values_or_one_line(typed):
    try:
        found = parse(typed)
    except GpuError as error:
        assert "\n" not in str(error)  # noqa: PT017
    else:
        (values,) = found.values()
        assert 0 < len(values) <= MOST_POINTS


@given(
    st.from_regex(r"n=(pow[0-9]{1,3}:)?[-+0-9.e_]{1,12}(\.\.[-+0-9.e_:]{1,14})?", fullmatch=True)
)
def test_anything_like_a_range_gives_values_or_one_line(typed):
    try:
        (values,) = parse(typed).values()
    except GpuError:
        return
    assert 0 < len(values) <= MOST_POINTS
