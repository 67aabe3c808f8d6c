"""Split a value by its items: a part for each rank, in order; the first parts take the remainder.

So `torch.tensor_split` and `numpy.array_split` do. A part has memory of its own where a slice would
send all that it is a slice of. No object is asked for its items but those of the kinds named here.
"""

import copy
import sys
from collections import UserDict
from collections.abc import Iterable
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import Dataset, IterableDataset, Subset

from gpumagic.errors import GpuError

WHAT = (
    "a list, a tuple, a range, a tensor, an array, a data frame, a dataset, or a dict or named "
    "tuple of these"
)
Bounds = tuple[int, int]


def kind_of(value: Any) -> str:
    """Which kind of value it is, of those that have items to share out; else an empty text."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return "tensor" if value.dim() else ""
    if issubclass(kind, tuple):
        fields = hasattr(kind, "_fields") and not issubclass(kind, PackedSequence)
        return "fields" if fields else "sequence" if kind is tuple else ""
    if issubclass(kind, (list, range)):
        return "sequence" if issubclass(kind, list) else "range"
    if issubclass(kind, (dict, UserDict)):
        return "columns"
    if issubclass(kind, Dataset):
        return "" if issubclass(kind, IterableDataset) else "items"
    return _of_library(value, kind)


def _of_library(value: Any, kind: type) -> str:
    """Of a library that this does not import: who has such a value has imported it."""
    if issubclass(kind, _classes("numpy", "ndarray")):
        return "array" if value.ndim else ""
    if issubclass(kind, _classes("pandas", "DataFrame", "Series", "Index")):
        return "frame"
    return "rows" if issubclass(kind, _classes("datasets", "Dataset")) else ""


def _classes(library: str, *names: str) -> tuple[type, ...]:
    module = sys.modules.get(library, ModuleType(library))
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def length(value: Any) -> int:
    """How many items it has; `GpuError` for what cannot be split."""
    kind = kind_of(value)
    if kind in ("columns", "fields"):
        return _of_all(value.items() if kind == "columns" else value._asdict().items())
    try:
        if kind:
            return len(value)
    except TypeError:  # a dataset without a length
        pass
    raise GpuError(f"{_described(value)} cannot be split; give {WHAT}")


def _of_all(columns: Iterable[tuple[Any, Any]]) -> int:
    """The length that all columns have."""
    lengths: dict[int, Any] = {}
    for name, column in columns:
        try:
            lengths.setdefault(length(column), name)
        except GpuError as error:
            raise GpuError(f"{name!r}: {error}") from None
    if len(lengths) > 1:
        said = ", ".join(f"{name!r} has {count:,}" for count, name in lengths.items())
        raise GpuError(f"its parts have different lengths: {said}; give all as many items")
    return next(iter(lengths), 0)


def _described(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, (str, bytes)):
        return f"one {name}, of {len(value):,} characters,"
    flat = " without dimensions" * (isinstance(value, Tensor) or hasattr(value, "ndim"))
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}{flat}"


def take(value: Any, start: int, stop: int) -> Any:
    """The items from `start` up to `stop`, as a value of the same kind."""
    kind = kind_of(value)
    if kind == "tensor":
        # A view would be sent with all of the memory that it looks into.
        part = value.detach().narrow_copy(0, start, stop - start)
        return part.requires_grad_(value.requires_grad)
    if kind == "columns":
        return _of_columns(value, start, stop)
    if kind == "fields":
        return type(value)(*(take(item, start, stop) for item in value))
    if kind == "frame":
        return value[start:stop] if not hasattr(value, "iloc") else value.iloc[start:stop]
    if kind == "rows":
        return value.select(range(start, stop))
    return Subset(value, range(start, stop)) if kind == "items" else value[start:stop]


def _of_columns(value: Any, start: int, stop: int) -> Any:
    made = copy.copy(value)  # which keeps the class, be its constructor what it may
    for name, column in value.items():
        made[name] = take(column, start, stop)
    # What a tokenizer of HuggingFace has found beside its numbers, by text.
    if encodings := getattr(value, "_encodings", None):
        made._encodings = encodings[start:stop]
    return made


def shares(count: int, ranks: int) -> list[Bounds]:
    """From which item to which each rank has: ``[(0, 9), (9, 17)]`` of 17 for 2."""
    each, more = divmod(count, ranks)
    ends = accumulate((each + (rank < more) for rank in range(ranks)), initial=0)
    return list(pairwise(ends))


def pieces(count: int, size: int) -> list[Bounds]:
    """From which item to which each piece of `size` goes; the last may be smaller."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def told(name: str, bounds: list[Bounds]) -> str:
    """How many items are where: ``"17 prompts: 9 + 8"``."""
    sizes = [stop - start for start, stop in bounds]
    if len(sizes) > 4 and len({*sizes[:-1]}) == 1:
        parts = f"{len(sizes)} × {sizes[0]:,}"
        if sizes[-1] != sizes[0]:
            parts = f"{len(sizes) - 1} × {sizes[0]:,} + {sizes[-1]:,}"
    else:
        parts = " + ".join(f"{each:,}" for each in sizes)
    return f"{sum(sizes):,} {name}: {parts}"
