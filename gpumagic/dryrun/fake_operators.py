"""Count what the operators of tensors without data allocate and copy: a dry run's inner mode.

Guarantees: what torch says depends on data ends the run.
"""

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
from gpumagic.dryrun.crossings import Crossings
from gpumagic.dryrun.fake_shapes import own_shapes
from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.dryrun.unknown import Stopped

_DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_STAND_IN = (UnsupportedOperatorException, UnsupportedFakeTensorException)
_READS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Operators(TorchDispatchMode):
    """Counts operators, and what they allocate and copy."""

    def __init__(self, held: HeldMemory, crossings: Crossings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._held, self._crossings = held, crossings
        self._composites = Composites(lambda: held.made)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        with torch._C.DisableTorchFunction():
            parts = self._composites.taken_apart(func, name, args)
            if parts is not None:
                with self:
                    return parts(*args, **kwargs)
            self._before(name, args)
            replaced = self._composites.replaced(func, name, args, self._held.age)
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
                self._note(args[0], out)
            for tensor in tree_leaves(out):
                if isinstance(tensor, FakeTensor):
                    self._held.add(tensor, replaced)
        return out

    def _before(self, name: str, args: tuple[Any, ...]) -> None:
        if name == "copy_":
            self._note(args[1], args[0])
        elif name in _READS and args[0].device.type != "cpu":
            for index in tree_leaves(args[1]):
                if isinstance(index, Tensor) and index.device.type == "cpu":
                    self._crossings.note(True, name, "cpu", str(args[0].device), index.nbytes)

    def _note(self, source: Tensor, target: Tensor) -> None:
        if source.device != target.device:
            nbytes = source.nbytes
            self._crossings.note(True, "copy_", str(source.device), str(target.device), nbytes)


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
