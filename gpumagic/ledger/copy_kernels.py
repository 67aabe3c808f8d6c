"""The kernels that stand in front of torch's: run what was there, and count it.

Each calls the replaced kernel exactly once, with what it was given, and returns what that returns.
"""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from gpumagic.ledger.attribute import HOST, add, counts, here
from gpumagic.ledger.copy_time import CLOCK
from gpumagic.ledger.counts import Count

_BOOL = torch.bool
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_modes = torch._C._len_torch_function_stack
_without_overrides = torch._C.DisableTorchFunction
SIZE = 8  # bytes of a result's size, which operators of unknown shape read
# What a copy copies, and from what memory, is looked at for the first at a line, then now and then.
_FIRST, _EVERY = 8, 64


def _tensor(value: Any) -> Any:
    """C++ hands a "wrapped number" tensor to Python as a number; the operators want a tensor."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")


def copying(base: Callable[..., Any], virtual: bool) -> Callable[..., Any]:
    """The kernel of `copy_` that stands in front of `base`."""

    def copy_(self: Any, src: Any, non_blocking: bool = False, above: int = 2) -> Any:
        __tracebackhide__ = True
        if above == 2 and (_modes() or type(self) not in _PLAIN or type(src) not in _PLAIN):
            with _without_overrides():
                return copy_(self, _tensor(src), non_blocking, 3)
        try:
            destination, source = self.get_device(), src.get_device()
            nbytes = 0 if source == destination else src.nbytes
        except Exception:  # noqa: BLE001
            return base(self, src, non_blocking)
        if source == destination:
            return base(self, src, non_blocking)
        found = counts(True, "copy_", source, destination, non_blocking, src, above)
        if not found:
            return base(self, src, non_blocking)
        if not virtual:
            return _on_real(found, base, self, src, non_blocking)
        start = perf_counter()
        result = base(self, src, non_blocking)
        seconds = perf_counter() - start
        add(found, nbytes, seconds, not non_blocking and (source == HOST or destination == HOST))
        if (first := found[0].count) <= _FIRST or not first % _EVERY:
            _look(found, src, self if destination == HOST else src)
        return result

    return copy_


def _on_real(
    found: Sequence[Count],
    base: Callable[..., Any],
    self: Any,
    src: Any,
    non_blocking: bool,
) -> Any:
    __tracebackhide__ = True
    destination, source, before = self.get_device(), src.get_device(), here.copies
    begun = _begin(found, destination if source == HOST else source)
    result = base(self, src, non_blocking)
    # Where a dtype or strides change too, torch copies by way of a temporary: by `copy_` again,
    # which has counted itself.
    if here.copies == before and src.numel():
        here.copies += 1
        add(found, src.nbytes, 0.0, not non_blocking and HOST in (source, destination))
        _look(found, src, self if destination == HOST else src)
        if begun is not None:
            _end(found, begun)
    return result


def _begin(found: Sequence[Count], index: int) -> Any:
    try:
        return CLOCK.begin(index) if CLOCK.wants(found[0].count) else None
    except Exception:  # noqa: BLE001  a time is not worth the user's copy
        return None


def _end(found: Sequence[Count], begun: Any) -> None:
    try:
        CLOCK.end(begun, found)
    except Exception:  # noqa: BLE001
        return


def _look(found: Sequence[Count], src: Any, host: Any) -> None:
    try:
        for count in found:
            count.look_at(src, host)
    except Exception:  # noqa: BLE001
        return


Settle = Callable[[int], None] | None
"""Waits for a device without holding Python's lock, where that is needed."""


def reading(base: Callable[..., Any], settle: Settle) -> Callable[..., Any]:
    """The kernel in front of the one by which `item` and its kin read an element."""

    def read(self: Any, above: int = 2) -> Any:
        __tracebackhide__ = True
        # Some find the size of their result by `item` within: one wait of the user's.
        if here.waiting:
            return base(self)
        if above == 2 and (_modes() or type(self) not in _PLAIN):
            with _without_overrides():
                return read(self, 3)
        try:
            device, nbytes = self.get_device(), self.element_size()
        except Exception:  # noqa: BLE001
            return base(self)
        found = counts(False, "item", device, HOST, False, self, above)
        start = perf_counter()
        if settle is not None and found:
            settle(device)
        result = base(self)
        add(found, nbytes, perf_counter() - start, True)
        return result

    return read


def waiting(base: Callable[..., Any], operator: str, settle: Settle) -> Callable[..., Any]:
    """The kernel in front of an operator that waits for the size of its result."""

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if here.waiting or kwargs.get("output_size") is not None:  # by which the shape is known
            return base(self, *args, **kwargs)
        with _without_overrides():
            return watched(self, *args, **kwargs)

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            device = self.get_device()
        except Exception:  # noqa: BLE001
            return base(self, *args, **kwargs)
        found = counts(False, operator, device, HOST, False, self, 3)
        here.waiting = True
        try:
            start = perf_counter()
            if settle is not None and found:
                settle(device)
            result = base(self, *args, **kwargs)
            seconds = perf_counter() - start
        finally:
            here.waiting = False
        add(found, SIZE, seconds, True)
        return result

    return wait


def indexing(base: Callable[..., Any], operator: str) -> Callable[..., Any]:
    """The kernel in front of a virtual GPU's indexing, which brings CPU indices by itself.

    A real GPU's calls `copy_` and `nonzero` for that, which are watched themselves.
    """

    def index(self: Any, indices: Any, *rest: Any) -> Any:
        __tracebackhide__ = True
        if rest and type(rest[0]) not in _PLAIN:  # the values of an assignment
            rest = _tensor(rest[0]), *rest[1:]
        if not _modes():
            for t in indices:
                if t is not None and (
                    type(t) not in _PLAIN or t.get_device() == HOST or t.dtype is _BOOL
                ):
                    break
            else:
                return base(self, indices, *rest)
        with _without_overrides():
            return watched(self, indices, *rest)

    def watched(self: Any, indices: Any, *rest: Any) -> Any:
        __tracebackhide__ = True
        mask, brought = False, []
        for tensor in indices:
            if tensor is not None:
                if tensor.get_device() == HOST:
                    brought.append(tensor)
                mask = mask or tensor.dtype is _BOOL
        if not brought and not mask:
            return base(self, indices, *rest)
        device = self.get_device()
        copied = [counts(True, "index", HOST, device, False, t, 3) for t in brought]
        waited = counts(False, operator, device, HOST, False, self, 3) if mask else []
        start = perf_counter()
        result = base(self, indices, *rest)
        seconds = (perf_counter() - start) / (len(brought) + mask)
        for found, tensor in zip(copied, brought, strict=True):
            if found:
                add(found, tensor.nbytes, seconds, True)
                _look(found, tensor, tensor)
        add(waited, SIZE, seconds, True)
        return result

    return index
