"""Waits that are no operators, and printing: functions of torch that are wrapped meanwhile."""

import functools
import itertools
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch._tensor_str

from gpumagic.ledger import attribute

_missing = object()
_serials = itertools.count(1)


class Patches:
    """Attributes that were swapped; `remove` puts each back that is still ours."""

    def __init__(self) -> None:
        self._swapped: list[tuple[Any, str, Any, Any]] = []

    def printing(self) -> None:
        """Number each printing of a tensor: it makes many waits."""
        self._swap(torch._tensor_str, "_str", _numbered)

    def synchronising(self) -> None:
        """Count the calls that do nothing but wait for a device."""
        self._swap(torch.cuda, "synchronize", _counted)
        self._swap(torch.cuda.Stream, "synchronize", _counted)
        self._swap(torch.cuda.Event, "synchronize", _counted)
        if hasattr(torch, "accelerator"):
            self._swap(torch.accelerator, "synchronize", _counted)

    def _swap(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        real = vars(owner).get(name, _missing)
        if real is not _missing:
            ours = wrap(real)
            setattr(owner, name, ours)
            self._swapped.append((owner, name, real, ours))

    def remove(self) -> None:
        """Put everything back."""
        while self._swapped:
            owner, name, real, ours = self._swapped.pop()
            if vars(owner).get(name) is ours:
                setattr(owner, name, real)


def _numbered(print_tensor: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(print_tensor)
    def numbered(*args: Any, **kwargs: Any) -> str:
        __tracebackhide__ = True
        before, attribute.here.serial = attribute.here.serial, next(_serials)
        try:
            return print_tensor(*args, **kwargs)
        finally:
            attribute.here.serial = before

    return numbered


def _counted(synchronize: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(synchronize)
    def counted(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if attribute.here.waiting:  # torch.accelerator's may call torch.cuda's
            return synchronize(*args, **kwargs)
        found = _where(*args, **kwargs)
        attribute.here.waiting = True
        start = perf_counter()
        try:
            return synchronize(*args, **kwargs)
        finally:
            attribute.here.waiting = False
            attribute.add(found, 0, perf_counter() - start, True)

    return counted


def _where(*args: Any, **kwargs: Any) -> Any:
    thing = next(iter((*args, *kwargs.values())), None)
    device = getattr(thing, "device", thing)
    try:
        index = torch.cuda._utils._get_device_index(device, optional=True)
    except (ValueError, RuntimeError, AttributeError):
        return []
    return attribute.synchronising(index)


def settle(index: int) -> None:
    """Wait for what GPU `index` was given, as the operator that follows will.

    It would hold Python's lock while it waits, because it is called from here; this does not.
    Untested on a real GPU.
    """
    if torch.cuda.get_sync_debug_mode() or torch.cuda.is_current_stream_capturing():
        return
    torch._C._CudaStreamBase.synchronize(torch.cuda.current_stream(index))
