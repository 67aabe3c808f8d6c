"""Make new tensors and modules on one device, for as long as a placement holds.

Guarantees: operators that make nothing new cost what they cost without it; an explicit `device=`
wins, so does a `with torch.device(...)` inside; other threads and other asyncio tasks do not see
it; leaving it restores every name and the current CUDA device, whatever happened in between.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch

from gpumagic.placement.scope import Placement, enclosing
from gpumagic.placement.swap import enter, leave
from gpumagic.placement.torch_devices import torch_device
from gpumagic.usercode.unseen import unseen

P = ParamSpec("P")
R = TypeVar("R")


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
        self.device = torch_device(where)
        self.batches = batches
        self._entered: list[Placement] = []

    def __enter__(self) -> torch.device:
        caller = sys._getframe(1).f_globals
        place = enter(self.device, batches=self.batches, namespace=caller)
        place.owner = self
        self._entered.append(place)
        return self.device

    @contextmanager
    def _calling(self, function: Callable[..., Any]) -> Iterator[None]:
        names = getattr(inspect.unwrap(function), "__globals__", None)
        place = enter(self.device, batches=self.batches, namespace=names)
        try:
            yield
        finally:
            leave(place)

    def __exit__(self, *exc: object) -> None:
        # One object may be entered again, by several threads and tasks: end this context's own.
        if not self._entered:
            raise RuntimeError("this placement was not entered")
        place = next((p for p in enclosing() if p.owner is self), self._entered[-1])
        self._entered.remove(place)
        leave(place)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, (type, classmethod, staticmethod)):
            kind = "a class" if isinstance(function, type) else type(function).__name__
            raise TypeError(f"@gpumagic.on wraps functions and methods, not {kind}; put it below")
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def run_async(*args: Any, **kwargs: Any) -> Any:
                with self._calling(function):
                    return await function(*args, **kwargs)

            return cast(Callable[P, R], run_async)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"@gpumagic.on cannot wrap the generator {function.__name__}(): its caller would "
                "be placed too; use `with gpumagic.on(...)` between its yields"
            )

        @unseen
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._calling(function):
                return function(*args, **kwargs)

        return run
