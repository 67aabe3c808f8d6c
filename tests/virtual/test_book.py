"""The textbook's chapter on GPUs, as a reader types it."""

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.usefixtures("gpus")


def try_gpu(i=0):
    return torch.device(f"cuda:{i}") if torch.cuda.device_count() > i else torch.device("cpu")


def test_the_devices_are_there():
    assert torch.cuda.is_available()
    assert [try_gpu(), try_gpu(1), try_gpu(10)] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
        torch.device("cpu"),
    ]


def test_tensors_say_where_they_are():
    x = torch.ones(2, 3, device=try_gpu())
    assert repr(x) == "tensor([[1., 1., 1.],\n        [1., 1., 1.]], device='cuda:0')"
    assert type(x) is torch.Tensor
    assert x.is_cuda
    assert torch.tensor([1, 2, 3]).device == torch.device("cpu")


def test_adding_across_devices_fails_until_one_is_copied():
    x = torch.ones(2, 3, device=try_gpu())
    y = torch.rand(2, 3, device=try_gpu(1))
    with pytest.raises(RuntimeError, match=r"at least two devices, cuda:0 and cuda:1!$"):
        x + y
    z = x.cuda(1)
    assert z.device == torch.device("cuda:1")
    assert torch.equal((y + z).cpu(), y.cpu() + 1)
    assert z.cuda(1) is z


def test_a_network_is_placed():
    net = nn.Sequential(nn.LazyLinear(1)).to(device=try_gpu())
    x = torch.ones(2, 3, device=try_gpu())
    assert net(x).device == torch.device("cuda:0")
    assert net[0].weight.data.device == torch.device("cuda:0")
