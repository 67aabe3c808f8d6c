"""Which placement is in force in this thread or asyncio task."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch._C import _len_torch_function_stack  # the count that torch.utils._device itself uses
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


class Placement:
    """One device in force, in the context (thread or asyncio task) that entered it.

    Attributes
    ----------
    device : torch.device or None
        None once it was left: a task that outlives its cell must not go on placing.
    direct : torch.device or None
        The same, but None too while `overruled` might say yes: what the hot path looks at.
    keywords : dict
        What the hot path passes on. The CPU needs no word where it is the default anyway: torch
        takes 0.2 µs to read one.
    batches : bool
        Whether batches of a `DataLoader` are brought to the device too.
    delivered : list of int
        Bytes of each batch that a `DataLoader` brought.
    """

    __slots__ = (
        "batches",
        "delivered",
        "device",
        "direct",
        "keywords",
        "modes",
        "outer",
        "owner",
        "previous_index",
    )

    def __init__(self, device: torch.device, batches: bool = True) -> None:
        self.device: torch.device | None = device
        self.direct: torch.device | None = device
        self.batches = batches
        self.delivered: list[int] = []
        self.outer = placement()
        self.modes = _len_torch_function_stack()
        implied = device.type == "cpu" and not self.modes
        self.keywords: dict[str, torch.device] = {} if implied else {"device": device}
        self.owner: object = None
        self.previous_index: int | None = None

    def hold(self) -> None:
        """Come into force in this context."""
        _current.set(self)

    def end(self) -> None:
        """Be in force no longer, in whatever context that is."""
        self.device = self.direct = None
        if _current.get() is self:
            _current.set(self.outer)

    def overruled(self) -> bool:
        """Whether the user entered a `with torch.device(...)` since: then that one decides."""
        if _len_torch_function_stack() > self.modes:
            newer = _get_current_function_mode_stack()[self.modes :]
            if any(isinstance(mode, DeviceContext) for mode in newer):
                return True
        self.direct = self.device
        return False


_current: ContextVar[Placement | None] = ContextVar("gpumagic_placement", default=None)
current_placement = _current.get  # it may have been left: `placement` looks further out then


def enclosing() -> Iterator[Placement]:
    """The placements that hold here, the innermost first."""
    found = _current.get()
    while found is not None:
        if found.device is not None:
            yield found
        found = found.outer


def placement() -> Placement | None:
    """The placement in force here, or None."""
    return next(enclosing(), None)


@contextmanager
def suspended() -> Iterator[None]:
    """No placement within: for library code whose small tensors belong on the host."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


if hasattr(os, "register_at_fork"):
    # A forked worker of a DataLoader must not touch CUDA.
    os.register_at_fork(after_in_child=lambda: _current.set(None))
