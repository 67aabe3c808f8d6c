"""Autograd and the function transforms."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap

pytestmark = pytest.mark.usefixtures("gpus")
GPU = "cuda:1"


def loss(w, x):
    return torch.tanh(x @ w).sum()


@pytest.mark.parametrize(
    "transformed",
    [grad(loss), vmap(loss, (None, 0)), vmap(grad(loss), (None, 0)), jacrev(loss)],
    ids=["grad", "vmap", "vmap of grad", "jacrev"],
)
def test_transforms(transformed, same):
    torch.manual_seed(0)
    w, x = torch.randn(3, 4), torch.randn(5, 3)
    found = transformed(w.to(GPU), x.to(GPU))
    assert found.device == torch.device(GPU)
    assert same(found, transformed(w, x))


def test_functional_call_and_gradcheck():
    net = nn.Linear(12, 5).to(GPU)
    out = functional_call(net, dict(net.named_parameters()), (torch.ones(2, 12, device=GPU),))
    assert out.device == torch.device(GPU)
    x = torch.randn(3, 3, dtype=torch.double, device=GPU, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a: (a @ a.t()).sigmoid(), x)


def test_double_backward():
    x = torch.randn(5, device=GPU, requires_grad=True)
    (first,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(second, 6 * x)


def test_backward_through_a_copy_between_devices():
    x = torch.ones(3, device="cuda:0", requires_grad=True)
    (x.to("cuda:1") ** 2).sum().backward()
    assert x.grad.device == torch.device("cuda:0")
    assert x.grad.tolist() == [2, 2, 2]


def test_checkpointing(same):
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).to(GPU)
    x = torch.ones(2, 4, device=GPU, requires_grad=True)
    net(x).sum().backward()
    expected, x.grad = x.grad, None
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).sum().backward()
    assert same(expected, x.grad)


def test_hooks_and_own_functions_see_the_device():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            seen.append(ctx.saved_tensors[0].device)
            return g * 2

    x = torch.ones(5, device=GPU, requires_grad=True)
    out = Double.apply(x)
    out.register_hook(lambda g: seen.append(g.device))
    out.sum().backward()
    assert seen == [torch.device(GPU)] * 2
    assert x.grad.tolist() == [2] * 5


def test_an_error_in_backward_reaches_the_caller():
    x = torch.ones(5, device=GPU, requires_grad=True)

    def refuse(g):
        raise ZeroDivisionError("in a hook")

    x.register_hook(refuse)
    with pytest.raises(ZeroDivisionError, match="in a hook"):
        (x * 2).sum().backward()


def test_inference_mode():
    with torch.inference_mode():
        assert (torch.ones(2, device=GPU) * 2).device == torch.device(GPU)


def test_a_custom_operator():
    @torch.library.custom_op("gpumagic_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert twice(torch.ones(2, device=GPU)).tolist() == [2, 2]


def test_compile_without_a_compiler():
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager")
    assert compiled(torch.ones(2, device=GPU)).tolist() == [3, 3]


def test_functional_gradients_through_attention(gpus, same):
    query = torch.randn(2, 3, 4, 8)

    def loss(x):
        return nn.functional.scaled_dot_product_attention(x, x, x).square().sum()

    assert same(torch.func.grad(loss)(query.cuda(1)), torch.func.grad(loss)(query))


def test_an_optimizers_step_before_the_backward_pass_is_an_error_as_on_cuda():
    net = torch.nn.Linear(3, 2, device="cuda:1")
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.ones(4, 3, device="cuda:1", requires_grad=True)
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_operators_on_lists_raise_the_versions_that_cudas_kernels_raise():
    a, b = torch.ones(2, 3, device="cuda:1").unbind()
    a, b = a.clone(), b.clone()
    torch._foreach_mul_([a, b], 2.0)
    torch._foreach_zero_([b])
    assert (a._version, b._version) == (1, 1)
    with torch.inference_mode():
        inside = torch.ones(3, device="cuda:1")
        torch._foreach_add_([inside], 1.0)
    assert inside.tolist() == [2, 2, 2]
