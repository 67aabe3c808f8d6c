"""torch's lazy parameters in a dry run: they wait for their shape as the real ones do."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gpumagic.placement.scope import placement


class _Lazy(FakeTensor):
    """A fake whose shape is not known yet; `materialize` makes it an ordinary one."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "<a lazy parameter>"

    shape = torch.Tensor.shape  # UninitializedParameter has none

    def materialize(self, shape: Any, device: Any = None, dtype: Any = None) -> None:
        from gpumagic.dryrun.answers import set_data

        new = torch.empty(shape, device=device or self.device, dtype=dtype or self.dtype)
        set_data(self, new)
        self.__class__ = FakeTensor  # type: ignore[assignment]


class LazyParameter(_Lazy, UninitializedParameter):
    """Is an `UninitializedParameter` to those who ask."""


class LazyBuffer(_Lazy, UninitializedBuffer):
    """Is an `UninitializedBuffer`."""


def lazy_double(mode: FakeTensorMode, tensor: Any) -> Any:
    """The stand-in of an `UninitializedParameter` or `UninitializedBuffer`."""
    kind = isinstance(tensor, UninitializedParameter)
    return _lazy(mode, tensor.data.device, tensor.data.dtype, kind, tensor.requires_grad)


def new_parameter(mode: FakeTensorMode) -> Any:
    """What replaces `UninitializedParameter.__new__` in a dry run."""

    def new(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        return _lazy(mode, device, dtype, True, requires_grad)

    return new


def new_buffer(mode: FakeTensorMode) -> Any:
    """What replaces `UninitializedBuffer.__new__`."""

    def new(
        cls: Any,
        requires_grad: bool = False,
        device: Any = None,
        dtype: Any = None,
        persistent: bool = True,
    ) -> Any:
        return _lazy(mode, device, dtype, False, requires_grad)

    return new


def _lazy(mode: FakeTensorMode, device: Any, dtype: Any, parameter: bool, grad: bool) -> Any:
    place = placement()
    if device is None and place is not None and not place.overruled():
        device = place.device
    with mode:
        made: Any = torch.empty(0, device=device, dtype=dtype)
        if parameter:
            made = made.detach().requires_grad_(grad)
            made._is_param = True
    made.__class__ = LazyParameter if parameter else LazyBuffer
    return made
