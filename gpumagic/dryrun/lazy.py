"""Fakes of torch's lazy parameters: they wait for their shape as the real ones do."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gpumagic.dryrun.fakes import set_data
from gpumagic.placement.scope import placement


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


def lazy_fake(mode: FakeTensorMode, tensor: Any) -> Any:
    """The fake of an `UninitializedParameter` or `UninitializedBuffer`."""
    kind = LazyParameter if isinstance(tensor, UninitializedParameter) else LazyBuffer
    return _lazy(mode, kind, tensor.data.device, tensor.data.dtype, tensor.requires_grad)


def new_lazy(mode: FakeTensorMode, kind: type[_Lazy]) -> Any:
    """What replaces `__new__` of the class that `kind` stands for."""

    def new(
        cls: Any,
        requires_grad: bool = kind is LazyParameter,
        device: Any = None,
        dtype: Any = None,
        persistent: bool = True,
    ) -> Any:
        return _lazy(mode, kind, device, dtype, requires_grad)

    return new


def _lazy(mode: FakeTensorMode, kind: type[_Lazy], device: Any, dtype: Any, grad: bool) -> Any:
    holds = placement()
    if device is None and holds is not None and not holds.overruled():
        device = holds.device
    with mode:
        made: Any = torch.empty(0, device=device, dtype=dtype)
        if kind is LazyParameter:
            made = made.detach().requires_grad_(grad)
            made._is_param = True
    made.__class__ = kind
    return made
