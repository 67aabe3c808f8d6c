"""The inner mode of a dry run: what the operators of tensors without data allocate and copy.

Guarantees: what torch says depends on data ends the run.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpumagic.dryrun.composites import Composites
from gpumagic.dryrun.fake_shapes import own_shapes
from gpumagic.dryrun.held_memory import Ledger
from gpumagic.dryrun.transfers import Transfers
from gpumagic.dryrun.unknown import Stopped

_DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_STAND_IN = (UnsupportedOperatorException, UnsupportedFakeTensorException)
_READS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Clock:
    """Ends a run that takes too long, and says how far it is.

    Parameters
    ----------
    limit : float
        Seconds.
    progress : callable or None
        Called with the seconds and the number of operators so far, once a second.
    """

    def __init__(self, limit: float, progress: Callable[[float, int], object] | None) -> None:
        self.started = time.perf_counter()
        self.operators = 0
        self._limit, self._progress = limit, progress
        self._next = self.started + 2

    @property
    def elapsed(self) -> float:
        """Seconds so far."""
        return time.perf_counter() - self.started

    def tick(self) -> None:
        self.operators += 1
        now = time.perf_counter()
        if now >= self._next and self._progress is not None:
            self._next = now + 1
            self._progress(now - self.started, self.operators)
        if now - self.started > self._limit:
            raise Stopped(f"the time limit of {self._limit:g} s, after {self.operators} operators")


class Operators(TorchDispatchMode):
    """Counts what operators allocate and copy."""

    def __init__(self, ledger: Ledger, transfers: Transfers, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._transfers, self._clock = ledger, transfers, clock
        self._composites = Composites(lambda: ledger.made)

    def install(self, stack: ExitStack) -> None:
        """Come into force until `stack` closes."""
        self._composites.install(stack)
        stack.enter_context(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._clock.tick()
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        with torch._C.DisableTorchFunction():
            parts = self._composites.taken_apart(func, name, args)
            if parts is not None:
                with self:
                    return parts(*args, **kwargs)
            self._before(name, args)
            replaced = self._composites.replaced(func, name, args, self._ledger.age)
            try:
                out = (own_shapes(func, name) or func)(*args, **kwargs)
            except _DEPENDS:
                raise Stopped(f"{readable(name)} depends on data") from None
            except _NO_STAND_IN as error:
                first = str(error).strip().splitlines()[:1]
                raise Stopped(f"{readable(name)} has no dry run ({''.join(first)})") from None
            except RuntimeError as error:
                if "found two different devices" in str(error):
                    raise RuntimeError(_mismatch(str(error))) from None
                if type(error) is not RuntimeError and "same device" in str(error):
                    raise RuntimeError(str(error)) from None  # a kind of torch's own
                raise
            if name == "_to_copy" and isinstance(out, Tensor):
                self._note("to", args[0], out)
            for tensor in tree_leaves(out):
                if isinstance(tensor, FakeTensor):
                    self._ledger.add(tensor, replaced)
        return out

    def _before(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "copy_":
            self._note("copy_", args[1], args[0])
        elif name in _READS and args[0].device.type != "cpu":
            for index in tree_leaves(args[1]):
                if isinstance(index, Tensor) and index.device.type == "cpu":
                    self._transfers.note("copy", name, "cpu", str(args[0].device), index.nbytes)

    def _note(self, name: str, source: Tensor, target: Tensor) -> None:
        if source.device != target.device:
            self._transfers.note(
                "copy", name, str(source.device), str(target.device), source.nbytes
            )


def readable(name: str) -> str:
    """An operator as people call it."""
    return {
        "_local_scalar_dense": "the value of a tensor",
        "index": "an index of booleans",
        "_unique2": "unique",
    }.get(name, name)


def _mismatch(text: str) -> str:
    # torch before 2.13 words it for its own developers.
    one, other = text.rsplit("devices ", 1)[1].split(", ")[:2]
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other.rstrip('!')}!"
    )
