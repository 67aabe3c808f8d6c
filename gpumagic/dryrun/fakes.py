"""Make tensors without data: torch's mode that computes with them, on the CPU alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes


class Fakes(FakeTensorMode):
    """torch's mode, on the CPU alone: no byte and no context on the device that a fake names."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> "Fakes":
        return self  # else the copy of a module would bring a second mode


@contextmanager
def suspended() -> Iterator[None]:
    """Real tensors within: for what belongs to the process and not to the run."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def set_data(tensor: Any, new: Any) -> None:
    """`tensor.data = new` of fakes, which torch leaves on the old device."""
    with torch._C.DisableTorchFunction():
        torch.Tensor.data.__set__(tensor, new)  # type: ignore[attr-defined]
        tensor.fake_device = new.fake_device
        tensor.constant = None
