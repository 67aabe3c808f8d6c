"""Split composite operators into the operators that torch would run on a GPU.

Under any mode torch's C++ copies into a new tensor where it otherwise reuses one that nobody else
has, so a dry run would hold both at once. Attention picks its algorithm as CUDA does: torch's C++
would ask the driver, which a forked child must not do, or take the CPU's way.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpumagic.virtual.networks import added
from gpumagic.virtual.scratch import IN_PARTS

C: Any = torch._C
aten: Any = torch.ops.aten
_has_kernel = C._dispatch_has_kernel_for_dispatch_key
_COMPOSITE = C.DispatchKey.CompositeImplicitAutograd
_CUDA = C.DispatchKeySet(C.DispatchKey.CUDA)
# They write their sums into a product that they have just made.
_IN_PLACE = ("linear", "_scaled_dot_product_attention_math")
# torch knows the shapes of those in parts, and not what they need on the way.
_EXPLICIT = (
    C.DispatchKey.CompositeExplicitAutograd,
    C.DispatchKey.CompositeExplicitAutogradNonFunctional,
)
_NODES = frozenset({"BinaryCrossEntropyWithLogitsBackward0"})
_SUMS = frozenset({"add", "sub", "mul"})
# With these a backward pass writes into the zeros that it has just made.
_WRITE = frozenset(
    (
        *("scatter", "scatter_add", "index_add", "index_fill"),
        *("index_put", "_unsafe_index_put", "put", "masked_fill"),
    )
)
# They share a gradient among equals, by a mask that they write into.
_SHARE = re.compile(r"(Max|Min|Median|Nanmedian)Backward\d")
_NODE_OF_TORCH = re.compile(r".*Backward\d+")
# Virtual GPUs have kernels of their own for them.
_NETWORKS = frozenset(
    ("lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell", "scaled_dot_product_attention")
)

Replaced = tuple[Any, bool] | None


class Composites:
    """Finds when a result takes the place of its operator's first argument."""

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made  # how many storages were so far; `age` in the same count
        self._simple: set[Any] = set()  # operators that are no composites
        self._within = 0
        self._node: Any = None
        self._before = 0  # storages that there were when the node began
        self.backward = False  # whether a backward pass has run
        self._library = torch.library.Library("aten", "IMPL")
        for name in _IN_PLACE:
            for key in ("AutogradCPU", "AutogradCUDA"):
                self._library.impl(name, self._kernel(getattr(aten, name).default), key)

    def _kernel(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            self._within += 1
            try:
                return op._op_dk(_COMPOSITE, *args, **kwargs)
            finally:
                self._within -= 1

        return kernel

    def replaced(self, func: Any, name: str, args: Any, age: Callable[[Any], int]) -> Replaced:
        """Return the storage that `func` would write into, and whether that is certain."""
        node = C._current_autograd_node()
        # Not the node itself, which would keep what it saved.
        number = None if node is None else (node.name(), node._sequence_nr())
        if number != self._node:
            self._node, self._before = number, self._made()
            self.backward |= number is not None
        if name in _WRITE or name == "logical_and":
            nodes = _SHARE if name == "logical_and" else _NODE_OF_TORCH
            in_node = number is not None and nodes.fullmatch(number[0])
            return (
                (args[0], name not in _WRITE) if in_node and age(args[0]) > self._before else None
            )
        if name not in _SUMS or func._overloadname != "Tensor":
            return None
        first = args[0]
        if self._within:
            return (first, True) if name == "add" else None
        if number is None or torch.is_grad_enabled():
            return None
        if number[0] in _NODES:
            return (first, True) if age(first) > self._before else None
        # The engine adds up the gradients of one tensor: the first is from another node. It writes
        # into no view, nor into what is expanded, nor into what something else holds.
        if (
            name == "add"
            and age(first) <= self._before
            and not first._is_view()
            and first.nbytes == first.untyped_storage().nbytes()
        ):
            return first, False
        return None

    def taken_apart(self, func: Any, name: str, args: Any) -> Callable[..., Any] | None:
        """Return a function that runs a composite operator's parts; None for other operators."""
        if func in self._simple:
            return None
        if name in IN_PARTS:  # to call a kernel that is not there would end the process
            keys = (key for key in _EXPLICIT if _has_kernel(func.name(), key))
            key = next(keys, None)
            return None if key is None else partial(func._op_dk, key)
        of_aten = isinstance(func, torch._ops.OpOverload) and func.namespace == "aten"
        if not of_aten or not _has_kernel(func.name(), _COMPOSITE):
            self._simple.add(func)
            return None
        if name in _NETWORKS and args[0].device.type == "cuda" and _has_kernel(func.name(), "CUDA"):
            return partial(func.redispatch, _CUDA)
        if any(_has_kernel(func.name(), key) for key in ("CPU", "CUDA")):
            return None
        return self._kernel(func) if name in _IN_PLACE else partial(func._op_dk, _COMPOSITE)


_HALVES = (torch.float16, torch.bfloat16)
_AMPERE = (8, 0)


def install() -> torch.library.Library:
    """Use it from now on, for as long as what this gives lives."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradCUDA", "CUDA"):  # inference mode goes past the first
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
) -> Tensor:
    mask = added(attn_mask, query.dtype)
    if _can_flash(query, key, value, mask):
        flash = aten._scaled_dot_product_flash_attention
        flashed: Tensor = flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return flashed
    groups = enable_gqa and query.shape[-3] != key.shape[-3]
    if _can_be_efficient(query, key, value) and not groups:
        if mask is not None:
            mask = mask.expand(*query.shape[:-1], key.shape[-2])
        learns = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
        efficient = aten._scaled_dot_product_efficient_attention
        given = (query, key, value, mask, learns, dropout_p, is_causal)
        cheap: Tensor = efficient(*given, scale=scale)[0]
        return cheap
    math = aten._scaled_dot_product_attention_math
    result: Tensor = math(
        query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _can_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """The rules of sdp_utils.cpp that depend on what is given, and not on the driver."""
    if mask is not None or query.dtype not in _HALVES or not _alike(query, key, value):
        return False
    width = query.shape[-1]
    capable = torch.cuda.get_device_capability(query.device) >= _AMPERE
    return capable and torch.backends.cuda.flash_sdp_enabled() and width == value.shape[-1] <= 256


def _can_be_efficient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    known = (*_HALVES, torch.float32)
    enabled = torch.backends.cuda.mem_efficient_sdp_enabled()
    return enabled and query.dtype in known and _alike(query, key, value)


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.dim() == 4 and query.dtype == key.dtype == value.dtype
