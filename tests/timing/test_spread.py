"""The median's interval and the quartiles, against their definitions."""

import math
import random
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpumagic.timing.comparison import Timing, interval

TIMES = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=200)


@pytest.mark.parametrize(
    ("count", "rank"), [(1, 1), (5, 1), (6, 1), (9, 2), (20, 6), (50, 18), (70, 27), (100, 40)]
)
def test_the_ranks_are_those_of_the_published_table_or_one_below(count, rank):
    """Le Boudec 2010, appendix A, for 95 %: never a narrower interval."""
    low, high = interval(range(1, count + 1))
    assert low in (rank, max(rank - 1, 1))
    assert high == count + 1 - low


@given(st.integers(6, 400))
def test_the_interval_covers_the_median_as_often_as_it_says(count):
    low, high = interval(range(1, count + 1))
    assert low + high == count + 1
    outside = 2 * sum(math.comb(count, k) for k in range(low)) / 2**count
    assert outside <= 0.054
    narrower = 2 * sum(math.comb(count, k) for k in range(low + 2)) / 2**count
    assert narrower > 0.05


@given(TIMES, st.randoms(use_true_random=False))
def test_the_order_of_the_repeats_does_not_matter(times, chance):
    mixed = list(times)
    chance.shuffle(mixed)
    assert interval(mixed) == interval(times)
    low, high = interval(times)
    assert low <= statistics.median(times) <= high


@given(TIMES)
def test_the_quartiles_are_torchs(times):
    theirs = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75]).double())
    assert Timing("cpu", tuple(times)).quartiles == pytest.approx(tuple(theirs.tolist()), rel=1e-9)


def test_the_interval_holds_for_a_skewed_distribution():
    chance = random.Random(5)
    true = math.log(2)
    inside = 0
    for _ in range(400):
        low, high = interval([chance.expovariate(1) for _ in range(25)])
        inside += low <= true <= high
    assert inside >= 0.92 * 400
