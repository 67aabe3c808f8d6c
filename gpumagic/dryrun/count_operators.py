"""Count the memory that operators allocate and the copies that they make, in a dry run.

Copies between devices are counted by line, without times. Composite operators are decomposed as on
CUDA. Fakes (tensors without data) have wrong sizes for some results, such as reduced losses. The
real size is counted. An operator that must read data ends the dry run, unless results are guessed.
"""

import re
import sys
from collections.abc import Callable
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
import torch._meta_registrations
from torch import Tensor
from torch._subclasses import fake_tensor as fake
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpumagic.dryrun.fakes import Stopped, host_value, suspended
from gpumagic.dryrun.held_memory import HeldMemory
from gpumagic.faults import first_line
from gpumagic.ledger.attribute import count_for
from gpumagic.ledger.copy_kernels import INDEXING
from gpumagic.ledger.entry import Count, Ledger, locate, merged
from gpumagic.usercode.files import in_cell
from gpumagic.virtual.checks import INDEX, LENGTHS, SAME, TAKEN_FROM_CPU
from gpumagic.virtual.networks import added
from gpumagic.virtual.scratch import IN_PARTS, RULES, temporary_bytes

C: Any = torch._C
aten: Any = torch.ops.aten
_Function = Callable[..., Any]
_DEVICE: Any = torch.ops.prim.device.default
_BETWEEN = (__package__, "torch._dynamo", "torch._compile", "torch._subclasses", "torch.utils._")
# Matches the fakes' error for several devices. `_run` raises the error of torch's kernels instead.
_DEVICES = re.compile(r"found (?:two different|at least two) devices,? (\S+?)(?:,| and) (\S+?)!?$")
_READABLE = {
    "_local_scalar_dense": "the value of a tensor",
    "index": "an index of booleans",
    "_unique2": "unique",
    "_to_copy": "to()",
}


class Crossings:
    """Count the copies and waits that operators would make in a real run."""

    def __init__(self) -> None:
        self.counts: dict[tuple[Any, ...], Count] = {}

    def note(
        self, copy: bool, operator: str, source: str, destination: str, nbytes: int, how: Any = None
    ) -> None:
        """Count a copy, or a wait if not `copy`, at the user's line. `how` becomes `Entry.via`."""
        if source == destination or "meta" in (source, destination) or (copy and not nbytes):
            return
        inner = _caller(sys._getframe(1))
        user, found = locate(inner)
        how = found if how is None else how
        at = (None, 0) if user is None else in_cell(user)
        key = (copy, operator, source, destination, how, at)
        if key not in self.counts:
            kind = "copy" if copy else "wait"
            self.counts[key] = count_for(kind, operator, source, destination, how, user, inner)
        self.counts[key].add(nbytes, None)

    def ledger(self, virtual: bool) -> Ledger:
        return Ledger(merged(c.entry() for c in self.counts.values()), virtual, predicted=True)


class Operators(TorchDispatchMode):
    """Count operators, the memory that they allocate, and the copies that they make."""

    def __init__(self, held: HeldMemory, crossings: Crossings, guesses: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self._guesses = 0, guesses
        self.backward = False  # whether a backward pass has run
        self._held, self._crossings = held, crossings
        self._at_node: tuple[str, int] | None = None  # the running autograd node's name and number
        self._began = 0  # number of storages created before the running node began

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # answer autograd's most frequent call fast
        self.count += 1
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        with C.DisableTorchFunction():
            if (parts := self._parts(func, name, args)) is not None:
                with self:
                    return parts(*args, **(kwargs or {}))
            return self._one(func, name, args, kwargs or {})

    def _one(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator without decomposition; count the operator's copies and memory."""
        self._before(func, name, args)
        replaced = self._replaced(func, name, args)
        out = self._run(func, name, args, kwargs)
        if name == "_to_copy" and isinstance(out, Tensor):
            self._note(args[0], out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self._held.add(tensor, replaced)
                whole = tensor.dtype == torch.long and tensor.device.type == "cpu"
                if self._guesses and name in _ITEMS and whole and tensor.numel() == 1:
                    with suspended():  # guess 1; torch then computes with this constant
                        tensor.constant = torch.ones(tensor.shape, dtype=torch.long)
        if (rule := RULES.get(name)) and isinstance(args[0], Tensor) and args[0].is_cuda:
            device = args[0].device
            self._held.pass_through(str(device), temporary_bytes(rule, device, args, out))
        return out

    def _run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            if _is_unchecked(func):
                _check_devices(func, args)
            return (_replacement(func, name) or func)(*args, **kwargs)
        except (fake.DataDependentOutputException, fake.DynamicOutputShapeException):
            value = host_value(_caller(sys._getframe(1)))
            if value is not None and name == "_local_scalar_dense":
                return value if args[0].is_floating_point() else int(value)
            if self._guesses and (guess := _GUESSES.get(name)):
                return guess(func, *args, **kwargs)
            raise Stopped(f"{_READABLE.get(name, name)} depends on data") from None
        except (fake.UnsupportedOperatorException, fake.UnsupportedFakeTensorException) as error:
            raise Stopped(_unsupported(name, (args, kwargs), error)) from None
        except RuntimeError as error:
            if found := _DEVICES.search(str(error)):
                devices = " and ".join(found.groups())
                raise RuntimeError(f"{SAME} found at least two devices, {devices}!") from None
            raise

    def _before(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        if getattr(func, "namespace", None) in ("c10d", "_c10d_functional", "_dtensor"):
            raise Stopped(f"{name.strip('_')} in a process group: a dry run sends nothing")
        if name == "copy_":
            self._note(args[1], args[0])
        elif name == "_pack_padded_sequence" and args[1].device.type != "cpu":
            raise RuntimeError(LENGTHS.format(args[1].device))
        elif name in INDEXING:
            home = args[0].device
            for index in tree_leaves(args[1]):
                if isinstance(index, Tensor) and index.device != home:
                    if index.device.type != "cpu":  # fakes allow this index; torch does not
                        raise RuntimeError(INDEX.format(home))
                    self._crossings.note(True, name, "cpu", str(home), index.nbytes)

    def _note(self, source: Any, target: Tensor) -> None:
        # In torch.func, the source may be a number.
        if isinstance(source, Tensor):  # `Crossings` skips copies within a device
            devices = str(source.device), str(target.device)
            self._crossings.note(True, "copy_", *devices, source.nbytes)

    def _parts(self, func: Any, name: str, args: Any) -> _Function | None:
        """Return a function that decomposes an operator; None if the operator is run whole."""
        if name in IN_PARTS:  # calling a missing kernel would end the process
            explicit = next((key for key in _EXPLICIT if _has_kernel(func.name(), key)), None)
            return None if explicit is None else partial(func._op_dk, explicit)
        of_aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        if not (of_aten and _has_kernel(func.name(), _COMPOSITE)):
            return None
        on_cuda = _has_kernel(func.name(), "CUDA")
        if on_cuda and name in _NETWORKS and args[0].device.type == "cuda":
            return partial(func.redispatch, C.DispatchKeySet(C.DispatchKey.CUDA))
        whole = on_cuda or _has_kernel(func.name(), "CPU")
        return None if whole else partial(func._op_dk, _COMPOSITE)

    def _replaced(self, func: Any, name: str, args: Any) -> tuple[Tensor, bool] | None:
        """Return the argument whose memory a real run would reuse, and whether this is certain."""
        number = self._enter_node()
        # In this mode, some C++ code of torch allocates a result instead of writing in place.
        first: Any = next(iter(args), None)
        if number is None or not isinstance(first, Tensor) or first.layout is not torch.strided:
            return None
        overload, of_node = f"{name}.{func._overloadname}", self._held.age(first) > self._began
        for nodes, names, certain in _IN_PLACE if of_node else ():
            if {name, overload} & names and nodes.match(number[0]):
                return first, certain
        # To sum a tensor's gradients, the engine adds to the first gradient, which an earlier node
        # made (`of_node` is False). If that gradient is a view or expanded, the sum is allocated.
        if overload != "add.Tensor" or of_node or torch.is_grad_enabled() or first._is_view():
            return None
        return (first, False) if first.nbytes == first.untyped_storage().nbytes() else None

    def _enter_node(self) -> tuple[str, int] | None:
        """Return the running autograd node's name and number, or None. Record the node's start."""
        node = C._current_autograd_node()
        # Store the name and the number, because the node itself would keep tensors alive.
        number = None if node is None else (node.name(), node._sequence_nr())
        if number != self._at_node:
            self._at_node, self._began = number, self._held.made
            self.backward |= number is not None
        return number


_WRITES = ("scatter", "scatter_add", "index_add", "index_fill", "index_put", "_unsafe_index_put")
_SUMS = ("add.Tensor", "sub.Tensor", "mul.Tensor")
# Autograd nodes, and the operators that write into a tensor that the same node made. True means
# that the memory is reused for certain, even if the node still refers to the old tensor.
_IN_PLACE: tuple[tuple[re.Pattern[str], frozenset[str], bool], ...] = (
    (re.compile(r".*Backward\d"), frozenset((*_WRITES, "put", "masked_fill")), False),
    (re.compile(r"(Max|Min|Median|Nanmedian)Backward\d"), frozenset(("logical_and",)), True),
    (re.compile(r"BinaryCrossEntropyWithLogitsBackward\d"), frozenset(_SUMS), True),
)
_has_kernel = C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE = C.DispatchKey.CompositeImplicitAutograd
_EXPLICIT = (
    C.DispatchKey.CompositeExplicitAutograd,
    C.DispatchKey.CompositeExplicitAutogradNonFunctional,
)
# Composite operators for which virtual GPUs register CUDA kernels.
_NETWORKS = frozenset(
    ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "scaled_dot_product_attention")
)
_ITEMS = {"select", "unbind", "randint"}  # operators whose result may be read as a number


def _index(func: Any, tensor: Any, indices: Any) -> Any:
    """Index a tensor as if masks selected every element."""
    found: list[Any] = []
    for each in indices:
        if getattr(each, "dtype", None) in (torch.bool, torch.uint8):
            found += [each.new_zeros(each.numel(), dtype=torch.long)] * each.dim()
        else:
            found.append(each)
    return func(tensor, found)


# Guessed results of operators that depend on data, as if every element were selected.
_GUESSES: dict[str, Callable[..., Any]] = {
    # torch itself reads a boolean only to check for errors. False means that there is no error.
    "_local_scalar_dense": lambda func, t: 1.0 if t.is_floating_point() else t.dtype != torch.bool,
    "index": _index,
    "nonzero": lambda func, t: t.new_zeros((t.numel(), t.dim()), dtype=torch.long),
    "masked_select": lambda func, t, mask: t.new_zeros(t.numel()),
    "bincount": lambda func, t, weights=None, minlength=0: t.new_zeros(max(minlength, 1)).long(),
}


@cache
def _is_unchecked(func: Any) -> bool:
    """Whether `_check_devices` must check an operator: neither fakes nor a replacement do."""
    of_aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
    if not of_aten or (name := func.overloadpacket.__name__) in {*INDEXING, "_foreach_copy_"}:
        return False  # these operators accept tensors on several devices
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags}
    return name in {*_RESULTS, "convolution"} or bool(depends) or not func._schema.returns


def _check_devices(func: Any, args: tuple[Any, ...]) -> None:
    """Raise an error if an operator's tensors are on different devices, as the kernel would."""
    named = zip(func._schema.arguments, args, strict=False)
    given = [each for argument, each in named if argument.name not in TAKEN_FROM_CPU]
    lists = [each for each in given if isinstance(each, (list, tuple)) and each]
    rows = zip(*lists, strict=False) if not func._schema.returns and lists else [given]
    for row in rows:  # an operator on lists combines the tensors at the same position
        if any(isinstance(each, FakeTensor) for each in row):
            FakeTensor._find_common_device(func, row)


def _unsupported(name: str, given: Any, error: Exception) -> str:
    tensors = (t for t in tree_leaves(given) if isinstance(t, Tensor))
    odd = next((t for t in tensors if t.layout is not torch.strided), None)
    why = f"({first_line(error)})" if odd is None else f"of a tensor of {odd.layout}"
    return f"a dry run cannot follow {_READABLE.get(name, name)} {why}"


def _caller(frame: FrameType | None) -> FrameType | None:
    """Return the frame that called the operator, skipping this package and torch's modes."""
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _replacement(func: Any, name: str) -> _Function | None:
    """Return a replacement for `func`; None if `func` itself gives the right result for fakes."""
    if (make := _RESULTS.get(name)) is not None:
        return lambda *args, **kwargs: make(**_bound(func, args, kwargs))
    fused = name.startswith("_fused_") and not func._schema.returns
    return (lambda *args, **kwargs: None) if fused else None


def _bound(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return given | dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs


def _layer(
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
    """Return a loss whose storage has room for all unreduced losses, as in torch."""
    losses = torch.empty(
        torch.broadcast_shapes(self.shape, target.shape),
        dtype=torch.result_type(self, target),
        device=self.device,
    )
    return losses.as_strided((), ()) if reduction else losses


def _log_sigmoid(self: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """Return the result and a buffer, which is empty unless the CPU's kernel is used."""
    on_host = torch._meta_registrations.device_hint(self) == "cpu"
    return torch.empty_like(self), torch.empty_like(self) if on_host else self.new_empty(0)


_RESULTS: dict[str, _Function] = {
    "_transformer_encoder_layer_fwd": lambda src, **_: torch.empty_like(src),
    "_native_multi_head_attention": _layer,
    **dict.fromkeys(("binary_cross_entropy", "soft_margin_loss"), _loss),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss"), _loss),
    "log_sigmoid_forward": _log_sigmoid,
    "record_stream": lambda **_: None,
}


def attend_as_cuda() -> torch.library.Library:
    """Make attention allocate as on CUDA, while the returned library is alive."""
    # torch's own function may query the driver, which a forked child must not do.
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):  # inference mode skips AutogradCUDA
        library.impl("scaled_dot_product_attention", _attention, key, allow_override=True)
    return library


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Choose the attention kernel as torch's sdp_utils.cpp does on CUDA, and call it."""
    given, mask = (query, key, value), added(attn_mask, query.dtype)
    alike = query.dim() == 4 and query.dtype == key.dtype == value.dtype
    groups = enable_gqa and query.shape[-3] != key.shape[-3]
    known = query.dtype in (torch.float16, torch.bfloat16, torch.float32)
    if groups or not (alike and known and torch.backends.cuda.mem_efficient_sdp_enabled()):
        return aten._scaled_dot_product_attention_math(
            *given, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if mask is not None:
        mask = mask.expand(*query.shape[:-1], key.shape[-2])
    # In half precision, torch may choose a different kernel, which allocates the same memory.
    learns = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return aten._scaled_dot_product_efficient_attention(
        *given, mask, learns, dropout_p, is_causal, scale=scale
    )[0]
