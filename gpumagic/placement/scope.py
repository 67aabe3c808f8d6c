"""Say which placement is in force in this thread or asyncio task."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch._C import _len_torch_function_stack  # the count that torch.utils._device itself uses
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext


@dataclass(slots=True, eq=False)
class Placement:
    """Record one device in force, in the context (thread or asyncio task) that entered it."""

    device: torch.device | None  # None once it was left: a task that outlives its cell must stop
    batches: bool  # whether those of a `DataLoader` are brought to the device too
    outer: "Placement | None"  # the one that holds again when this one ends
    modes: int  # how many of torch's were in force before
    # What the hot path passes on. The CPU needs no word where it is the default anyway: torch takes
    # 0.2 µs to read one.
    keywords: dict[str, torch.device]
    direct: torch.device | None  # as `device`, but None too while `overruled` might say yes
    previous_index: int | None = None  # of the current CUDA device before
    delivered: list[list[int]] = field(default_factory=list)  # bytes of each tensor of each batch
    taken: dict[str, None] = field(default_factory=dict)  # libraries whose first GPU was `device`

    def overruled(self) -> bool:
        """Whether the user entered a `with torch.device(...)` since: then that one decides."""
        if _len_torch_function_stack() > self.modes:
            newer = _get_current_function_mode_stack()[self.modes :]
            if any(isinstance(mode, DeviceContext) for mode in newer):
                return True
        self.direct = self.device
        return False


in_force: ContextVar[Placement | None] = ContextVar("gpumagic_placement", default=None)
"""It may have been left: `placement` looks further out then."""


def enclosing() -> Iterator[Placement]:
    """Yield the placements in force here, the innermost first."""
    found = in_force.get()
    while found is not None:
        if found.device is not None:
            yield found
        found = found.outer


def placement() -> Placement | None:
    """Return the placement in force here, or None."""
    return next(enclosing(), None)


# The placement of this thread, for code that torch.compile traces: dynamo can neither trace nor
# guard a ContextVar. It compares `device` before it uses a graph, so each device has its own.
_traced = threading.local()


def put_in_force(place: Placement | None) -> None:
    """Make `place` the placement of this context; None suspends placement."""
    in_force.set(place)
    found = placement()
    _traced.device, _traced.modes = (found.device, found.modes) if found else (None, 0)


def traced_device() -> torch.device | None:
    """Return the device in force in this thread, in terms that dynamo can trace."""
    device = getattr(_traced, "device", None)
    if device is not None:
        for mode in _get_current_function_mode_stack()[_traced.modes :]:
            if isinstance(mode, DeviceContext):  # the user's, the innermost last
                device = mode.device
    return device


@contextmanager
def suspended() -> Iterator[None]:
    """Suspend placement within, for library code whose small tensors belong on the host."""
    before = in_force.get()
    put_in_force(None)
    try:
        yield
    finally:
        put_in_force(before)


if hasattr(os, "register_at_fork"):
    # A forked worker of a DataLoader must not touch CUDA.
    os.register_at_fork(after_in_child=lambda: put_in_force(None))
