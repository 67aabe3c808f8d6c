"""Placement: while it holds, new tensors and modules are made on one device.

Guarantees: operators that make nothing new cost what they cost without it; an explicit `device=`
wins, so does a `with torch.device(...)` inside; other threads and other asyncio tasks do not see
it; leaving it restores every name and the current CUDA device, whatever happened in between.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C import _len_torch_function_stack  # the count that torch.utils._device itself uses
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

P = ParamSpec("P")
R = TypeVar("R")


class Placement:
    """One device in force, in the context (thread or asyncio task) that entered it.

    Attributes
    ----------
    device : torch.device or None
        None once it was left: a task that outlives its cell must not go on placing.
    direct : torch.device or None
        The same, but None too while `overruled` might say yes: what the hot path looks at.
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
        self.outer = _current.get()
        self.modes = _len_torch_function_stack()
        self.owner: object = None
        self.previous_index: int | None = None

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


def placement() -> Placement | None:
    """The placement in force here, or None."""
    found = _current.get()
    while found is not None and found.device is None:
        found = found.outer
    return found


def enter(
    device: torch.device, *, batches: bool = True, namespace: dict[str, Any] | None = None
) -> Placement:
    """Begin a placement. `leave` must be called with what this returns.

    Parameters
    ----------
    device : torch.device
        With an index where its kind has several.
    batches : bool
        Bring the batches of a `DataLoader` there too.
    namespace : dict, optional
        Global variables of the code that will run: names that it imported from torch earlier
        (``from torch import zeros``) are placed too.
    """
    from gpumagic.tensors import factories

    place = Placement(device, batches)
    if device.type == "cuda":
        # Bare "cuda", torch.cuda.current_device() and libraries that use them mean this GPU.
        previous = torch.cuda.current_device()
        torch.cuda.set_device(device)
        place.previous_index = previous
    try:
        factories.install(namespace)
    except BaseException:
        _restore_current_device(place)
        raise
    _current.set(place)
    return place


def leave(place: Placement) -> None:
    """End a placement, from any context; to call it twice does no harm."""
    from gpumagic.tensors import factories

    if place.device is None:
        return
    place.device = place.direct = None
    if _current.get() is place:
        _current.set(place.outer)
    try:
        factories.remove()
    finally:
        _restore_current_device(place)


def _restore_current_device(place: Placement) -> None:
    if place.previous_index is not None:
        # A device that failed or was taken away meanwhile must not keep the rest from being undone.
        with suppress(RuntimeError, AssertionError):
            torch.cuda.set_device(place.previous_index)


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


class on:
    """Make new tensors and modules on a device: ``with gpumagic.on(1):`` or ``@gpumagic.on(1)``.

    Factories (``torch.zeros``, ``torch.tensor`` …), ``torch.Tensor(...)``, ``torch.from_numpy``,
    ``torch.load``, new modules, and the batches of a `DataLoader` land there; a bare ``"cuda"``
    means that GPU. An explicit ``device=`` wins. What exists is not moved: see `gpumagic.move`.

    Parameters
    ----------
    where : str, int or torch.device
        Any spelling of one device: ``1``, ``"cuda:1"``, ``"cpu"``, ``"free"``, ``"1?"`` …
    batches : bool, default True
        Whether batches of a `DataLoader` are brought there.

    Raises
    ------
    GpuError
        There is no such device.

    Examples
    --------
    >>> with gpumagic.on(1) as device:
    ...     X = torch.ones(2, 3)
    >>> X.device
    device(type='cuda', index=1)

    >>> @gpumagic.on("free")
    ... def train(): ...
    """

    def __init__(self, where: object, *, batches: bool = True) -> None:
        from gpumagic.tensors.devices import torch_device

        self.device = torch_device(where)
        self.batches = batches
        self._entered: list[Placement] = []

    def __enter__(self) -> torch.device:
        caller = inspect.currentframe()
        space = caller.f_back.f_globals if caller and caller.f_back else None
        place = self._enter(space)
        place.owner = self
        self._entered.append(place)
        return self.device

    def _enter(self, namespace: dict[str, Any] | None) -> Placement:
        return enter(self.device, batches=self.batches, namespace=namespace)

    def __exit__(self, *exc: object) -> None:
        # One object may be entered again, by several threads and tasks: end this context's own.
        place = _current.get()
        while place is not None and (place.owner is not self or place.device is None):
            place = place.outer
        place = place or self._entered[-1]
        self._entered.remove(place)
        leave(place)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        space = getattr(inspect.unwrap(function), "__globals__", None)
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                place = self._enter(space)
                try:
                    return await function(*args, **kwargs)
                finally:
                    leave(place)

            return cast(Callable[P, R], run_async)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"@gpumagic.on cannot wrap the generator {function.__name__}(): its caller would "
                "be placed too; use `with gpumagic.on(...)` between its yields"
            )

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            place = self._enter(space)
            try:
                return function(*args, **kwargs)
            finally:
                leave(place)

        return run
