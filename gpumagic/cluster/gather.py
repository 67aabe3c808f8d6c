"""Put parts together that ranks give, in the order of the ranks: all of their items, or one number.

`gather` undoes `split`. Tensors come to the CPU, wherever they were made; autograd's graphs stay
behind, as they do when a value is sent.
"""

import copy
import sys
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from gpumagic.cluster.split import WHAT, kind_of
from gpumagic.errors import GpuError, meant


def gather(parts: Sequence[Any]) -> Any:
    """All items of the parts, in order, as a value of their kind; `GpuError` where it has none."""
    kinds = {kind_of(part): part for part in parts}
    kind = next(iter(kinds))
    if len(kinds) > 1:
        names = " and ".join(dict.fromkeys(type(part).__name__ for part in kinds.values()))
        raise GpuError(f"the parts are of different kinds: {names}; assign the same kind on each")
    if not kind:
        given = type(parts[0]).__name__
        raise GpuError(f"{given} has no items to gather; type --reduce, or assign {WHAT}")
    if kind == "items":
        given = type(parts[0]).__name__
        raise GpuError(f"a {given} cannot be gathered; gather what is computed from its items")
    try:
        return _GATHER[kind](parts)
    except (RuntimeError, ValueError, TypeError) as error:  # shapes that do not fit
        raise GpuError(f"the parts do not fit together: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _tensors(parts: Sequence[Tensor]) -> Tensor:
    # Always: else a part more or less would decide where the whole is.
    return torch.cat([part.detach().cpu() for part in parts])


def _sequences(parts: Sequence[Any]) -> Any:
    every = chain.from_iterable(parts)
    return tuple(every) if all(isinstance(part, tuple) for part in parts) else list(every)


def _ranges(parts: Sequence[range]) -> Any:
    """One range, where each goes on from the one before; else a list."""
    filled = [part for part in parts if part] or parts[:1]
    if all(a.step == b.step and a[-1] + a.step == b[0] for a, b in pairwise(filled)):
        return range(filled[0].start, filled[-1].stop, filled[0].step)
    return _sequences(parts)


def _arrays(parts: Sequence[Any]) -> Any:
    numpy: Any = sys.modules["numpy"]
    masked = any(isinstance(part, numpy.ma.MaskedArray) for part in parts)
    return (numpy.ma if masked else numpy).concatenate(parts)


def _frames(parts: Sequence[Any]) -> Any:
    # pandas warns that an empty one will have a say in the dtypes.
    filled = [part for part in parts if len(part)] or [parts[0]]
    if not hasattr(filled[0], "iloc"):
        return filled[0].append(filled[1:])
    return sys.modules["pandas"].concat(filled)


def _rows(parts: Sequence[Any]) -> Any:
    return sys.modules["datasets"].concatenate_datasets(list(parts))


def _columns(parts: Sequence[Any]) -> Any:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise GpuError("the parts have different keys; assign the same ones on each")
    made = copy.copy(parts[0])
    for name in parts[0]:
        made[name] = _named(name, [part[name] for part in parts])
    if getattr(made, "_encodings", None):
        made._encodings = [*chain.from_iterable(part._encodings for part in parts)]
    return made


def _fields(parts: Sequence[Any]) -> Any:
    kind = type(parts[0])
    items = zip(kind._fields, zip(*parts, strict=True), strict=True)
    return kind(*(_named(name, column) for name, column in items))


def _named(name: Any, parts: Sequence[Any]) -> Any:
    try:
        return gather(parts)
    except GpuError as error:
        raise GpuError(f"{name!r}: {error}") from None


_GATHER: dict[str, Callable[[Sequence[Any]], Any]] = {
    "tensor": _tensors,
    "sequence": _sequences,
    "range": _ranges,
    "array": _arrays,
    "frame": _frames,
    "rows": _rows,
    "columns": _columns,
    "fields": _fields,
}
_PLAIN: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": lambda parts: sum(parts) / len(parts),
    "sum": sum,
    "min": min,
    "max": max,
}
_TENSORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda parts: parts.sum(0) / len(parts),
    "sum": lambda parts: parts.sum(0),
    "min": lambda parts: parts.amin(0),
    "max": lambda parts: parts.amax(0),
}
HOW = (*_PLAIN, "last")


def check_how(how: str) -> None:
    """Raise `GpuError` for what is no way to reduce."""
    if how not in HOW:
        raise GpuError(f"{how} is no way to reduce; {meant(how, HOW)}type {', '.join(HOW)}")


def reduce(parts: Sequence[Any], how: str) -> Any:
    """One number of those that the parts are, or one tensor: their mean, sum, min or max.

    Each part counts the same, whatever it is of: a mean of means over 9 and 8 items is no mean over
    17. ``"last"`` is the last part, whatever that is.
    """
    check_how(how)
    if how == "last":
        return parts[-1]
    if any(isinstance(part, Tensor) for part in parts):
        return _reduced(parts, how)
    arrays = getattr(sys.modules.get("numpy"), "ndarray", ())
    if any(isinstance(part, arrays) for part in parts):
        numpy: Any = sys.modules["numpy"]
        return getattr(numpy, how)(numpy.stack(list(parts)), axis=0)
    try:
        if all(isinstance(part, Number) for part in parts):
            return _PLAIN[how](parts)
    except TypeError:  # which of two complex numbers is the smaller?
        pass
    kind = next((type(p).__name__ for p in parts if not isinstance(p, Number)), "complex number")
    raise GpuError(f"a {kind} has no {how}; reduce numbers or tensors, or type --gather")


def _reduced(parts: Sequence[Any], how: str) -> Tensor:
    wrong = next((part for part in parts if not isinstance(part, (Tensor, Number))), None)
    if wrong is not None:
        raise GpuError(f"a {type(wrong).__name__} among tensors has no {how}; assign the same kind")
    tensors = [torch.as_tensor(part).detach().cpu() for part in parts]
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        said = " and ".join(map(str, sorted(shapes)))
        raise GpuError(f"the parts have shapes {said}; reduce parts of one shape, or type --gather")
    return _TENSORS[how](torch.stack(tensors))
