"""Make new tensors, arrays and modules on one device while a placement holds.

Guarantees: operators that make nothing new cost nothing extra; an explicit `device=` wins, and so
does `with torch.device(...)` inside; other threads and asyncio tasks are not affected; on leaving,
every name and the current CUDA device are restored, whatever happened.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from gpumagic.frameworks.own_devices import native, needed_in
from gpumagic.usercode.files import unseen

P = ParamSpec("P")
R = TypeVar("R")


class _Entered(NamedTuple):
    """Record one entry of a `with`: its thread, torch's placement, and what ends it."""

    thread: int
    place: Any
    stack: ExitStack


class on:
    """Make new tensors and modules on a device: ``with gpumagic.on(1):`` or ``@gpumagic.on(1)``.

    Factories (``torch.zeros``, ``torch.tensor`` …), ``torch.Tensor(...)``, ``torch.from_numpy``,
    ``torch.load``, new modules, and the batches of a `DataLoader` land there; a bare ``"cuda"``
    means that GPU. An explicit ``device=`` wins. What exists is not moved: see `gpumagic.move`.
    Of JAX, TensorFlow and CuPy, where the caller's names are theirs, new arrays land there.

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
        self._needed = needed_in(sys._getframe(1).f_globals, "gpumagic.on")
        self._on = self._needed.find(where)
        self.device = native(self._needed, self._on)
        self.batches = batches
        self._entered: list[_Entered] = []

    def __enter__(self) -> Any:
        with ExitStack() as stack:
            place = self._enter(stack, sys._getframe(1).f_globals)
            self._entered.append(_Entered(threading.get_ident(), place, stack.pop_all()))
        return self.device

    def _enter(self, stack: ExitStack, namespace: dict[str, Any] | None) -> Any:
        """Place until a stack is closed; return torch's placement, if there is one."""
        for framework in self._needed.frameworks:
            held = framework.place(self._on, batches=self.batches, namespace=namespace)
            stack.enter_context(held)
        if not self._needed.torch:
            return None
        from gpumagic.placement.scope import in_force

        place = in_force.get()
        assert place is not None
        place.owner = self
        return place

    def _calling(self, function: Callable[..., Any]) -> ExitStack:
        with ExitStack() as stack:
            self._enter(stack, getattr(inspect.unwrap(function), "__globals__", None))
            return stack.pop_all()

    def __exit__(self, *exc: object) -> None:
        # One object may be entered again, by several threads and tasks: end this context's own.
        if not self._entered:
            raise RuntimeError("this placement was not entered")
        mine = [each for each in self._entered if each.thread == threading.get_ident()]
        if self._needed.torch:
            from gpumagic.placement.scope import enclosing

            place = next((p for p in enclosing() if p.owner is self), None)
            mine = [each for each in self._entered if each.place is place] or mine
        entered = (mine or self._entered)[-1]
        self._entered.remove(entered)
        entered.stack.close()

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
