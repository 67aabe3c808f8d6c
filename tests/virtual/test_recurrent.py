"""LSTM, GRU and RNN on a virtual GPU are the CPU's own, with gradients, memory and random state."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

KINDS = [nn.LSTM, nn.GRU, nn.RNN]


def trained(net, x, packed=False):
    """The outputs, and every gradient, on the CPU."""
    x = x.clone().requires_grad_()
    given = pack_padded_sequence(x, [5, 3, 2], batch_first=True) if packed else x
    output, hidden = net(given)
    if packed:
        output, _ = pad_packed_sequence(output, batch_first=True)
    hidden = torch.cat(hidden) if isinstance(hidden, tuple) else hidden
    (output.square().sum() + hidden.sum()).backward()
    return [t.detach().cpu() for t in (output, hidden, x.grad, *(p.grad for p in net.parameters()))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("two_ways", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_results_and_gradients_are_the_cpus(gpus, kind, two_ways, packed):
    net = kind(4, 6, num_layers=2, bidirectional=two_ways, batch_first=True)
    x = torch.randn(3, 5, 4)
    expected = trained(copy.deepcopy(net), x, packed)
    found = trained(net.to("cuda:1"), x.to("cuda:1"), packed)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("kind", KINDS)
def test_each_gradient_has_bytes_of_its_own(gpus, kind):
    net = kind(4, 6).to("cuda:1")
    net(torch.randn(5, 3, 4, device="cuda:1"))[0].sum().backward()
    assert len({p.grad.data_ptr() for p in net.parameters()}) == 4
    before = net.bias_hh_l0.grad.clone()
    net.bias_ih_l0.grad.zero_()
    assert torch.equal(net.bias_hh_l0.grad, before)


def test_what_is_kept_for_the_backward_pass_goes_with_it(gpus):
    net, x = nn.LSTM(16, 64).to("cuda:1"), torch.randn(50, 8, 16, device="cuda:1")
    output = net(x)[0]
    kept = torch.cuda.memory_allocated(1)
    output.sum().backward(retain_graph=True)
    for p in net.parameters():
        p.grad = None
    assert torch.cuda.memory_allocated(1) == kept
    output.sum().backward()
    for p in net.parameters():
        p.grad = None
    assert torch.cuda.memory_allocated(1) <= kept - 6 * output.nbytes
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


def test_dropout_between_layers_leaves_the_hosts_random_state(gpus):
    net, x = nn.GRU(4, 6, num_layers=2, dropout=0.5).to("cuda:1"), torch.ones(5, 3, 4).to("cuda:1")
    before = torch.get_rng_state()
    one, other = net(x)[0], net(x)[0]
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def checkpointed(net, x):
    return checkpoint(net, x, use_reentrant=False)[0]


def saved_on_cpu(net, x):
    with save_on_cpu():
        return net(x)[0]


@pytest.mark.parametrize("run", [checkpointed, saved_on_cpu])
def test_hooks_of_saved_tensors_change_no_gradient(gpus, run):
    net, found = nn.LSTM(4, 6, num_layers=2, dropout=0.5).to("cuda:1"), []
    for way in (lambda net, x: net(x)[0], run):
        torch.manual_seed(3)
        x = torch.randn(5, 3, 4, device="cuda:1", requires_grad=True)
        way(net, x).square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_without_gradients_nothing_is_kept(gpus):
    net, x = nn.LSTM(16, 64).to("cuda:1"), torch.randn(50, 8, 16, device="cuda:1")
    before = torch.cuda.memory_allocated(1)
    with torch.no_grad():
        output, (h, c) = net(x)
    assert torch.cuda.memory_allocated(1) - before == output.nbytes + h.nbytes + c.nbytes
    assert torch.cuda.max_memory_allocated(1) - before < 2 * output.nbytes


def test_under_vmap_each_sample_has_its_own_gradient(gpus):
    net, x = nn.RNN(4, 6).to("cuda:1"), torch.randn(3, 5, 4, device="cuda:1")
    weights = {name: p.detach() for name, p in net.named_parameters()}

    def loss(weights, sample):
        return torch.func.functional_call(net, weights, (sample,))[0].sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
    alone = torch.func.grad(loss)(weights, x[1])
    assert torch.allclose(found["weight_ih_l0"][1], alone["weight_ih_l0"], atol=1e-5)


@pytest.mark.parametrize("changed", ["weight", "input"])
def test_what_was_changed_in_place_since_gives_no_gradient(gpus, changed):
    net, x = nn.LSTM(4, 6).to("cuda:1"), torch.randn(5, 3, 4, device="cuda:1")
    output = net(x)[0]
    with torch.no_grad():
        (net.weight_hh_l0 if changed == "weight" else x).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
