"""Mistakes between devices raise what CUDA raises, to the letter."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import random_split

pytestmark = pytest.mark.usefixtures("gpus")
SAME = "Expected all tensors to be on the same device, but "


def on(device, *shape):
    return torch.ones(*shape, device=device)


def argument(name, its, others, method):
    return (
        f"{SAME}got {name} is on {its}, different from other tensors on {others} "
        f"(when checking argument in method {method})"
    )


CASES = {
    "add": (
        lambda: on("cuda:0", 2) + on("cuda:1", 2),
        f"{SAME}found at least two devices, cuda:0 and cuda:1!",
    ),
    "add in place, CPU tensor": (
        lambda: on("cuda:0", 2).add_(on("cpu", 2)),
        f"{SAME}found at least two devices, cuda:0 and cpu!",
    ),
    "mm": (
        lambda: on("cuda:0", 2, 3) @ on("cuda:1", 3, 2),
        argument("mat2", "cuda:1", "cuda:0", "wrapper_CUDA_mm"),
    ),
    "cat": (
        lambda: torch.cat([on("cuda:0", 2), on("cuda:1", 2)]),
        argument("tensors", "cuda:1", "cuda:0", "wrapper_CUDA_cat"),
    ),
    "linear, CPU input": (
        lambda: nn.Linear(3, 2).cuda()(torch.ones(2, 3)),
        argument("mat1", "cpu", "cuda:0", "wrapper_CUDA_addmm"),
    ),
    "embedding, CPU index": (
        lambda: nn.Embedding(4, 2).cuda()(torch.tensor([1])),
        argument("index", "cpu", "cuda:0", "wrapper_CUDA__index_select"),
    ),
    "large convolution of the CPU": (
        lambda: nn.Conv2d(1, 1, 5).cuda()(torch.ones(1, 1, 5, 5)),
        "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the "
        "same or input should be a MKLDNN tensor and weight is a dense tensor",
    ),
    "convolution that MKLDNN has not": (
        lambda: nn.Conv2d(1, 1, 3).double().cuda()(torch.ones(1, 1, 5, 5, dtype=torch.double)),
        argument("weight", "cuda:0", "cpu", "wrapper_CUDA___slow_conv2d_forward"),
    ),
    "convolution, CPU weight": (
        lambda: nn.Conv2d(1, 1, 3)(on("cuda:0", 1, 1, 5, 5)),
        "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the "
        "same",
    ),
    "convolution, CPU bias": (
        lambda: F.conv1d(on("cuda:0", 1, 1, 5), on("cuda:0", 1, 1, 3), on("cpu", 1)),
        "Input type (torch.cuda.FloatTensor) and bias type (torch.FloatTensor) should be the same",
    ),
    "transposed convolution of two GPUs": (
        lambda: nn.ConvTranspose2d(1, 1, 3).cuda(1)(on("cuda:0", 1, 1, 5, 5)),
        argument("weight", "cuda:1", "cuda:0", "wrapper_CUDA_slow_conv_transpose2d"),
    ),
    "batch norm, left on the CPU": (
        lambda: nn.BatchNorm2d(1)(on("cuda:0", 1, 1, 5, 5)),
        argument("weight", "cpu", "cuda:0", "wrapper_CUDA__cudnn_batch_norm"),
    ),
    "batch norm, CPU input": (
        lambda: nn.BatchNorm2d(1).cuda()(on("cpu", 1, 1, 5, 5)),
        argument("weight", "cuda:0", "cpu", "wrapper_CUDA__native_batch_norm"),
    ),
    "RMS norm, CPU input": (
        lambda: nn.RMSNorm(2).cuda()(torch.ones(3, 2)),
        argument("weight", "cuda:0", "cpu", "wrapper_CUDA___fused_rms_norm"),
    ),
    "GRU cell, CPU state": (
        lambda: nn.GRUCell(2, 2).cuda()(on("cuda:0", 1, 2), torch.ones(1, 2)),
        argument("mat2", "cuda:0", "cpu", "wrapper_CUDA_mm"),
    ),
    "LSTM cell, CPU memory": (
        lambda: nn.LSTMCell(2, 2).cuda()(on("cuda:0", 1, 2), (on("cuda:0", 1, 2), on("cpu", 1, 2))),
        argument("cx", "cpu", "cuda:0", "wrapper_CUDA___thnn_fused_lstm_cell"),
    ),
    "out=": (
        lambda: torch.mm(on("cuda:0", 2, 2), on("cuda:0", 2, 2), out=torch.empty(2, 2)),
        argument("self", "cuda:0", "cpu", "wrapper_CUDA_mm_out_out"),
    ),
    "within an operator": (
        lambda: torch.complex(on("cpu", 2), on("cuda:0", 2)),
        argument("imag", "cuda:0", "cpu", "wrapper_CUDA_out_complex_out"),
    ),
    "into a number of the CPU": (
        lambda: torch.tensor(1.0).mul_(torch.tensor(2.0, device="cuda")),
        f"{SAME}found at least two devices, cuda:0 and cpu!",
    ),
    "rows assigned to another device": (
        lambda: on("cpu", 3).index_put_((torch.tensor([0, 1]),), on("cuda:1", 2)),
        f"{SAME}found at least two devices, cuda:1 and cpu!",
    ),
    "index on another GPU": (
        lambda: on("cuda:0", 2)[torch.tensor([0], device="cuda:1")],
        "indices should be either on cpu or on the same device as the indexed tensor (cuda:0)",
    ),
    "masked_fill": (
        lambda: on("cuda:0", 2).masked_fill(torch.tensor([True, False]), 0),
        "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0",
    ),
    "attention": (
        lambda: F.scaled_dot_product_attention(
            *(on(d, 1, 2, 3, 4) for d in ("cuda:0", "cuda:1", "cuda:0"))
        ),
        "Expected query, key, and value to have the same device type, but got query.device: "
        "cuda:0 key.device: cuda:1 and value.device: cuda:0 instead.",
    ),
    "LSTM, CPU input": (
        lambda: nn.LSTM(2, 2).cuda()(torch.ones(1, 1, 2)),
        "Input and parameter tensors are not at the same device, found input tensor at cpu and "
        "parameter tensor at cuda:0",
    ),
    "generator": (
        lambda: torch.randn(2, device="cuda", generator=torch.Generator()),
        "Expected a 'cuda' device type for generator but found 'cpu'",
    ),
    "generator of a GPU": (
        lambda: torch.randperm(4, generator=torch.Generator("cuda")),
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "split by one": (
        lambda: random_split(range(4), [2, 2], generator=torch.Generator("cuda")),
        "Expected a 'cpu' device type for generator but found 'cuda'",
    ),
    "pinned": (
        lambda: torch.ones(2, device="cuda", pin_memory=True),
        "Only dense CPU tensors can be",
    ),
    "pinned, empty": (
        lambda: torch.empty(2, device="cuda", pin_memory=True),
        "Only dense CPU tensors can be pinned",
    ),
    "no such device": (lambda: torch.zeros(1, device="cuda:5"), "invalid device ordinal"),
}


@pytest.mark.parametrize("case", CASES)
def test_text(case):
    operation, text = CASES[case]
    with pytest.raises(RuntimeError, match=re.escape(text)):
        operation()


def test_numpy_says_how_to_copy():
    with pytest.raises(TypeError, match=r"^can't convert cuda:0 device type tensor to numpy"):
        torch.ones(2, device="cuda:0").numpy()


def test_lstm_names_its_state():
    net = nn.LSTM(2, 2).cuda(1)
    x, state = on("cuda:1", 1, 1, 2), on("cuda:0", 1, 1, 2)
    text = "found input tensor at cuda:1 and hidden tensor at cuda:0"
    with pytest.raises(RuntimeError, match=text):
        net(x, (state, state))


def test_what_cuda_allows_is_allowed():
    x = torch.ones(2, 3, device="cuda:0")
    assert (x + torch.tensor(2.0)).sum().item() == 18  # a CPU scalar
    assert x[torch.tensor([0])].device == x.device  # a CPU index
    assert torch.where(x > 0, x, torch.tensor(1.0)).device == x.device
    assert torch.zeros(2).fill_(x[0, 0]).tolist() == [1, 1]
    assert x.fill_(torch.tensor(3.0, device="cuda:1")).sum().item() == 18
    three = torch.tensor(3.0, device="cuda:1")
    assert x.masked_fill(x > 9, three).masked_fill(x < 9, three).sum().item() == 18
    assert x.index_fill(0, torch.tensor([0], device="cuda:0"), three).sum().item() == 18


def test_an_index_may_be_anywhere_where_something_is_assigned():
    for home in ("cpu", "cuda:1"):
        x = torch.zeros(2, 3, device=home)
        x[:, torch.tensor([0, 2], device="cuda:0")] = 1
        x[torch.tensor([False, True], device="cuda:0")] = on(home, 3)
        x.index_put_((torch.tensor(0, device="cuda:0"),), torch.tensor(5.0, device="cuda:0"))
        y = x.index_put((torch.tensor([1]), torch.tensor([1], device="cuda:0")), on(home, 1))
        assert x.device == y.device == torch.device(home)
        assert (x.tolist(), y.tolist()) == ([[5] * 3, [1, 1, 1]], [[5] * 3, [1, 1, 1]])


def test_foreach_goes_tensor_by_tensor_over_devices():
    xs = [torch.ones(2, device=f"cuda:{i}") for i in range(2)]
    added = torch._foreach_add(xs, 1.0)
    assert [x.device.index for x in added] == [0, 1]
    assert [x.tolist() for x in added] == [[2, 2], [2, 2]]


@pytest.mark.parametrize(
    "draw",
    [
        lambda **given: torch.randperm(9, **given),
        lambda **given: torch.rand(3, dtype=torch.float64, **given),
        lambda **given: torch.randn(3, 2, **given),
        lambda **given: torch.randint(3, 9, (4,), **given),
        lambda **given: torch.randint(9, (4,), dtype=torch.int32, **given),
    ],
)
def test_the_hosts_own_generator_draws_as_ever(draw):
    torch.manual_seed(3)
    expected = draw()
    drawn = draw(generator=torch.Generator().manual_seed(3))
    assert drawn.dtype == expected.dtype
    assert torch.equal(drawn, expected)
    with torch.device("cuda"):
        assert draw(generator=torch.Generator("cuda").manual_seed(3)).is_cuda
