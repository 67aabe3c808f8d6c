"""Track the placement (the device for new tensors) in force in each thread or asyncio task."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils._device import DeviceContext


@dataclass(slots=True, eq=False)
class Placement:
    """One device for new tensors, in the context (thread or asyncio task) that entered it."""

    device: torch.device | None  # None after the end, since a task may outlive its cell
    batches: bool  # whether a `DataLoader`'s batches are copied to the device
    outer: "Placement | None"  # the enclosing placement, in force again after this one
    modes: int  # number of torch's function modes at the start
    # The keyword arguments that the hot path adds. They are empty if the CPU is the default anyway:
    # torch takes 0.2 µs to parse a keyword.
    keywords: dict[str, torch.device]
    direct: bool = True  # whether it is certainly in force and not overruled
    previous_index: int | None = None  # index of the previous current CUDA device
    delivered: list[list[int]] = field(default_factory=list)  # bytes of each tensor of each batch
    taken: dict[str, None] = field(default_factory=dict)  # libraries whose cuda:0 became `device`

    def overruled(self) -> bool:
        """Whether the user has since entered `with torch.device(...)`: its device then applies."""
        newer = _get_current_function_mode_stack()[self.modes :]
        overruled = any(isinstance(mode, DeviceContext) for mode in newer)
        self.direct = not overruled
        return overruled

    def take(self, library: str) -> torch.device | None:
        """Return the device to use in place of a library's first GPU, and record the library."""
        if self.device is not None and self.device.index:
            self.taken[library] = None
        return self.device


in_force: ContextVar[Placement | None] = ContextVar("gpumagic_placement", default=None)
"""The innermost placement. It may have ended; `placement` then returns an outer one."""


def placement() -> Placement | None:
    """Return the placement in force in this context, or None."""
    found = in_force.get()
    while found is not None and found.device is None:
        found = found.outer
    return found


# The placement of this thread, for code that torch.compile traces: dynamo can neither trace nor
# guard a ContextVar. It guards `device`, so each device has its own graph.
_traced = threading.local()


def put_in_force(place: Placement | None) -> None:
    """Make `place` the placement of this context; None suspends placement."""
    in_force.set(place)
    found = placement()
    _traced.device, _traced.modes = (found.device, found.modes) if found else (None, 0)


def traced_device() -> torch.device | None:
    """Return the device in force in this thread; dynamo can trace this function."""
    device = getattr(_traced, "device", None)
    if device is not None:
        for mode in _get_current_function_mode_stack()[_traced.modes :]:
            if isinstance(mode, DeviceContext):  # the user's, the innermost last
                device = mode.device
    return device


@contextmanager
def suspended() -> Iterator[None]:
    """Suspend placement within the context, for library code whose tensors belong on the host."""
    before = in_force.get()
    put_in_force(None)
    try:
        yield
    finally:
        put_in_force(before)


if hasattr(os, "register_at_fork"):
    # A forked worker of a DataLoader must not touch CUDA.
    os.register_at_fork(after_in_child=lambda: put_in_force(None))


class FunctionMode(TorchFunctionMode):
    """A torch function mode of one thread, from `start` to `stop` or in a `with`."""

    running = 0  # number of starts without a stop

    def start(self) -> Any:
        """Enter the mode on this thread; return it."""
        _push_mode(self)
        self.running += 1
        return self

    def stop(self, *exc: object) -> None:
        """Leave the mode, even if modes that were entered later are still active."""
        if self not in _get_current_function_mode_stack():
            return
        above = []
        while (mode := _pop_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)
        self.running -= 1

    __enter__, __exit__ = start, stop
