"""Count what operators allocate and copy in a dry run: its inner mode.

Copies between devices are recorded as the ledger records them, so the table and the advice are
those of a real run, without times. Where torch's fake result has another size in memory than the
real one (sparse tensors, chosen algorithms, order of channels), the real size is used. Guarantees:
an operator whose result depends on data ends the dry run.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gpumagic.dryrun.composites import Composites
from gpumagic.dryrun.fakes import Stopped, host_value, suspended
from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.faults import first_line
from gpumagic.ledger.attribute import count_for
from gpumagic.ledger.entry import Count, Ledger, locate, merged
from gpumagic.usercode.files import in_cell
from gpumagic.virtual.scratch import rule_of, temporary_bytes

aten: Any = torch.ops.aten


def own_shapes(func: Any, name: str, args: Any) -> Callable[..., Any] | None:
    """Return what runs in place of `func`; None if torch's own fake is right."""
    make = _OWN.get(name)
    if make is not None:
        return lambda *args, **kwargs: make(**_bound(func, args, kwargs))
    if name in ("convolution", "convolution_backward") and _on_host(args[0]):
        return lambda *args, **kwargs: _as_of_the_host(func, args, kwargs)
    if name == "_fused_sdp_choice":
        return lambda *args, **kwargs: _chosen(func, args, kwargs)
    # Fused optimizers write into what they are given and return nothing.
    fused = name.startswith("_fused_") and not func._schema.returns
    return (lambda *args, **kwargs: None) if fused else None


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    names = (a.name for a in func._schema.arguments)
    return given | dict(zip(names, args, strict=False)) | kwargs


def _chosen(func: Any, args: Any, kwargs: Any) -> Any:
    """Return attention's algorithm; for tensors without data torch names only the slow one."""
    if args[0].device.type != "cpu":
        return func(*args, **kwargs)
    with suspended():
        return func(*tree_map_only(Tensor, _empty, args), **tree_map_only(Tensor, _empty, kwargs))


def _empty(tensor: Tensor) -> Tensor:
    new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return new.requires_grad_() if tensor.requires_grad else new


def _attention(
    query: Tensor,
    key: Tensor,
    num_head: int,
    need_weights: bool,
    average_attn_weights: bool,
    **_: Any,
) -> Any:
    batch, length, _width = query.shape
    heads = () if average_attn_weights else (num_head,)
    shape = (batch, *heads, length, key.shape[1])
    return torch.empty_like(query), query.new_empty(shape if need_weights else 0)


def _loss(self: Tensor, target: Tensor, reduction: int = 1, **_: Any) -> Tensor:
    """Count a reduced loss with the memory of all the losses, which it keeps."""
    losses = torch.empty(
        torch.broadcast_shapes(self.shape, target.shape),
        dtype=torch.result_type(self, target),
        device=self.device,
    )
    return losses.as_strided((), ()) if reduction else losses


def _on_host(tensor: Tensor) -> bool:
    """Whether the CPU's kernels run, as they do on virtual GPUs."""
    return bool(torch._meta_registrations.device_hint(tensor) == "cpu")


def _as_of_the_host(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the CPU kernel's result, whose order of channels may differ from CUDA's."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
    device = given[0].fake_device
    for tensor in given:
        tensor.fake_device = torch.device("cpu")
    made = []
    try:
        out = func(*args, **kwargs)
        made = [x for x in tree_leaves(out) if isinstance(x, FakeTensor)]
    finally:
        for tensor in (*given, *made):
            tensor.fake_device = device
    return out


_OWN: dict[str, Callable[..., Any]] = {
    "_transformer_encoder_layer_fwd": lambda src, **_: torch.empty_like(src),
    "_native_multi_head_attention": _attention,
    **dict.fromkeys(("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss"), lambda **_: False),
    **dict.fromkeys(
        ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss"), _loss
    ),
    "record_stream": lambda **_: None,
    **dict.fromkeys(
        ("multi_margin_loss_backward", "multilabel_margin_loss_backward"),
        lambda self, **_: torch.empty_like(self),
    ),
}


_DEPENDS = (DataDependentOutputException, DynamicOutputShapeException)
_NO_STAND_IN = (UnsupportedOperatorException, UnsupportedFakeTensorException)
_DEVICE: Any = torch.ops.prim.device.default
_BETWEEN = (__package__, "torch._dynamo", "torch._compile", "torch._subclasses", "torch.utils._")
_COLLECTIVES = ("c10d", "_c10d_functional", "_dtensor")
_READS = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}


class Crossings:
    """Count copies and waits as a watch does, from what the fakes' operators would do."""

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
            kind = "copy" if copy else "wait"
            count = count_for(kind, operator, source, destination, how, user, inner)
            self._counts[key] = count
        count.count += 1
        count.calls += 1
        count.nbytes += nbytes

    def ledger(self, virtual: bool) -> Ledger:
        """What was counted."""
        entries = (replace(count.entry(), seconds=None) for count in self._counts.values())
        return Ledger(merged(entries), virtual, predicted=True)


class Operators(TorchDispatchMode):
    """Count operators, and what they allocate and copy."""

    def __init__(self, held: HeldMemory, crossings: Crossings) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._held, self._crossings = held, crossings
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
            self._before(func, name, args)
            replaced = self._composites.replaced(func, name, args, self._held.age)
            out = self._run(func, name, args, kwargs)
            if name == "_to_copy" and isinstance(out, Tensor):
                self._note(args[0], out)
            for tensor in tree_leaves(out):
                if isinstance(tensor, FakeTensor):
                    self._held.add(tensor, replaced)
            if (rule := rule_of(name)) and isinstance(args[0], Tensor) and args[0].is_cuda:
                device = args[0].device
                self._held.pass_through(str(device), temporary_bytes(rule, device, args, out))
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

    def _before(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        if getattr(func, "namespace", None) in _COLLECTIVES:
            raise Stopped(f"{name.strip('_')} in a process group: a dry run sends nothing")
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
    """Return the frame that would call the operator in a real run, without the modes' own."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame
