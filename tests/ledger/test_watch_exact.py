"""The ledger against the devices' own word, for programs nobody wrote; results as without it."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from watched import seen

from gpumagic.frameworks.watching import watch

pytestmark = pytest.mark.usefixtures("gpus")

DEVICES = ("cpu", "cuda:0", "cuda:1")
STEPS = {
    "to": lambda x, y, d: x.to(d),
    "to_dtype": lambda x, y, d: x.to(d, torch.float64).float(),
    "copy": lambda x, y, d: torch.empty(x.shape, device=d).copy_(x, non_blocking=d != "cpu"),
    "copy_broadcast": lambda x, y, d: torch.zeros(5, *x.shape, device=d).copy_(x)[0],
    "transposed": lambda x, y, d: x.T.to(d).T,
    "strided": lambda x, y, d: x[:, ::2].to(d).repeat(1, 2)[:, : x.shape[1]],
    "item": lambda x, y, d: x * 0 + x.sum().item(),
    "bool": lambda x, y, d: x if x.sum() > 0 else -x,
    "tolist": lambda x, y, d: torch.tensor(x.tolist(), device=d),
    "repr": lambda x, y, d: (repr(x), x)[1],
    "format": lambda x, y, d: (f"{x.sum():.1f}{x[0, 0]}", x)[1],
    "mask": lambda x, y, d: (x[x > 0], x)[1],
    "put_mask": lambda x, y, d: (
        x.clone().masked_fill_(x > 1, 0.5).index_put((x > 2,), x.new_zeros(()))
    ),
    "nonzero": lambda x, y, d: (x.nonzero(), x)[1],
    "cpu_index": lambda x, y, d: x[torch.tensor([1, 0])],
    "cpu_indices": lambda x, y, d: (x[torch.tensor([1, 0]), torch.tensor([0, 1])], x)[1],
    "set_row": lambda x, y, d: x.clone().index_put_((torch.tensor([0]),), x.new_ones(x.shape[1])),
    "mask_from": lambda x, y, d: x.index_put((x > 0,), torch.tensor(2.0)),
    "set_from": lambda x, y, d: _set(x.clone(), y),
    "set_number": lambda x, y, d: _set(x.clone(), 3.0),
    "scalar": lambda x, y, d: x * torch.tensor(2.0),
    "compute": lambda x, y, d: (x @ x.T @ x).clone().contiguous().sin(),
    "equal": lambda x, y, d: (torch.equal(x, x), x)[1],
    "unique": lambda x, y, d: (x.unique(), x)[1],
    "grad": lambda x, y, d: _grad(x, d),
    "numpy": lambda x, y, d: torch.from_numpy(x.numpy(force=True)),
    "deepcopy": lambda x, y, d: nn.Parameter(x).detach().cpu().clone(),
    "error": lambda x, y, d: _error(x),
    "nested": lambda x, y, d: _nested(x, d),
}


def _set(x, value):
    x[0] = value if isinstance(value, float) else value[0, : x.shape[1]].clone()
    return x


def _grad(x, device):
    w = x.detach().clone().requires_grad_()
    (w.to(device) * 2).sum().backward()
    return w.grad


def _error(x):
    with pytest.raises(RuntimeError):
        x.to("cuda:0") @ x.to("cuda:1").T
    return x


def _nested(x, device):
    with watch(warn=False) as inner:
        x = x.to(device)
    assert inner.ledger.transfers <= 1
    return x


@example([("copy", "cuda:0", 1), ("set_row", "cpu", 1), ("mask_from", "cpu", 1)], 2)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from(DEVICES), st.integers(1, 3)),
        min_size=1,
        max_size=8,
    ),
    st.integers(2, 4),
)
def test_counts_and_bytes_are_what_the_devices_did(program, columns):
    def run():
        torch.manual_seed(0)
        x, results = torch.randn(2, columns), []
        y = torch.ones(2, 4)
        for name, device, times in program:
            for _ in range(times):
                x = STEPS[name](x, y, device)
            results.append(x.detach())
        return results

    bare, watched = run(), []
    seen(lambda: watched.extend(run()))
    assert [x.device for x in bare] == [x.device for x in watched]
    for a, b in zip(bare, watched, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_training_is_the_same_bit_for_bit():
    def train():
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )
        net.to("cuda:1")
        optimizer = torch.optim.Adam(net.parameters())
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = (
                    checkpoint(net, torch.randn(6, 4).to("cuda:1"), use_reentrant=False)
                    .square()
                    .mean()
                )
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return [*losses, *(p.detach().cpu() for p in net.parameters())]

    bare, watched = train(), []
    seen(lambda: watched.extend(train()))
    assert bare[:5] == watched[:5]
    assert all(torch.equal(a, b) for a, b in zip(bare[5:], watched[5:], strict=True))


def transforms():
    x = torch.arange(12.0).view(3, 4)

    def through(v):
        return (v.to("cuda:0") * 2).to("cuda:1").sin()

    def vmap():
        return torch.func.vmap(through)(x)

    def jacobian():
        return torch.func.jacrev(lambda v: v.to("cuda:0") * v.to("cuda:0"))(x[0].to("cuda:0"))

    def trace():
        return torch.jit.trace(through, x, check_trace=False)(x)

    def compiled():
        torch._dynamo.reset()
        return torch.compile(through, backend="eager")(x)

    def double_backward():
        w = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(through(w).square().sum(), w, create_graph=True)
        return torch.autograd.grad(g.square().sum(), w)[0]

    def inference():
        with torch.inference_mode():
            return through(x).cpu() + x.cuda().sum().item()

    return {f.__name__: f for f in (vmap, jacobian, trace, compiled, double_backward, inference)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", transforms())
def test_transforms_give_the_same(name):
    run, found = transforms()[name], []
    bare = run()
    seen(lambda: found.append(run()))
    assert found[0].device == bare.device
    assert torch.equal(found[0], bare)
