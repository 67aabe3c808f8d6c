"""Put kernels in front of torch's that run what was there, and count it.

Each calls the replaced kernel exactly once, with what it was given, and returns what that returns;
while nothing watches it does nothing else, and after some thousand such calls `idle` is told.
"""

import itertools
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from gpumagic.errors import CrossDeviceWarning
from gpumagic.faults import keep, kept
from gpumagic.ledger import attribute
from gpumagic.ledger.attribute import HOST, add, counts, here
from gpumagic.ledger.copy_timer import TIMER
from gpumagic.ledger.counts import Count
from gpumagic.usercode.files import leave_out_ours

Kernel = Callable[..., Any]
After = Callable[[float], None]
"""Counts a call that has succeeded and took so many seconds."""

_DOING = "counting a copy or a wait"
_BOOL = torch.bool
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_modes = torch._C._len_torch_function_stack
_without_overrides = torch._C.DisableTorchFunction
SIZE = 8  # bytes of a result's size, which operators of unknown shape read
# What a copy copies, and from what memory, is looked at for the first at a line, then now and then.
_FIRST, _EVERY = 8, 64
# To take the kernels out and put them back costs what so many calls cost that nobody counts.
_MOST_PASSED = 4096
passed = itertools.count()
idle: Callable[[], None] = lambda: None  # noqa: E731  set by those who put the kernels there


def counted(
    base: Kernel, before: Callable[..., After | None], tensors: int = 0, *, waits: bool = False
) -> Kernel:
    """What stands in front of `base`: it runs that, and counts the call where something watches."""
    # `before` is given the same arguments and may raise `CrossDeviceWarning`; what it returns is
    # called afterwards. With `waits`, all waits within `base` are one of the user's.
    asked = _asked(before, tensors)

    # As `unseen` has it, without another call: it is the way of all that could be watched.
    def kernel(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            if not attribute.running:
                if next(passed) >= _MOST_PASSED:
                    _take_out()
                return base(*args, **kwargs)
            if (waits and here.waiting) or (after := asked(args, kwargs)) is None:
                return base(*args, **kwargs)
            if waits:
                here.waiting = True
            try:
                start = perf_counter()
                result = base(*args, **kwargs)
                seconds = perf_counter() - start
            finally:
                if waits:
                    here.waiting = False
            try:
                after(seconds)
            except Exception as error:  # noqa: BLE001
                keep(_DOING, error)
            return result
        except BaseException as error:
            leave_out_ours(error)
            raise

    return kernel


def _asked(
    before: Callable[..., After | None], tensors: int
) -> Callable[[tuple[Any, ...], dict[str, Any]], After | None]:
    """`before`, of which no failure reaches the user."""

    # It looks at the first `tensors` arguments: where those are plain, nobody's overrides can be
    # asked by that.
    def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> After | None:
        __tracebackhide__ = True
        try:
            if (
                tensors
                and not _modes()
                and type(args[0]) in _PLAIN
                and (tensors == 1 or type(args[1]) in _PLAIN)
            ):
                return before(*args, **kwargs)
            with _without_overrides():
                return before(*args, **kwargs)
        except CrossDeviceWarning:
            raise
        except Exception as error:  # noqa: BLE001  a failure of ours is not the user's
            keep(_DOING, error)
            return None

    return asked


def _take_out() -> None:
    with kept("taking out the kernels that count"):
        idle()


def as_tensor(value: Any) -> Any:
    """C++ hands a "wrapped number" tensor to Python as a number: the same as a tensor again."""
    if isinstance(value, torch.Tensor):
        return value
    dtype = torch.float64 if type(value) is float else None  # as a wrapped number is
    with _without_overrides():
        return torch.tensor(value, dtype=dtype, device="cpu")


def copying(base: Kernel, virtual: bool) -> Kernel:
    """The kernel of `copy_` that stands in front of `base`."""

    def before(self: Any, src: Any, non_blocking: bool = False) -> After | None:
        __tracebackhide__ = True
        if type(src) not in _PLAIN:
            src = as_tensor(src)
        destination, source = self.get_device(), src.get_device()
        if source == destination or not (nbytes := src.nbytes):
            return None
        found = counts((True, "copy_", source, destination, non_blocking), src)
        if not found:
            return None
        host = self if destination == HOST else src
        blocking = not non_blocking and (source == HOST or destination == HOST)

        def after(seconds: float) -> None:
            add(found, nbytes, seconds, blocking)
            if (first := found[0].count) <= _FIRST or not first % _EVERY:
                _look(found, src, host)

        if virtual:
            return after
        return _on_real(found, after, destination if source == HOST else source)

    return counted(base, before, 2)


def _on_real(found: Sequence[Count], after: After, index: int) -> After:
    """What is to be called after a copy by GPU `index`, which its own stream times."""
    begun, copies = _begin(found, index), here.copies

    def after_on_real(seconds: float) -> None:
        # Where a dtype or strides change too, torch copies by way of a temporary: by `copy_`
        # again, which has counted itself.
        if here.copies == copies:
            here.copies += 1
            after(0.0)
            if begun is not None:
                TIMER.end(begun, found)

    return after_on_real


def _begin(found: Sequence[Count], index: int) -> Any:
    with kept("timing a copy"):  # a time is not worth the user's copy
        return TIMER.begin(index) if TIMER.wants(found[0].count) else None


def _look(found: Sequence[Count], src: Any, host: Any) -> None:
    with _without_overrides():
        for count in found:
            count.look_at(src, host)


def reading(base: Kernel) -> Kernel:
    """The kernel in front of the one by which `item` and its kin read an element."""

    def before(self: Any) -> After | None:
        __tracebackhide__ = True
        if here.waiting:  # some operators find the size of their result by `item` within
            return None
        found = counts((False, "item", self.get_device(), HOST, False), self)
        nbytes = self.element_size()
        return lambda seconds: add(found, nbytes, seconds, True)

    return counted(base, before, 1)


def waiting(base: Kernel, operator: str) -> Kernel:
    """The kernel in front of an operator that waits for the size of its result."""

    def before(self: Any, *args: Any, **kwargs: Any) -> After | None:
        __tracebackhide__ = True
        if kwargs.get("output_size") is not None:  # by which the shape is known
            return None
        found = counts((False, operator, self.get_device(), HOST, False), self)
        return lambda seconds: add(found, SIZE, seconds, True)

    return counted(base, before, waits=True)


def indexing(base: Kernel, operator: str) -> Kernel:
    """The kernel in front of a virtual GPU's indexing, which brings CPU indices by itself.

    A real GPU's calls `copy_` and `nonzero` for that, which are watched themselves.
    """

    def before(self: Any, indices: Any, *rest: Any) -> After | None:
        __tracebackhide__ = True
        brought, masked = [], False
        for index in indices:
            if index is not None:
                masked = masked or index.dtype is _BOOL
                if index.get_device() == HOST:
                    brought.append(index)
        if not brought and not masked:
            return None
        # Composite operators leave what is on several devices to one within, which counts it.
        if operator.startswith("index_put") and (brought or rest[0].get_device() == HOST):
            return None
        device = self.get_device()
        copied = [(t, counts((True, "index", HOST, device, False), t)) for t in brought]
        wait = (False, operator, device, HOST, False)
        waited = counts(wait, self) if masked else ()

        def after(seconds: float) -> None:
            each = seconds / (len(brought) + masked)
            for tensor, found in copied:
                add(found, tensor.nbytes, each, True)
                _look(found, tensor, tensor)
            add(waited, SIZE, each, True)

        return after

    return counted(base, before)
