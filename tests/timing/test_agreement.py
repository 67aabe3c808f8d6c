"""Same numbers are the same on every device; other numbers are told, with their name."""

import math
from collections import namedtuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.testing._comparison import default_tolerances

from gpumagic.timing import agreement
from gpumagic.timing.agreement import SKIPPED, agree, outcome, tolerance

Pair = namedtuple("Pair", "left right")


def compared(one, other, drawn=False):
    return agree("cpu", outcome({}, [], one), "cuda:0", outcome({}, [], other), drawn)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), True),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, -math.inf]), False),
        (torch.tensor([1.0, math.inf]), torch.tensor([1.0, 3e38]), False),
        (torch.tensor([1e6, 0.0]), torch.tensor([1e6, 0.5]), True),
        (1e300, 2e300, False),
        (10**30, 10**30, True),
        (10**30, 10**30 + 1, False),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), False),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse(), True),
        (torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse(), False),
        (torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.5]), False),
        (torch.tensor([1]), torch.tensor([2]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16() * 1.008, True),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16() * 1.1, False),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j, False),
        (0.1 + 0.2, 0.3, True),
        (3, 4, False),
        (numpy.float32(1), numpy.float32(1), True),
        (numpy.arange(3), numpy.arange(3)[::-1], False),
        (nn.Linear(2, 2).requires_grad_(False).weight.fill_(1), torch.ones(2, 2), True),
        (torch.eye(2).to_sparse(), torch.eye(2), True),
        (numpy.array([1.0, math.nan]), numpy.array([1.0, math.nan]), True),
        (numpy.array([1.0, 0.0]), numpy.array([1.0, 0.5]), False),
        (numpy.ones(2, numpy.float32), torch.ones(2), True),
        (complex(math.nan, 1), complex(math.nan, 1), True),
        (math.inf, -math.inf, False),
    ],
)
def test_numbers(one, other, same):
    assert compared(one, other).same is same


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
)
def test_floats_may_differ_as_torch_testing_has_it(dtype):
    assert tolerance(dtype) == default_tolerances(getattr(torch, dtype))
    assert tolerance("int64") == tolerance("bool") == (0.0, 0.0)


def test_tf32_is_allowed_for_single_precision_only():
    assert tolerance("float32", loose=True)[0] == tolerance("complex64", loose=True)[0] == 2**-10
    assert tolerance("float64", loose=True) == tolerance("float64")


def test_the_worst_is_told_with_its_name():
    one = {"loss": 1.0, "net": [torch.zeros(2), Pair(torch.zeros(3), 1)]}
    other = {"loss": 1.0, "net": [torch.zeros(2), Pair(torch.tensor([0.0, 0.0, 0.4]), 1)]}
    found = compared(one, other)
    assert (found.same, found.name) == (False, "Out['net'][1].left")
    assert found.largest == pytest.approx(0.4)
    assert "differs by 0.4" in found.reason
    assert found.where == "cuda:0"
    assert found.reference == "cpu"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (torch.ones(2), torch.ones(3), "Out is float32[3], not float32[2]"),
        (torch.ones(2), torch.ones(2).half(), "Out is float16[2], not float32[2]"),
        ([1, 2], [1], "Out is int64[1], not int64[2]"),
        (None, 1, "Out exists on one device only"),
    ],
)
def test_other_differences_are_told(one, other, words):
    found = compared(one, other)
    assert found.same is False
    assert words in found.reason


def test_random_numbers_are_not_called_wrong():
    found = compared(torch.rand(3), torch.rand(3) + 1, drawn=True)
    assert found.same is None
    assert "random" in found.reason
    assert compared(torch.ones(3), torch.ones(3), drawn=True).same is True


def test_nothing_to_compare_is_said():
    assert compared(None, None).same is None
    assert compared("text", "other").reason == "the code produced no numbers"


def test_an_outcome_is_a_copy_of_numbers_only():
    net = nn.Linear(2, 1)
    loop = [1]
    loop.append(loop)
    x = torch.ones(2, requires_grad=True)
    globals_ = {"net": net, "loop": loop, "x": x, "text": "a", "other": 5}
    found = outcome(globals_, ["net", "loop", "x", "text", "absent"], x * 2)
    assert {*found} == {"net.weight", "net.bias", "loop[0]", "x", "Out"}
    with torch.no_grad():
        x.zero_()
    assert found["x"].tolist() == [1.0, 1.0]
    assert not found["x"].requires_grad
    assert found["Out"].grad_fn is None


def test_what_is_too_large_is_not_kept_and_said(monkeypatch):
    monkeypatch.setattr(agreement, "_KEPT", 100)
    found = outcome({}, [], [torch.ones(10), torch.ones(50), torch.ones(2)])
    assert found["Out[1]"] is SKIPPED
    told = agree("cpu", found, "cuda:0", found, False)
    assert told.same is True
    assert told.reason == "too large to compare: Out[1]"
    assert isinstance(found["Out[2]"], torch.Tensor)
    # A sparse one is compared as it is when filled, which may be more than there is memory.
    empty = torch.empty(1_000_000, 1_000_000, layout=torch.sparse_coo)
    assert outcome({}, [], empty)["Out"] is SKIPPED


def test_large_ones_are_compared_in_parts():
    one = torch.zeros(2**22 + 8)
    other = one.clone()
    other[-1] += 3
    assert compared(one, one.clone()).same is True
    found = compared(one, other)
    assert (found.same, found.largest) == (False, 3.0)


def test_what_refuses_to_be_looked_at_is_left_out():
    class Key:
        def __repr__(self):
            raise ValueError("no")

    class Odd(dict):
        def items(self):
            raise ValueError("no")

    found = outcome({"a": {Key(): 1}, "b": 2, "c": Odd(x=3)}, ["a", "b", "c"], None)
    assert found == {"b": 2, "a[<Key>]": 1, "c['x']": 3}


def test_a_comparison_never_raises():
    class Odd:
        def __eq__(self, other):
            raise ValueError

    found = agree("cpu", {"a": Odd()}, "cuda:0", {"a": Odd()}, False)
    assert found.same is None


@given(st.lists(st.floats(width=32), min_size=1), st.sampled_from([torch.float32, torch.float64]))
def test_every_tensor_agrees_with_itself(numbers, dtype):
    x = torch.tensor(numbers, dtype=dtype)
    assert compared(x, x.clone()).same is True


@given(st.lists(st.integers(-(2**62), 2**62), min_size=1), st.integers(0))
def test_an_integer_that_differs_is_found(numbers, place):
    x = torch.tensor(numbers)
    y = x.clone()
    y[place % len(numbers)] += 1
    assert compared(x, y).same is False
