"""`%gpus --virtual 2 --asserts`: after a bad index virtual GPUs are dead, as real ones are."""

import pytest
import torch
from torch.nn import functional as F

from gpumagic import virtual
from gpumagic.device import cuda_state

ASSERT = r"^CUDA error: device-side assert triggered\n"


@pytest.fixture
def deadly(gpus):
    virtual.enable(2, asserts=True)
    torch.cuda.set_device(0)


def on(*values):
    return torch.tensor(values, device="cuda:0")


BAD = {
    "index": lambda x: x[on(0, 5)],
    "assignment": lambda x: x.clone().index_put_((on(7),), x[0]),
    "embedding": lambda x: F.embedding(on(1, 9), x),
    "labels": lambda x: F.cross_entropy(x, on(0, 1, 4)),
    "gather": lambda x: x.gather(1, on(0, 4)[None]),
    "scatter": lambda x: x.scatter(1, on(0, -1)[None], 1.0),
    "index_select": lambda x: x.index_select(0, on(3)),
    "take": lambda x: x.take(on(12)),
    "index_add": lambda x: x.index_add(0, on(3), x[:1]),
    "one_hot": lambda x: F.one_hot(on(0, 5), 3),
    "probability": lambda x: F.binary_cross_entropy(x - 5, x),
    "multinomial": lambda x: torch.multinomial(x - 5, 1),
    "no probability": lambda x: torch.multinomial(x * 0, 1),
    "bernoulli": lambda x: torch.bernoulli(x + 2),
    "repeats": lambda x: torch.repeat_interleave(x, on(1, -1, 1), 0),
    "rate": lambda x: torch.poisson(x - 5),
    "unpooling": lambda x: F.max_unpool1d(x[None], on(0, 1, 2, 9).expand(1, 3, 4), 2),
    "margin": lambda x: F.multi_margin_loss(x, on(0, 1, 4)),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_the_error_comes_at_the_next_wait_and_never_ends(deadly, bad):
    x = torch.rand(3, 4, device="cuda:0")
    made = bad(x)  # succeeds, as a launch does
    assert made.is_cuda
    later = x + 1
    with pytest.raises(RuntimeError, match=ASSERT):
        later.sum().item()
    for more in (lambda: x + 1, lambda: x.mul_(2), lambda: x.cpu(), torch.cuda.synchronize):
        with pytest.raises(RuntimeError, match=ASSERT):
            more()
    with pytest.raises(RuntimeError, match=ASSERT):
        torch.zeros(1, device="cuda:1")  # of every GPU
    assert torch.ones(2).sum() == 2
    death = cuda_state.look()
    assert death.what == "device-side assert"
    assert "--check as the cell's first line names the bad index" in death.cure


def test_errors_of_the_host_are_as_ever(deadly):
    x = torch.rand(3, 4, device="cuda:0")
    for wrong in (lambda: x[5], lambda: x.gather(5, on(0)[None]), lambda: torch.bincount(on(-1))):
        with pytest.raises((IndexError, RuntimeError)) as failed:
            wrong()
        assert "CUDA error" not in str(failed.value)
    torch.cuda.synchronize()


def test_off_and_on_again_they_work(deadly):
    torch.rand(3, device="cuda:0")[on(3)]
    with pytest.raises(RuntimeError, match=ASSERT):
        torch.cuda.synchronize()
    assert cuda_state.look() is not None
    virtual.disable()
    assert cuda_state.death() is None
    virtual.enable(2)
    assert torch.zeros(2, device="cuda:0").sum().item() == 0
    with pytest.raises(IndexError, match="out of bounds"):
        torch.rand(3, device="cuda:0")[on(3)]


def test_in_cells_the_explanation_offers_the_check(ip):
    ip.run("%gpus --virtual 2 --asserts\ntable, ids = torch.rand(5, 2), torch.tensor([0, 9])")
    said = ip.run("%%ongpu 1\nrows = table[ids]\nprint(rows.sum())").text
    assert "device-side assert triggered" in said
    assert "%%ongpu 1 --check as the cell's first line, instead of the present one, names" in said
    assert "CUDA in this kernel is dead" in ip.run("%%ongpu 1\ntable + 1").text
    assert "%%ongpu 1 --check as the" in ip.run("%gpus").text
    assert "virtual GPUs are off" in ip.run("%gpus --virtual off --force").text
    assert ip.ns["table"].device.type == "cpu"
    ip.run("%gpus --virtual 2 --asserts")
    checked = ip.run("%%ongpu 1 --check\nrows = table[ids]")
    assert "ids[1] = 9, but table has 5 elements in dimension 0" in checked.text
    assert ip.run("%%ongpu 1\nrows = table[:2].sum().item()").error is None
    assert "%%ongpu 1 --check as the" in ip.run("%%ongpu 1\nrows = table[ids]").text  # not waited
    ip.run("%gpus --virtual off --force")
    ip.run("%gpus --virtual 2")
    assert "needs --virtual; type --virtual 2 --asserts" in ip.run("%gpus --asserts").text
