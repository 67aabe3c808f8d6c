"""The search asks few questions and is exact, or as near as was asked, whatever grows how."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.device.caching_allocator import CachingAllocator
from gpumagic.fitting.fit_search import largest

LINES = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10)), min_size=1, max_size=3)
VALUES = st.one_of(
    st.integers(1, 5000).map(lambda n: range(1, n + 1)),
    st.sets(st.integers(0, 20), min_size=1).map(lambda powers: sorted(2**p for p in powers)),
)


class Asked:
    """A need, and the values that it was asked about."""

    def __init__(self, need):
        self.need, self.found = need, {}

    def __call__(self, value):
        return self.found.setdefault(value, self.need(value))


@given(VALUES, LINES, st.floats(0, 50_000), st.integers(1, 10_000), st.booleans())
def test_it_is_the_largest_within_the_limit(values, lines, limit, ends, from_below):
    def need(value):
        return math.inf if value > ends else max(a + b * value for a, b in lines) // 5 * 5

    fitting = [value for value in values if need(value) <= limit]
    found = largest(values, need, limit, from_below=from_below)
    assert found == (fitting[-1] if fitting else None)


def allocated(sizes):
    """What CUDA's allocator takes for tensors of so many bytes, of which every third is freed."""

    def need(value):
        allocator = CachingAllocator()
        for place, (fixed, each) in enumerate(sizes):
            block = (*allocator.allocate(fixed + each * value), fixed + each * value)
            if place % 3 == 2:
                allocator.free(*block)
        return allocator.bytes.peak

    return need


SIZES = st.lists(st.tuples(st.integers(0, 2**22), st.integers(0, 2**16)), min_size=1, max_size=9)
MOST = 20
"""Two ends, four estimates in vain, and halving from a ratio of 10**6 to one of 1.01: eleven times,
and some more as whole numbers have no half."""
FIXED, EACH = st.integers(0, 10**8), st.integers(1, 10**6)
NEEDS = {
    "linear": (st.builds(lambda a, b: lambda n: a + b * n, FIXED, EACH), 6),
    "quadratic": (
        st.builds(lambda a, b, c: lambda n: a + b * n + c * n * n, FIXED, EACH, EACH),
        MOST,
    ),
    "stepwise": (
        st.builds(
            lambda a, b, c: lambda n: a + -(-b * n // c) * c,
            FIXED,
            EACH,
            FIXED.map(lambda x: x + 1),
        ),
        MOST,
    ),
    "of the allocator": (SIZES.map(allocated), MOST),
    "noisy": (
        st.builds(
            lambda b, noise: (
                lambda n: max(
                    b * m * (1 + noise * math.sin(m)) for m in range(max(n - 3, 1), n + 1)
                )
            ),
            EACH,
            st.floats(0, 0.05),
        ),
        MOST,
    ),
}


@pytest.mark.parametrize("kind", NEEDS)
@given(data=st.data(), fits=st.integers(1, 900_000), near=st.sampled_from([0.01, 0.025, 0.1]))
def test_what_it_finds_was_asked_about_and_is_near_the_largest(kind, data, fits, near):
    needs, most = NEEDS[kind]
    asked = Asked(data.draw(needs))
    limit = asked.need(fits)
    found = largest(range(1, 10**6), asked, limit, near=near)
    assert asked.found[found] <= limit
    above = [value for value, need in asked.found.items() if need > limit]
    assert not above or min(above) <= max(found + 1, found * (1 + near))
    assert len(asked.found) <= most


def test_what_is_affine_takes_four_questions():
    asked = Asked(lambda value: 100 + 7 * value)
    assert largest(range(1, 4097), asked, 10_000) == 1414
    assert len(asked.found) == 4


def test_from_below_none_is_more_than_twice_what_fits():
    asked = Asked(lambda value: value)
    assert largest(range(1, 4097), asked, 300, from_below=True) == 300
    assert max(asked.found) <= 600
