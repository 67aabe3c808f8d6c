"""The fake of one tensor: its shape, dtype, device, memory and gradient, and none of its data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gpumagic.dryrun.fakes import Fakes, suspended
from gpumagic.dryrun.lazy import lazy_double


def fake_of(mode: Fakes, tensor: Tensor, tracked: Callable[[], None]) -> Any:
    """Make it; views of one memory are fakes of one memory.

    Parameters
    ----------
    mode : Fakes
    tensor : torch.Tensor
    tracked : callable
        Called when a backward pass reaches it and would go on into what computed it.
    """
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return lazy_double(mode, tensor)
    plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    if not plain and not isinstance(tensor, (nn.Parameter, nn.Buffer)):
        raise NotImplementedError("it is no plain tensor")
    with suspended():
        if _is_a_number(tensor):
            convert = mode.fake_tensor_converter.from_real_tensor
            return convert(mode, tensor.clone(), make_constant=True)
        fake: Any = mode.from_tensor(tensor, static_shapes=True)
        if tensor.grad_fn is not None and fake.requires_grad:
            leaf = fake.detach().requires_grad_()
            fake = _Cut.apply(leaf, tracked)  # type: ignore[no-untyped-call]
    return fake


def _is_a_number(tensor: Tensor) -> bool:
    """One that is there already, on the host, is known: a step count, a flag."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.numel() == 1
        and not tensor.requires_grad
        and tensor.layout is torch.strided
    )


class _Cut(torch.autograd.Function):
    """Where the graph of an earlier cell would begin."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, tracked: Callable[[], None]) -> Any:
        ctx.tracked = tracked
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.tracked()
        return None, None
