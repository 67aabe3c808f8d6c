"""Split variables into parts for ranks or threads, and join the results.

Parts of tensors and writable arrays are copies. A view would be sent with its whole storage, and a
write to a view would change the notebook's value. Results that cannot be joined become a list.
"""

import ast
import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from numbers import Number
from operator import getitem
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import Subset

from gpumagic.display.units import some
from gpumagic.errors import GpuError, meant
from gpumagic.faults import first_line
from gpumagic.usercode.program import awaits
from gpumagic.usercode.values import comes_from
from gpumagic.usercode.variables import names_assigned, names_read, variables_read

_WHAT = "a list, tuple, range, tensor, array, data frame, dataset, or a dict of these"


@dataclass(frozen=True)
class Sharing:
    """Options of `%%ongpu`: the names to split, to gather and to reduce, and the chunk size."""

    split: tuple[str, ...] = ()
    gather: tuple[str, ...] = ()
    reduce: tuple[tuple[str, str], ...] = ()  # names and reductions: ("loss", "mean")
    chunk: int | None = None

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the variables that the cell sets in the notebook."""
        return (*self.gather, *dict(self.reduce))


class Unsent:
    """A placeholder for a rank's value that cannot be pickled. `why` is the reason."""

    def __init__(self, text: str, why: str) -> None:
        self._text, self.why = text, why

    def __repr__(self) -> str:
        return f"{self._text} (not sent: cannot be pickled)"


class Kind(NamedTuple):
    """Two functions for a kind of value: `take` slices a value, `join` joins the parts."""

    take: Callable[[Any, slice], Any]
    join: Callable[[Sequence[Any]], Any]


def _take_rows(tensor: Tensor, items: slice) -> Tensor:
    part = tensor.detach().narrow_copy(0, items.start, items.stop - items.start)
    return part.requires_grad_(tensor.requires_grad)


def _take_array(array: Any, items: slice) -> Any:
    part = array[items]
    return part.copy() if part.flags.writeable else part


def _join_arrays(parts: Sequence[Any]) -> Any:
    numpy: Any = sys.modules["numpy"]
    masked = any(isinstance(part, numpy.ma.MaskedArray) for part in parts)
    return (numpy.ma if masked else numpy).concatenate(parts)


def _take_columns(value: Any, items: slice) -> Any:
    made = copy.copy(value)  # keeps the class without calling its constructor
    for name, column in value.items():
        made[name] = take(column, items.start, items.stop)
    # The result of a Hugging Face tokenizer also has an encoding for each text.
    if encodings := getattr(value, "_encodings", None):
        made._encodings = encodings[items]
    return made


def _join_columns(parts: Sequence[Any]) -> Any:
    if any(part.keys() != parts[0].keys() for part in parts):
        raise GpuError("the parts have different keys; assign the same keys in all parts")
    made = copy.copy(parts[0])
    for name in parts[0]:
        made[name] = gather([part[name] for part in parts])
    if getattr(made, "_encodings", None):
        made._encodings = [*chain.from_iterable(part._encodings for part in parts)]
    return made


def _refuse(parts: Sequence[Any]) -> Any:
    raise GpuError("a dataset cannot be joined; gather what is computed from its items")


_COLUMNS = Kind(_take_columns, _join_columns)
_KINDS = {
    ("torch.Tensor",): Kind(
        _take_rows, lambda parts: torch.cat([part.detach().cpu() for part in parts])
    ),
    ("builtins.list", "builtins.tuple", "builtins.range"): Kind(
        getitem,
        lambda parts: (tuple if type(parts[0]) is tuple else list)(chain.from_iterable(parts)),
    ),
    ("builtins.dict", "collections.UserDict"): _COLUMNS,
    ("numpy.ndarray",): Kind(_take_array, _join_arrays),
    ("pandas.DataFrame", "pandas.Series"): Kind(
        lambda value, items: value.iloc[items].copy(),
        # Leave out empty parts, because pandas warns about the dtypes of empty parts.
        lambda parts: sys.modules["pandas"].concat([p for p in parts if len(p)] or [parts[0]]),
    ),
    ("datasets.Dataset",): Kind(
        lambda value, items: value.select(range(items.start, items.stop)),
        lambda parts: sys.modules["datasets"].concatenate_datasets(list(parts)),
    ),
    ("torch.utils.data.Dataset",): Kind(
        lambda value, items: Subset(value, range(items.start, items.stop)), _refuse
    ),
}


def _kind_of(value: Any) -> Kind | None:
    kind = type(value)
    named_tuple = issubclass(kind, tuple) and kind is not tuple
    without_length = comes_from(kind, "torch.utils.data.IterableDataset")
    if named_tuple or without_length or getattr(value, "ndim", 1) == 0:
        return None
    return next((found for names, found in _KINDS.items() if comes_from(kind, *names)), None)


def length(value: Any) -> int:
    """Return the number of items; raise `GpuError` for a value that cannot be split."""
    kind = _kind_of(value)
    if kind is _COLUMNS:
        lengths = {length(column): name for name, column in value.items()}
        if len(lengths) > 1:
            counted = ", ".join(f"{name!r} has {count:,}" for count, name in lengths.items())
            raise GpuError(f"different lengths: {counted}; give all the same number of items")
        return next(iter(lengths), 0)
    if kind is None or not hasattr(value, "__len__"):
        raise GpuError(f"{type(value).__name__} cannot be split; give {_WHAT}")
    return len(value)


def take(value: Any, start: int, stop: int) -> Any:
    """Return the items from `start` up to `stop`, as a value of the same kind."""
    kind = _kind_of(value)
    assert kind is not None, "call `length` first, which raises if the value cannot be split"
    return kind.take(value, slice(start, stop))


def shares(count: int, ranks: int) -> list[tuple[int, int]]:
    """Return the item range of each rank: ``[(0, 9), (9, 17)]`` for 17 items and 2 ranks."""
    each, more = divmod(count, ranks)
    return list(pairwise(each * rank + min(rank, more) for rank in range(ranks + 1)))


class SplitValues:
    """The split variables and their parts: one part for each rank, or for every `--chunk` items."""

    def __init__(self, asked: Sharing, namespace: Mapping[str, Any], ranks: int) -> None:
        self._values = {name: namespace[name] for name in asked.split}
        count, size = length(self._values), asked.chunk
        self.bounds = shares(count, ranks)
        if size:
            starts = range(0, count, size)
            self.bounds = [(start, min(start + size, count)) for start in starts] or [(0, 0)]
        # If split variables have no items, run one empty part, so that results have the right type.
        filled = [n for n, (start, stop) in enumerate(self.bounds) if stop > start]
        filled = filled or [*range(1 if self._values else ranks)]
        self.total = len(filled)
        common = deque(filled)  # with `--chunk`, all ranks share one queue of parts
        self.queues = [
            common if asked.chunk else deque([rank] if rank in filled else [])
            for rank in range(ranks)
        ]

    def part(self, number: int) -> dict[str, Any]:
        return cast(dict[str, Any], take(self._values, *self.bounds[number]))

    def __str__(self) -> str:
        """Return the numbers of items, ``"17 prompts: 9 + 8"``; empty if nothing is split."""
        if not self._values:
            return ""
        sizes = [stop - start for start, stop in self.bounds]
        parts = " + ".join(f"{each:,}" for each in sizes)
        if len(sizes) > 4:
            parts = f"{len(sizes)} parts of at most {max(sizes):,}"
        return f"{sum(sizes):,} {' and '.join(self._values)}: {parts}"


def gather(parts: Sequence[Any]) -> Any:
    """Join the parts, in order, into one value of the same kind."""
    kinds = {_kind_of(part): type(part).__name__ for part in parts}
    if len(kinds) > 1:
        names = " and ".join(kinds.values())
        raise GpuError(f"the parts are of different kinds: {names}; assign one kind in all parts")
    ((kind, name),) = kinds.items()
    if kind is None:
        raise GpuError(f"{name} has no items to gather; type --reduce, or assign {_WHAT}")
    try:
        return kind.join(parts)
    except (RuntimeError, ValueError, TypeError) as error:  # such as different shapes
        raise GpuError(f"the parts do not fit together: {first_line(error)}") from None


_NUMBERS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": lambda parts: sum(parts) / len(parts),
    "sum": sum,
    "min": min,
    "max": max,
}
HOW = (*_NUMBERS, "last")


def reduce(parts: Sequence[Any], how: str) -> Any:
    """Return the mean, sum, min or max of numbers, tensors or arrays, or the last of the parts."""
    # A mean weights all parts equally, even if one part has more items.
    if how == "last":
        return parts[-1]
    try:
        if any(isinstance(part, Tensor) for part in parts):
            stacked = torch.stack([torch.as_tensor(part).detach().cpu() for part in parts])
            if how == "mean":  # torch has no mean of integers
                return stacked.sum(0) / len(parts)
            return getattr(stacked, {"min": "amin", "max": "amax"}.get(how, how))(0)
        if any(comes_from(type(part), "numpy.ndarray", "numpy.generic") for part in parts):
            return getattr(sys.modules["numpy"].stack(list(parts)), how)(axis=0)
        if all(isinstance(part, Number) for part in parts):
            return _NUMBERS[how](parts)
    except (RuntimeError, ValueError, TypeError) as error:  # such as complex numbers
        raise GpuError(f"the parts have no {how}: {first_line(error)}") from None
    kinds = some(dict.fromkeys(type(part).__name__ for part in parts))
    raise GpuError(f"{kinds} has no {how}; reduce numbers or tensors, or type --gather")


def put_together(
    asked: Sharing, parts: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return variables to set in the notebook, and reasons why some values are lists of parts."""
    made: dict[str, Any] = {}
    wrong: list[str] = []
    hows = dict(asked.reduce)
    for name in asked.made:
        found = [part[name] for part in parts if name in part]
        option = f"--reduce {name}={hows[name]}" if name in hows else f"--gather {name}"
        try:
            if len(found) < len(parts):
                raise GpuError(f"{len(parts) - len(found)} of {len(parts)} parts did not assign it")
            if unsent := next((each for each in found if isinstance(each, Unsent)), None):
                raise GpuError(f"it cannot be pickled ({unsent.why})")
            made[name] = reduce(found, hows[name]) if name in hows else gather(found)
        except GpuError as error:
            made[name] = found
            wrong.append(f"{option}: {error}; {name} is the list of its {len(found)} parts")
    return made, wrong


def sharing_in_words(asked: Sharing, made: Mapping[str, Any], parts: int) -> Iterator[str]:
    if made and asked.gather:
        on_cpu = any(isinstance(made[name], Tensor) for name in asked.gather)
        yield f"gathered {some(asked.gather)}{' on the CPU' * on_cpu}"
    if made:
        yield from (f"{name} is the {how} of {parts} parts" for name, how in asked.reduce)


def check(asked: Sharing, tree: ast.Module, namespace: Mapping[str, Any]) -> None:
    """Raise `GpuError` if the cell awaits, or `asked` has an unused name or unknown reduction."""
    if line := awaits(tree):
        raise GpuError(f"line {line} awaits, but no event loop runs here; await in an earlier cell")
    read = [name for name, _ in variables_read(names_read(tree), namespace)] if asked.split else []
    assigned, hows = names_assigned(tree), dict(asked.reduce)
    for name in asked.split:
        said = "the cell does not read" if name in namespace else "there is no variable"
        _check_known(f"--split {name}: {said} {name}", name, read, "reads")
    for option, names in (("--gather", asked.gather), ("--reduce", hows)):
        for name in (each for each in names if each not in asked.split):
            said = f"{option} {name}: the cell does not assign {name}"
            _check_known(said, name, assigned, "assigns")
    for how in hows.values():
        if how not in HOW:
            raise GpuError(f"{how}: unknown reduction; {meant(how, HOW)}type {', '.join(HOW)}")


def _check_known(said: str, name: str, known: Sequence[str], does: str) -> None:
    if name not in known:
        there = f"{meant(name, known)}the cell {does} {some(known) or 'no variable'}"
        raise GpuError(f"{said}; {there}")
