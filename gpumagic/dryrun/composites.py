"""Take composite operators apart as torch does for tensors with data, not as for others.

Under any mode torch's C++ writes into a new tensor where it otherwise writes into one that nobody
else has, so that a dry run would hold both at once. Here it is said which these are.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

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
        """What `func`, which is about to run, would write into, and whether that is certain."""
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
        """What runs for a composite operator, which comes whole in inference mode."""
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
