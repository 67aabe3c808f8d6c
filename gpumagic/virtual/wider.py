"""Compute in a wider type, and round, where CUDA has a kernel of a type that the CPU lacks.

An error that the CPU's kernel raises about a type is never shown as it is: it would read as if CUDA
had raised it.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

WIDER = {
    torch.half: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex32: torch.complex64,
    torch.bool: torch.uint8,
}
_REAL_AND_COMPLEX = {torch.half: torch.complex32, torch.complex32: torch.half}
_CUDA_HAS = re.compile(r"aten::(_fft_|_upsample_\w+_aa|avg_pool3d|multi\w*_margin|rrelu|abs|trace)")
"""Operators that CUDA has in a half or in bool and the CPU has not; linear algebra is not among
them. Halves of complex numbers: all that go element by element, sums and products."""
_LACKS = re.compile(r"not implemented for '|support tensors of type|on CPU does not support")


def lacks_type(error: Exception) -> bool:
    """Whether an error of a CPU kernel is about a type of number that it does not have."""
    return _LACKS.search(str(error)) is not None


def compute_wider(
    op: Any, call: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], error: Exception
) -> Any:
    """`op` in wider types by `call`, after `error`; NotImplementedError if the CPU has none."""
    __tracebackhide__ = True
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    narrow = {t.dtype for t in tensors if t.dtype in WIDER} if _cuda_has(op, tensors) else set()
    narrow |= {_REAL_AND_COMPLEX[t] for t in narrow if t in _REAL_AND_COMPLEX}
    back = {WIDER[t]: t for t in narrow if all(other.dtype is not WIDER[t] for other in tensors)}
    pairs: list[tuple[Tensor, Tensor]] = []

    def widen(x: Any) -> Any:
        if isinstance(x, Tensor) and x.dtype in WIDER:
            pairs.append((x, x.to(WIDER[x.dtype])))
            return pairs[-1][1]
        return WIDER.get(x, x) if isinstance(x, torch.dtype) else x

    def round_(x: Any) -> Any:
        for given, wide in pairs:
            if x is wide:
                return given
        return x.to(back.get(x.dtype, x.dtype)) if isinstance(x, Tensor) else x

    try:
        result = call(*tree_map(widen, args), **tree_map(widen, kwargs)) if narrow else None
    except RuntimeError:
        narrow = set()
    if not narrow:
        raise NotImplementedError(
            f"virtual GPUs compute as the CPU does, and its {op.name()} says: {error}"
        ) from None
    arguments = op._schema.arguments
    named = dict(zip((a.name for a in arguments), args)) | kwargs  # noqa: B905 (defaults left out)
    written = {id(x) for x in tree_leaves([named.get(a.name) for a in arguments if writes(a)])}
    for given, wide in pairs:
        if id(given) in written:
            given.copy_(wide)
    return tree_map(round_, result)


def writes(argument: Any) -> bool:
    """Whether an operator writes into an argument, or returns what it has written into."""
    return argument.alias_info is not None and argument.alias_info.is_write


def _cuda_has(op: Any, tensors: list[Tensor]) -> bool:
    alike = torch.Tag.pointwise in op.tags or op.name().startswith(("aten::sum", "aten::prod"))
    complex_halves = alike and any(t.dtype is torch.complex32 for t in tensors)
    return complex_halves or _CUDA_HAS.match(op.name()) is not None
