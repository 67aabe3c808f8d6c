"""What one run works through: a number, or an expression with a sweep's variables."""

import math

import pytest
import torch

from gpumagic.errors import GpuError
from gpumagic.usercode.sweep import items_per_run

POINTS = [{"n": 2, "b": 1}, {"n": 3, "b": 1}, {"n": 3, "b": 5}]


@pytest.mark.parametrize(
    ("items", "found"),
    [
        (None, [None] * 3),
        (8, [8] * 3),
        ("n * b", [2, 3, 15]),
        (" len(x) ", [4] * 3),
        ("x.sum()", [4] * 3),
        ("sum(i for i in range(k) if i < n)", [1, 3, 3]),
    ],
)
def test_it_is_known_at_each_point(items, found):
    names = {"x": torch.ones(4), "k": 10}
    assert items_per_run(items, names, POINTS) == found
    assert set(names) == {"x", "k"}


@pytest.mark.parametrize(
    ("items", "says"),
    [
        (0, "items 0, n = 2, b = 1: 0 is not a number above 0"),
        (math.nan, "nan is not a number"),
        ("n - 2", "items n - 2, n = 2, b = 1: 0 is not a number above 0"),
        ("'7'", "7 is not a number above 0"),
        ("x", "ValueError: only one element tensors"),
        ("1 +", "is not an expression"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("missing", "NameError: name 'missing' is not defined"),
    ],
)
def test_what_is_no_number_is_refused_in_a_line(items, says):
    with pytest.raises(GpuError) as caught:
        items_per_run(items, {"x": torch.ones(2)}, POINTS)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "such as len(sentences)" in str(caught.value)
