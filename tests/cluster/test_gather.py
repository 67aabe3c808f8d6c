"""What ranks give is put together in their order, or is one number."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from gpumagic.cluster.scattered import gather, reduce
from gpumagic.errors import GpuError


def test_tensors_come_together_on_the_cpu(gpus):
    parts = [torch.ones(2, device=f"cuda:{n}") for n in range(2)]
    assert gather(parts).device.type == gather(parts[1:]).device.type == "cpu"
    assert [item.device.index for item in gather([[part] for part in parts])] == [0, 1]


def test_a_gathered_tensor_keeps_no_graph_alive():
    x = torch.ones(2, requires_grad=True)
    assert not gather([x * 2, x * 3]).requires_grad


def test_ranges_are_gathered_to_a_list():
    assert gather([range(3), range(3)]) == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([0.1, 0.2], "float has no items to gather; type --reduce"),
        (["a", "b"], "str has no items"),
        ([[1], torch.ones(1)], "of different kinds: list and Tensor"),
        ([torch.ones(1, 2), torch.ones(1, 3)], "the parts do not fit together: "),
        ([np.ones((1, 2)), np.ones((1, 3))], "the parts do not fit together: "),
        ([{"x": [1]}, {"y": [1]}], "the parts have different keys"),
        ([{"x": 1.0}, {"x": 1.0}], "float has no items"),
    ],
)
def test_what_cannot_be_gathered_is_told_in_one_line(parts, says):
    with pytest.raises(GpuError) as caught:
        gather(parts)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("how", "want"), [("mean", 2.0), ("sum", 6), ("min", 1), ("max", 3), ("last", 2)]
)
def test_numbers_are_reduced(how, want):
    assert reduce([1, 3, 2], how) == want
    assert reduce([torch.tensor([k, 0]) for k in (1, 3, 2)], how).tolist() == [want, 0]
    assert reduce([np.array([k, 0]) for k in (1, 3, 2)], how).tolist() == [want, 0]
    assert reduce([Fraction(k, 7) for k in (1, 3, 2)], how) == Fraction(want) / 7
    assert reduce([np.float32(k) for k in (1, 3, 2)], how) == want
    mixed = reduce([torch.tensor(1.0), 3, torch.tensor(2.0)], how)
    assert float(mixed) == want


def test_truth_values_of_numpy_are_reduced():
    assert not reduce([np.True_, np.False_], "min")
    assert reduce([np.True_, np.False_], "mean") == 0.5


def test_tensors_of_several_devices_are_reduced_on_the_cpu(gpus):
    loss = reduce([torch.tensor(float(n), device=f"cuda:{n}") for n in range(2)], "mean")
    assert (float(loss), loss.device.type) == (0.5, "cpu")


@pytest.mark.parametrize(
    ("parts", "how", "says"),
    [
        (["a", "b"], "max", "str has no max; reduce numbers"),
        ([1j, 2j], "max", "the parts have no max: "),
        ([torch.ones(1), "a"], "sum", "the parts have no sum: "),
        (
            [torch.ones(1), torch.ones(2)],
            "mean",
            "the parts have no mean: stack expects",
        ),
        ([np.ones(1), np.ones(2)], "mean", "the parts have no mean: all input arrays must"),
        ([np.ones(1), "a"], "sum", "the parts have no sum: "),
    ],
)
def test_what_cannot_be_reduced_is_told_in_one_line(parts, how, says):
    with pytest.raises(GpuError) as caught:
        reduce(parts, how)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
