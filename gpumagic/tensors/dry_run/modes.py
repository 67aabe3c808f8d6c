"""The inner modes of a dry run: tensors without data, and what their operators allocate and copy.

Guarantees: no byte is allocated on the device that a tensor names; what torch says depends on data
ends the run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.tensors.dry_run.ledger import Ledger
from gpumagic.tensors.dry_run.limits import Stopped
from gpumagic.tensors.dry_run.transfers import Transfers

_DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_STAND_IN = (UnsupportedOperatorException, UnsupportedFakeTensorException)
_READS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Fakes(FakeTensorMode):
    """torch's mode, on the CPU alone: no byte and no context on the device that a fake names."""

    @property
    def avoid_device_init(self) -> bool:
        return True

    def __deepcopy__(self, memo: object) -> "Fakes":
        return self  # else the copy of a module would bring a second mode


@contextmanager
def suspended() -> Iterator[None]:
    """Real tensors within: for what belongs to the process and not to the run."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._clock.tick()
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        with torch._C.DisableTorchFunction():
            self._before(name, args)
            try:
                if name == "_fused_sdp_choice" and args[0].device.type == "cpu":
                    return _chosen(func, args, kwargs)
                fused = _FUSED.get(name)
                out = func(*args, **kwargs) if fused is None else fused(args)
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
                    self._ledger.add(tensor)
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


def _chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """The algorithm of attention; of tensors without data torch says that there is but the slow."""
    with suspended():
        return func(*tree_map_only(Tensor, _empty, args), **tree_map_only(Tensor, _empty, kwargs))


def _empty(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return new.requires_grad_() if tensor.requires_grad else new


def _attention(args: Any) -> Any:
    query, heads, wants, average = args[0], args[4], args[10], args[11]
    batch, length, other = query.shape[0], query.shape[1], args[1].shape[1]
    shape = (batch, length, other) if average else (batch, heads, length, other)
    return torch.empty_like(query), query.new_empty(shape if wants else 0)


# Fused operators of inference, for which torch has no shapes: only their results are allocated.
_FUSED: dict[str, Callable[[Any], Any]] = {
    "_transformer_encoder_layer_fwd": lambda args: torch.empty_like(args[0]),
    "_native_multi_head_attention": _attention,
}


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
