"""Track the placement (the device for new tensors) of each thread or asyncio task."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.overrides
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext


@dataclass(slots=True, eq=False)
class Placement:
    """A device for new tensors in one context, which is a thread or an asyncio task."""

    device: torch.device | None  # None once the placement has ended
    batches: bool  # whether a `DataLoader`'s batches are copied to the device
    outer: "Placement | None"  # the enclosing placement, in force again after this one
    modes: int  # number of active torch function modes when the placement began
    # Keywords for `torch.zeros` etc. Empty if torch uses the CPU anyway, as a keyword costs 0.2 µs.
    keywords: dict[str, torch.device]
    direct: bool = True  # whether `torch.zeros` etc. use the device without calling `overruled`
    previous_index: int | None = None  # the current CUDA device's index before the placement
    delivered: list[list[int]] = field(default_factory=list)  # bytes of copied tensors, by batch
    taken: dict[str, None] = field(default_factory=dict)  # libraries that `take` has recorded

    def overruled(self) -> bool:
        """Whether a later `with torch.device(...)` of the user overrules this placement."""
        newer = _get_current_function_mode_stack()[self.modes :]
        overruled = any(isinstance(mode, DeviceContext) for mode in newer)
        self.direct = not overruled
        return overruled

    def take(self, library: str) -> torch.device | None:
        """Return the device that replaces a library's `cuda:0`; record `library` if they differ."""
        if self.device is not None and self.device.index:
            self.taken[library] = None
        return self.device


in_force: ContextVar[Placement | None] = ContextVar("gpumagic_placement", default=None)
"""The innermost placement. If it has ended, `placement` returns an enclosing placement."""


def placement() -> Placement | None:
    """Return the placement in force in this context, or None."""
    found = in_force.get()
    while found is not None and found.device is None:
        found = found.outer
    return found


# The placement of this thread, for code that torch.compile traces. Dynamo cannot trace or guard a
# ContextVar. Dynamo guards `_traced.device` instead, so each device gets its own graph.
_traced = threading.local()


def put_in_force(place: Placement | None) -> None:
    """Make `place` the placement of this context; None suspends placement."""
    in_force.set(place)
    found = placement()
    _traced.device, _traced.modes = (found.device, found.modes) if found else (None, 0)


def traced_device() -> torch.device | None:
    """Return the device for new tensors in this thread. Dynamo can trace this function."""
    if (device := getattr(_traced, "device", None)) is not None:
        for mode in _get_current_function_mode_stack()[_traced.modes :]:
            if isinstance(mode, DeviceContext):  # `with torch.device(...)`; the innermost is last
                device = mode.device
    return device


@contextmanager
def suspended() -> Iterator[None]:
    """Suspend placement in a `with` block, for library code whose tensors belong on the host."""
    before = in_force.get()
    put_in_force(None)
    try:
        yield
    finally:
        put_in_force(before)


if hasattr(os, "register_at_fork"):
    # A forked worker of a DataLoader must not use CUDA, so a forked child has no placement.
    os.register_at_fork(after_in_child=lambda: put_in_force(None))


class FunctionMode(torch.overrides.TorchFunctionMode):
    """A torch function mode, active in one thread from `start` to `stop` or in a `with`."""

    running = 0  # number of calls of `start` minus calls of `stop`

    def start(self) -> Any:
        """Enter the mode on this thread; return the mode."""
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
