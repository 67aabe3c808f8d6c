"""Try virtual GPUs on a build of torch, in a process that :mod:`gpumagic.virtual.gate` starts."""

import contextlib
import faulthandler

import torch
from torch import nn

from gpumagic.virtual import disable, switch

CAPACITY = 2**30


def main() -> None:
    """Turn virtual GPUs on and off twice and use what a crash would come from."""
    faulthandler.enable()
    _backward_on_the_cpu()
    for _ in range(2):
        switch.install(2, CAPACITY)
        _train()
        _cross()
        _pin()
        _mismatch()
        disable()
        assert not torch.cuda.is_initialized()
    _backward_on_the_cpu()
    print("verdict: works", flush=True)


def _backward_on_the_cpu() -> None:
    (torch.ones(2, requires_grad=True) * 2).sum().backward()


def _train() -> None:
    layers = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3)
    net = nn.Sequential(*layers).to("cuda:1")
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 1, 5, 5, device="cuda:1")).square().mean().backward()
    optimizer.step()
    assert torch.cuda.memory_allocated(1) > 0


def _cross() -> None:
    x = torch.ones(3, device="cuda:0", requires_grad=True)
    (x.to("cuda:1") ** 2).sum().backward()
    assert x.grad is not None
    gradient = torch.func.grad(lambda t: (t**2).sum())(x.detach())
    for g in (x.grad, gradient):
        assert g.device == torch.device("cuda:0")
        assert g.tolist() == [2, 2, 2]


def _pin() -> None:
    assert torch.ones(2).pin_memory().is_pinned()
    assert torch.zeros(2, pin_memory=True).cuda().sum().item() == 0
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    assert accelerator.type == "cuda"


def _mismatch() -> None:
    with contextlib.suppress(RuntimeError):
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
        raise AssertionError("two devices were taken for one")
