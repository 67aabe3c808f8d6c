"""A sweep given as Python values, its points, and how a value is told."""

import math

import pytest

from gpumagic.errors import GpuError
from gpumagic.usercode.sweep import check, key, label, number, points


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"n": []}, "n has no values"),
        ({"n": "abc"}, "no list of values"),
        ({"n": 3}, "no list of values"),
        ({3: [1]}, "3 cannot be a variable's name"),
        ({"n": iter(int, 1)}, "n has more than 1,000 values"),
        ({"n": iter(range(10**9))}, "n has more than 1,000 values"),
        ({"n": [1, 2, 1]}, "n = 1 is given twice"),
    ],
)
def test_python_values_are_checked_too(given_, said):
    with pytest.raises(GpuError, match=said):
        check(given_)


def test_any_object_may_be_a_value():
    import numpy
    import torch

    kinds = (torch.float16, torch.bfloat16)
    assert check({"dtype": list(kinds)}) == {"dtype": kinds}
    assert [label(kind) for kind in kinds] == ["float16", "bfloat16"]
    assert label(numpy.int64(4)) == label(4) == "4"
    assert key({"n": numpy.float64(0.5)}) == key({"n": 0.5})
    assert len(label(list(range(1000)))) == 40
    paths = [f"/data/experiments/with/a/very/long/path/{n}.pt" for n in range(2)]
    assert check({"path": paths}) == {"path": tuple(paths)}
    assert len({key({"path": path}) for path in paths}) == 2


def test_points_are_every_pair_and_one_without_a_sweep():
    assert points({}) == [{}]
    assert points({"a": (1, 2)}) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("value", [True, "3", None, math.nan, math.inf, 10**400, [1]])
def test_what_is_no_number_has_no_place_on_an_axis(value):
    assert number(value) is None
