"""Count what the operators of tensors without data allocate and copy: a dry run's inner mode.

What crosses between devices is recorded as the ledger does it, so table and advice are those of a
real run; times are not known. Guarantees: what torch says depends on data ends the run.
"""

import sys
from dataclasses import replace
from types import FrameType
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
from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.dryrun.own_shapes import own_shapes
from gpumagic.dryrun.unknown import Stopped, host_value
from gpumagic.dryrun.wire import Wire, with_value
from gpumagic.faults import first_line
from gpumagic.ledger.attribute import count_for
from gpumagic.ledger.entry import Count, Ledger, locate, merged
from gpumagic.usercode.lines import in_cell
from gpumagic.virtual.scratch import beside, taken

_DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_STAND_IN = (UnsupportedOperatorException, UnsupportedFakeTensorException)
_DEVICE: Any = torch.ops.prim.device.default
_BETWEEN = (__package__, "torch._dynamo", "torch._compile", "torch._subclasses", "torch.utils._")
_READS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Crossings:
    """Counts copies and waits as a watch does, from what the fakes' operators would do."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Any, ...], Count] = {}
        self.silent = False  # while that is moved which is reported by itself

    def note(
        self, copy: bool, operator: str, source: str, destination: str, nbytes: int, how: Any = None
    ) -> None:
        """Count a copy, or a wait of the host, that the running line would make, and `how`."""
        nothing = source == destination or "meta" in (source, destination)
        if self.silent or nothing or (copy and not nbytes):
            return
        inner = _caller(sys._getframe(1))
        user, found = locate(inner)
        how = found if how is None else how
        at = (None, 0) if user is None else in_cell(user)
        key = (copy, operator, source, destination, how, at)
        count = self._counts.get(key)
        if count is None:
            count = count_for(copy, operator, source, destination, how, user, inner)
            self._counts[key] = count
        count.count += 1
        count.calls += 1
        count.nbytes += nbytes

    def ledger(self, virtual: bool) -> Ledger:
        """What was counted."""
        entries = (replace(count.entry(), seconds=None) for count in self._counts.values())
        return Ledger(merged(entries), virtual)


class Operators(TorchDispatchMode):
    """Counts operators, and what they allocate and copy."""

    def __init__(self, held: HeldMemory, crossings: Crossings, wire: Wire) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._held, self._crossings, self._wire = held, crossings, wire
        self._composites = Composites(lambda: held.made)

    @property
    def backward(self) -> bool:
        """Whether a backward pass has run."""
        return self._composites.backward

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # what it is made of comes next
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it more often than for anything else
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
            collective = self._wire.takes(func)
            if collective:
                self._wire.note(func, name, args)
            out = self._run(func, name, args, kwargs)
            if collective:
                out = with_value(out, args[0])
            if name == "_to_copy" and isinstance(out, Tensor):
                self._note(args[0], out)
            for tensor in tree_leaves(out):
                if isinstance(tensor, FakeTensor):
                    self._held.add(tensor, replaced)
            if (rule := beside(name)) and isinstance(args[0], Tensor) and args[0].is_cuda:
                device = args[0].device
                self._held.pass_through(str(device), taken(rule, device, args, out))
        return out

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return (own_shapes(func, name, args) or func)(*args, **kwargs)
        except _DEPENDS:
            value = host_value(_caller(sys._getframe(1)))
            if value is not None and name == "_local_scalar_dense":
                return value if args[0].is_floating_point() else int(value)
            raise Stopped(f"{readable(name)} depends on data") from None
        except _NO_STAND_IN as error:
            odd = next((t for t in tree_leaves((args, kwargs)) if _is_sparse(t)), None)
            of = f" of a tensor of {odd.layout}" if odd is not None else ""
            first = "" if of else f" ({first_line(error)})"
            raise Stopped(f"{readable(name)}{of} has no dry run{first}") from None
        except RuntimeError as error:
            if "found two different devices" in str(error):
                raise RuntimeError(_mismatch(str(error))) from None
            if type(error) is not RuntimeError and "same device" in str(error):
                raise RuntimeError(str(error)) from None  # a kind of torch's own
            raise

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
        "_to_copy": "to()",
    }.get(name, name)


def _is_sparse(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is not torch.strided


def _mismatch(text: str) -> str:
    # torch before 2.13 words it for its own developers.
    one, other = text.rsplit("devices ", 1)[1].split(", ")[:2]
    return (
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{one} and {other.rstrip('!')}!"
    )


def _caller(frame: FrameType | None) -> FrameType | None:
    """What would call the operator in a real run, where no mode stands in between."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame
