"""Make tensors without data, and turn the tensors that a forked child inherits into them.

Guarantees: a tensor stays the object that it is, so every name, container, view, module and
optimizer that holds it now holds the fake; views of one memory are fakes of one memory; a fake has
its shape, dtype, device, gradient and hooks, and none of its data.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# `suspended` needs it, also within the import that would load it.
import torch._subclasses.schema_check_mode
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from gpumagic.dryrun.unknown import Stopped
from gpumagic.faults import first_line
from gpumagic.moving.find_tensors import TensorFinder
from gpumagic.placement.scope import placement

_functorch: Any = torch._C._functorch


class Fakes(FakeTensorMode):
    """torch's mode, on the CPU alone: no byte and no context on the device that a fake names."""

    def __init__(self, count: Callable[[Any], None], tracked: Callable[[], None]) -> None:
        super().__init__(allow_fallback_kernels=False, allow_non_fake_inputs=True)
        # Called with each new fake, and when a backward pass goes on into an earlier cell.
        self._count, self._tracked = count, tracked
        # The real ones: to free what lies on a GPU would be a call to its driver.
        self._kept: list[Tensor] = []
        self._without: dict[int, str] = {}

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> "Fakes":
        return self  # else the copy of a module would bring a second mode

    def take_over(self, variables: Iterable[tuple[str, Any]]) -> None:
        """Make fakes of all tensors that these variables hold."""
        finder = TensorFinder()
        finder.variables(variables)
        scripted = [
            (module._c, name, tensor)
            for module in finder.scripted
            for named in (module.named_parameters, module.named_buffers)
            for name, tensor in named(recurse=False)
        ]
        for found in finder.tensors:
            if is_real(found.tensor):
                self._convert(found.tensor)
        for module, name, tensor in scripted:
            module.setattr(name, tensor)  # C++ still holds the real one

    def fake(self, tensor: Tensor) -> None:
        """Make a fake of a tensor that the code uses; `Stopped` where torch has none for it."""
        if id(tensor) not in self._without:
            self._convert(tensor)
        if id(tensor) in self._without:
            raise Stopped(self._without[id(tensor)])

    def _convert(self, tensor: Tensor) -> None:
        if parts := _parts(tensor):
            for part in filter(is_real, parts):
                self._convert(part)
            return
        gradient = tensor.grad if tensor.is_leaf else None
        hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
        try:
            fake = self._fake_of(tensor)
        except Exception as error:  # noqa: BLE001  the answer, where the code uses the tensor
            why = "it is nested" if tensor.is_nested else first_line(error)
            kind = f"{type(tensor).__name__} ({tensor.layout})"
            self._without[id(tensor)] = f"a {kind} has no dry run: {why}"
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
            kind = LazyParameter if isinstance(tensor, UninitializedParameter) else LazyBuffer
            data = tensor.data
            return new_lazy(self, kind)(kind, tensor.requires_grad, data.device, data.dtype)
        if type(tensor) is not Tensor and not isinstance(tensor, (nn.Parameter, nn.Buffer)):
            raise NotImplementedError("it is no plain tensor")
        with suspended():
            if _is_a_number(tensor):
                convert = self.fake_tensor_converter.from_real_tensor
                return convert(self, tensor.clone(), make_constant=True)
            fake: Any = self.from_tensor(tensor, static_shapes=True)
            if tensor.grad_fn is not None and fake.requires_grad:
                leaf = fake.detach().requires_grad_()
                fake = _Cut.apply(leaf, self._tracked)  # type: ignore[no-untyped-call]
        return fake


@contextmanager
def suspended() -> Iterator[None]:
    """Allow real tensors within, for objects of the process rather than the run."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def set_data(tensor: Any, new: Any) -> None:
    """`tensor.data = new` of fakes, which torch leaves on the old device."""
    with torch._C.DisableTorchFunction():
        torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.fake_device = new.fake_device
        tensor.constant = None


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor has data; what `vmap` and `grad` wrap is a fake already."""
    if isinstance(tensor, FakeTensor) or _functorch.is_functorch_wrapped_tensor(tensor):
        return False
    parts = _parts(tensor)
    return any(map(is_real, parts)) if parts else True


def _parts(tensor: Any) -> list[Tensor]:
    """Return the parts of a tensor, such as a sharded one's; empty for a plain tensor."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        return []
    parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [part for part in parts if isinstance(part, Tensor)]


def _is_a_number(tensor: Tensor) -> bool:
    """Whether a tensor is one number on the host, whose value is known: a step count, a flag."""
    return (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.numel() == 1
        and not tensor.requires_grad
        and tensor.layout is torch.strided
    )


class _Cut(torch.autograd.Function):
    """Mark where the graph of an earlier cell would begin."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, tracked: Callable[[], None]) -> Any:
        ctx.tracked = tracked
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.tracked()
        return None, None


class _Lazy(FakeTensor):
    """A fake whose shape is not known yet; `materialize` makes it an ordinary one."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a lazy parameter>"

    shape = torch.Tensor.shape  # UninitializedParameter has none

    def materialize(self, shape: Any, device: Any = None, dtype: Any = None) -> None:
        new = torch.empty(shape, device=device or self.device, dtype=dtype or self.dtype)
        set_data(self, new)
        self.__class__ = FakeTensor  # type: ignore[assignment]


class LazyParameter(_Lazy, UninitializedParameter):
    """Is an `UninitializedParameter` to those who ask."""


class LazyBuffer(_Lazy, UninitializedBuffer):
    """Is an `UninitializedBuffer`."""


def new_lazy(mode: Fakes, kind: type[_Lazy]) -> Callable[..., Any]:
    """Return the function that replaces `__new__` of the class that `kind` imitates."""

    def new(
        cls: Any,
        requires_grad: bool = kind is LazyParameter,
        device: Any = None,
        dtype: Any = None,
        persistent: bool = True,
    ) -> Any:
        holds = placement()
        if device is None and holds is not None and not holds.overruled():
            device = holds.device
        with mode:
            made: Any = torch.empty(0, device=device, dtype=dtype)
            if kind is LazyParameter:
                made = made.detach().requires_grad_(requires_grad)
                made._is_param = True
        made.__class__ = kind
        return made

    return new
