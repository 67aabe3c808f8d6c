"""Turn the tensors that a forked child has inherited into fakes, where they are.

Guarantees: a tensor stays the object that it is, so every name, container, view, module and
optimizer that holds it now holds the fake; views of one memory are fakes of one memory; a fake has
its shape, dtype, device, gradient and hooks, and none of its data.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gpumagic.dryrun.fakes import Fakes, suspended
from gpumagic.dryrun.lazy import lazy_fake
from gpumagic.dryrun.unknown import Stopped
from gpumagic.moving.find_tensors import TensorFinder


class Inherited:
    """Makes fakes of what is there, and of what libraries make without the modes.

    `count` is called with each new fake, `tracked` when a backward pass reaches a tensor that an
    earlier cell computed.
    """

    def __init__(
        self, mode: Fakes, count: Callable[[Any], None], tracked: Callable[[], None]
    ) -> None:
        self._mode, self._count, self._tracked = mode, count, tracked
        # The real ones: to free what lies on a GPU would be a call to its driver.
        self._kept: list[Tensor] = []
        self._without: dict[int, str] = {}

    def all_of(self, variables: Iterable[tuple[str, Any]]) -> None:
        """Make fakes of all tensors that these variables hold."""
        finder = TensorFinder()
        finder.variables(variables)
        for found in finder.found:
            if is_real(found.tensor):
                self._convert(found.tensor)

    def fake(self, tensor: Tensor) -> None:
        """Make a fake of a tensor that the code uses; `Stopped` where torch has none for it."""
        if id(tensor) not in self._without:
            self._convert(tensor)
        if id(tensor) in self._without:
            raise Stopped(self._without[id(tensor)])

    def _convert(self, tensor: Tensor) -> None:
        gradient = tensor.grad if tensor.is_leaf else None
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        try:
            fake = self._fake_of(tensor)
        except Exception as error:  # noqa: BLE001  the answer, where the code uses the tensor
            text = str(error).strip().splitlines() or [type(error).__name__]
            kind = f"{type(tensor).__name__} ({tensor.layout})"
            self._without[id(tensor)] = f"a {kind} has no dry run: {text[0]}"
            self._kept.append(tensor)
            return
        new_gradient = fake.grad if fake.is_leaf else None
        self._become(tensor, fake)
        if tensor.grad_fn is None and tensor.requires_grad:
            tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks
        self._count(tensor)
        if gradient is not None and is_real(gradient):
            self._become(gradient, new_gradient)
            self._count(gradient)

    def _become(self, tensor: Any, fake: Any) -> None:
        kind, tensor.__class__ = tensor.__class__, fake.__class__
        fake.__class__ = kind
        vars(tensor).update(vars(fake))
        torch._C._swap_tensor_impl(tensor, fake)
        self._kept.append(fake)

    def _fake_of(self, tensor: Tensor) -> Any:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            return lazy_fake(self._mode, tensor)
        plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        if not plain and not isinstance(tensor, (nn.Parameter, nn.Buffer)):
            raise NotImplementedError("it is no plain tensor")
        with suspended():
            if _is_a_number(tensor):
                convert = self._mode.fake_tensor_converter.from_real_tensor
                return convert(self._mode, tensor.clone(), make_constant=True)
            fake: Any = self._mode.from_tensor(tensor, static_shapes=True)
            if tensor.grad_fn is not None and fake.requires_grad:
                leaf = fake.detach().requires_grad_()
                fake = _Cut.apply(leaf, self._tracked)  # type: ignore[no-untyped-call]
        return fake


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has data; what `vmap` and `grad` wrap is a fake already."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return not isinstance(tensor, FakeTensor) and not wrapped


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
