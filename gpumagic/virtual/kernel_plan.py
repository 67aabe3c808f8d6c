"""Read from an operator's schema what its kernel on a virtual GPU must know."""

import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from gpumagic.ledger.copy_kernels import INDEXING, WAITS
from gpumagic.virtual.flip import flip, flip_plain
from gpumagic.virtual.scratch import beside
from gpumagic.virtual.wider import writes

C: Any = torch._C
CPU = C.DispatchKeySet(C.DispatchKey.CPU)
ONE, MANY = "Tensor", "Tensors"
LAZY = ("Conjugate", "Negative")
"""The dispatch keys of views that C++ turns into plain tensors before any kernel sees them."""

DRAWS = frozenset(["native_dropout", "rrelu_with_noise"])
"""Operators that draw random numbers and take no generator."""
SHARING = frozenset(
    [
        *("_embedding_bag", "_embedding_bag_forward_only", "lu_unpack", "channel_shuffle"),
        *("native_channel_shuffle", "_slow_conv2d_forward", "slow_conv3d_forward", "lift"),
    ]
)
"""Operators that may give what was there, as torchgen's gen_variable_type.py has them, and what
these call: torch's debug builds hold that every other, unless composite, gives new tensors."""
# Those whose results may be in parts.
_APART = re.compile("sparse|nested|mkldnn|quantize|_embedding_bag_backward")
NUMBER_AS_TENSOR = frozenset({"add", "sub", "mul", "div", "floor_divide"})
"""The only operators for which ``torch.ops`` takes a number where the schema says Tensor."""


class KernelPlan:
    """What the kernel must know of an operator, read from its schema when it is first called."""

    def __init__(self, op: Any, dense: bool) -> None:
        self.op = op
        self.dense = dense
        self.name: str = op._schema.name.split("::")[1]
        self.cpu = on_metadata(op, CPU)

    def __getattr__(self, missing: str) -> Any:
        arguments, full = self.op._schema.arguments, self.op.name()
        self.arguments = [a.name for a in arguments]
        self.written = frozenset(a.name for a in arguments if writes(a))
        self.outs = frozenset(a.name for a in arguments if a.kwarg_only and writes(a))
        tensors = ("Tensor", "Optional[Tensor]")
        self.tensors = frozenset(a.name for a in arguments if str(a.type) in tensors)
        generator = "generator" in self.arguments
        self.generator_at = self.arguments.index("generator") if generator else None
        self.composite = not C._dispatch_has_kernel_for_dispatch_key(full, "CPU")
        self.number_ok = self.name.rstrip("_") in NUMBER_AS_TENSOR
        self.draws = self.name in DRAWS
        self.waits = self.name in WAITS
        self.special = self.draws or generator
        # For every other operator C++ has made plain tensors of conjugate and negative views.
        lazy = any(C._dispatch_has_kernel_for_dispatch_key(full, key) for key in LAZY)
        self.flip = flip if lazy else flip_plain
        self.plain = self.dense and not self.outs  # each of its tensors is flipped as it is
        self.fresh = self.plain and _makes_all_anew(self.op)
        self.kinds = [_kind(a) for a in arguments if not a.kwarg_only]
        self.usual = self.plain and not self.special and not self.waits
        self.usual &= self.name not in INDEXING and "device" not in self.arguments
        self.usual &= not any("List[Optional[T" in str(a.type) for a in arguments)
        self.in_place = bool(self.written) and arguments[0].name in self.written
        self.beside = beside(self.name)
        return object.__getattribute__(self, missing)


def _makes_all_anew(op: Any) -> bool:
    """Whether the CPU's kernel gives new dense tensors always: never an argument, nor its bytes."""
    name, returns = op._schema.name.removeprefix("aten::"), op._schema.returns
    if C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return False
    if name in SHARING or _APART.search(name) or "::" in name:
        return False
    kind = "List[Tensor]" if name.startswith("_foreach_") else "Tensor"
    return bool(returns) and all(str(r.type) == kind and r.alias_info is None for r in returns)


def _kind(argument: Any) -> str | None:
    """Whether an argument is a tensor, several, or neither."""
    kind = str(argument.type)
    return None if "Tensor" not in kind else MANY if "List" in kind else ONE


def on_metadata(op: Any, keys: Any) -> Callable[..., Any]:
    """The kernel at `keys` as it is, for operators that do not touch bytes."""
    return functools.partial(op._handle.redispatch_boxed, keys)
