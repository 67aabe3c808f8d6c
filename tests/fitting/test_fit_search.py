"""The search asks few questions and is exact, whatever grows how."""

import math

from hypothesis import given
from hypothesis import strategies as st

from gpumagic.fitting.fit_search import largest

LINES = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=3)
VALUES = st.one_of(
    st.integers(1, 5000).map(lambda n: range(1, n + 1)),
    st.sets(st.integers(0, 20), min_size=1).map(lambda powers: sorted(2**p for p in powers)),
)


@given(VALUES, LINES, st.floats(0, 50_000), st.integers(1, 10_000), st.booleans())
def test_it_is_the_largest_within_the_limit(values, lines, limit, ends, from_below):
    def need(value):
        return math.inf if value > ends else max(a + b * value for a, b in lines) // 5 * 5

    fitting = [value for value in values if need(value) <= limit]
    found = largest(values, need, limit, from_below=from_below)
    assert found == (fitting[-1] if fitting else None)


def test_what_is_affine_takes_four_questions():
    asked = []

    def need(value):
        asked.append(value)
        return 100 + 7 * value

    assert largest(range(1, 4097), need, 10_000) == 1414
    assert len(set(asked)) == 4


def test_from_below_none_is_more_than_twice_what_fits():
    asked = []

    def need(value):
        asked.append(value)
        return value

    assert largest(range(1, 4097), need, 300, from_below=True) == 300
    assert max(asked) <= 600
