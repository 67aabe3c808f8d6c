"""Checks on torch's own CUDA code: before a kernel's assert, and in autograd's thread of a GPU."""

import pytest
import torch
from torch.nn import functional as F

import gpumagic
from gpumagic import faults

if not torch.cuda.is_available() or torch.version.cuda is None:
    pytest.skip("needs torch's CUDA build and `make test-cuda`", allow_module_level=True)


def test_bad_values_are_named_before_the_launch():
    x = torch.rand(3, 4, device="cuda")
    index, labels = torch.tensor([0, 5], device="cuda"), torch.tensor([0, 1, 4], device="cuda")
    with gpumagic.check():
        with pytest.raises(
            IndexError, match=r"index\[1\] = 5, but x has 3 elements in dimension 0"
        ):
            x[index]
        with pytest.raises(IndexError, match=r"labels\[2\] = 4, but x has 4 classes"):
            F.cross_entropy(x, labels)
        with pytest.raises(IndexError, match=r"index\[1\] = 5, but x has 3 rows"):
            F.embedding(index, x)
        torch.cuda.synchronize()
    assert (x + 1).shape == (3, 4)
    assert faults.all_kept() == []


def test_nan_of_a_backward_pass_has_its_forward_line():
    weights = torch.zeros(3, device="cuda", requires_grad=True)
    with gpumagic.check(nan=True):
        loss = weights.sqrt().sum()
        with pytest.raises(
            FloatingPointError, match=r"weights\.sqrt\(\) .*backward pass makes inf"
        ):
            loss.backward()
    assert faults.all_kept() == []
