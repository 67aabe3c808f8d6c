"""Split values into parts by their items, and gather the results of the parts.

Items are split as by `torch.tensor_split` and `numpy.array_split`. A part is copied where a slice
would send the whole storage. Only the kinds of values named here are split.

`gather` undoes `split`. Tensors are gathered on the CPU, without their autograd graph, which is not
sent.

The options of a cell are checked before anything runs. Results that do not fit together are given
as a list of the parts, so no work is lost.
"""

import ast
import copy
import sys
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from numbers import Number
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from gpumagic.cluster.sending import Unsent
from gpumagic.display.units import some
from gpumagic.errors import GpuError, meant
from gpumagic.faults import first_line
from gpumagic.usercode.variables import names_assigned, names_read, variables_read

WHAT = "a list, a tuple, a range, a tensor, an array, a data frame, a dataset, or a dict of these"
Bounds = tuple[int, int]


def kind_of(value: Any) -> str:
    """Return the kind of a value that can be split; else an empty string."""
    kind = type(value)
    if issubclass(kind, Tensor):
        return "tensor" if value.dim() else ""
    if issubclass(kind, tuple):
        return "sequence" if kind is tuple else ""
    if issubclass(kind, (list, range)):
        return "sequence"
    if issubclass(kind, (dict, UserDict)):
        return "columns"
    if issubclass(kind, Dataset):
        return "" if issubclass(kind, IterableDataset) else "items"
    return _of_library(value, kind)


def _of_library(value: Any, kind: type) -> str:
    """Return a class of a library, None if it is not imported."""
    if issubclass(kind, _classes("numpy", "ndarray")):
        return "array" if value.ndim else ""
    if issubclass(kind, _classes("pandas", "DataFrame", "Series")):
        return "frame"
    return "rows" if issubclass(kind, _classes("datasets", "Dataset")) else ""


def _classes(library: str, *names: str) -> tuple[type, ...]:
    module = sys.modules.get(library, ModuleType(library))
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


def length(value: Any) -> int:
    """Return the number of items; raise `GpuError` for a value that cannot be split."""
    kind = kind_of(value)
    if kind == "columns":
        return _of_all(value.items())
    try:
        if kind:
            return len(value)
    except TypeError:  # a dataset without a length
        pass
    raise GpuError(f"{_described(value)} cannot be split; give {WHAT}")


def _of_all(columns: Iterable[tuple[Any, Any]]) -> int:
    """Return the common length of all columns."""
    lengths: dict[int, Any] = {}
    for name, column in columns:
        try:
            lengths.setdefault(length(column), name)
        except GpuError as error:
            raise GpuError(f"{name!r}: {error}") from None
    if len(lengths) > 1:
        counted = ", ".join(f"{name!r} has {count:,}" for count, name in lengths.items())
        raise GpuError(f"parts of different lengths: {counted}; give all the same number of items")
    return next(iter(lengths), 0)


def _described(value: Any) -> str:
    name = type(value).__name__
    if isinstance(value, (str, bytes)):
        return f"one {name}, of {len(value):,} characters,"
    flat = " without dimensions" * (isinstance(value, Tensor) or hasattr(value, "ndim"))
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}{flat}"


def take(value: Any, start: int, stop: int) -> Any:
    """Return the items from `start` up to `stop`, as a value of the same kind."""
    kind = kind_of(value)
    if kind == "tensor":
        # A view would be sent with its whole storage.
        part = value.detach().narrow_copy(0, start, stop - start)
        return part.requires_grad_(value.requires_grad)
    if kind == "columns":
        return _of_columns(value, start, stop)
    if kind == "frame":
        return value.iloc[start:stop]
    if kind == "rows":
        return value.select(range(start, stop))
    return Subset(value, range(start, stop)) if kind == "items" else value[start:stop]


def _of_columns(value: Any, start: int, stop: int) -> Any:
    made = copy.copy(value)  # keeps the class without calling its constructor
    for name, column in value.items():
        made[name] = take(column, start, stop)
    # Other results of HuggingFace's tokenizers, by text.
    if encodings := getattr(value, "_encodings", None):
        made._encodings = encodings[start:stop]
    return made


def shares(count: int, ranks: int) -> list[Bounds]:
    """Return the item range of each rank: ``[(0, 9), (9, 17)]`` for 17 items and 2 ranks."""
    each, more = divmod(count, ranks)
    ends = accumulate((each + (rank < more) for rank in range(ranks)), initial=0)
    return list(pairwise(ends))


def pieces(count: int, size: int) -> list[Bounds]:
    """Return the item range of each piece of `size`; the last may be smaller."""
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def parts_in_words(name: str, bounds: list[Bounds]) -> str:
    """Return the numbers of items: ``"17 prompts: 9 + 8"``."""
    sizes = [stop - start for start, stop in bounds]
    if len(sizes) > 4 and len({*sizes[:-1]}) == 1:
        parts = f"{len(sizes)} × {sizes[0]:,}"
        if sizes[-1] != sizes[0]:
            parts = f"{len(sizes) - 1} × {sizes[0]:,} + {sizes[-1]:,}"
    else:
        parts = " + ".join(f"{each:,}" for each in sizes)
    return f"{sum(sizes):,} {name}: {parts}"


def gather(parts: Sequence[Any]) -> Any:
    """Return all items of the parts, in order, as a value of their kind."""
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
    except (RuntimeError, ValueError, TypeError) as error:  # shapes do not fit
        raise GpuError(f"the parts do not fit together: {first_line(error)}") from None


def _tensors(parts: Sequence[Tensor]) -> Tensor:
    # Always on the CPU, so that the device does not depend on the parts.
    return torch.cat([part.detach().cpu() for part in parts])


def _sequences(parts: Sequence[Any]) -> Any:
    every = chain.from_iterable(parts)
    return tuple(every) if all(isinstance(part, tuple) for part in parts) else list(every)


def _arrays(parts: Sequence[Any]) -> Any:
    numpy: Any = sys.modules["numpy"]
    masked = any(isinstance(part, numpy.ma.MaskedArray) for part in parts)
    return (numpy.ma if masked else numpy).concatenate(parts)


def _frames(parts: Sequence[Any]) -> Any:
    # pandas warns that empty parts will affect the dtypes.
    filled = [part for part in parts if len(part)] or [parts[0]]
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


def _named(name: Any, parts: Sequence[Any]) -> Any:
    try:
        return gather(parts)
    except GpuError as error:
        raise GpuError(f"{name!r}: {error}") from None


_GATHER: dict[str, Callable[[Sequence[Any]], Any]] = {
    "tensor": _tensors,
    "sequence": _sequences,
    "array": _arrays,
    "frame": _frames,
    "rows": _rows,
    "columns": _columns,
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
    """Raise `GpuError` for an unknown reduction."""
    if how not in HOW:
        raise GpuError(f"{how} is no way to reduce; {meant(how, HOW)}type {', '.join(HOW)}")


def reduce(parts: Sequence[Any], how: str) -> Any:
    """Reduce numbers or tensors of the parts to one: mean, sum, min or max.

    Each part counts the same: a mean of means over 9 and 8 items is not the mean over 17.
    ``"last"`` returns the last part, of any type.
    """
    check_how(how)
    if how == "last":
        return parts[-1]
    if any(isinstance(part, (Tensor, *_classes("numpy", "ndarray"))) for part in parts):
        return _reduced(parts, how)
    try:
        if all(isinstance(part, Number) for part in parts):
            return _PLAIN[how](parts)
    except TypeError:  # complex numbers have no order
        pass
    kind = next((type(p).__name__ for p in parts if not isinstance(p, Number)), "complex number")
    raise GpuError(f"a {kind} has no {how}; reduce numbers or tensors, or type --gather")


def _reduced(parts: Sequence[Any], how: str) -> Any:
    arrays = _classes("numpy", "ndarray")
    wrong = next((p for p in parts if not isinstance(p, (Tensor, Number, *arrays))), None)
    if wrong is not None:
        raise GpuError(f"a {type(wrong).__name__} among tensors has no {how}; assign the same kind")
    shapes = {tuple(getattr(part, "shape", ())) for part in parts}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)))
        raise GpuError(
            f"the parts have shapes {found}; reduce parts of one shape, or type --gather"
        )
    if any(isinstance(part, Tensor) for part in parts):
        return _TENSORS[how](torch.stack([torch.as_tensor(p).detach().cpu() for p in parts]))
    numpy: Any = sys.modules["numpy"]
    return getattr(numpy, how)(numpy.stack(list(parts)), axis=0)


class Sharing(Protocol):
    """The options of a line: names to split, to gather and to reduce, and the chunk size."""

    @property
    def split(self) -> tuple[str, ...]:
        return ()

    @property
    def gather(self) -> tuple[str, ...]:
        return ()

    @property
    def reduce(self) -> tuple[tuple[str, str], ...]:
        return ()

    @property
    def chunk(self) -> int | None:
        return None


class Whole(Sharing):
    """No options: every rank runs the whole cell."""


class SplitValues:
    """The variables of `--split`: one part per rank, or with `--chunk` parts of that size.

    Without variables, each rank has one part.
    """

    def __init__(self, asked: Sharing, namespace: Mapping[str, Any], ranks: int) -> None:
        self._values = {name: namespace[name] for name in asked.split}
        try:
            count = length(self._values)
        except GpuError as error:
            raise GpuError(f"--split: {error}") from None
        self.bounds = pieces(count, asked.chunk) if asked.chunk else shares(count, ranks)
        self.bounds = self.bounds or [(0, 0)]
        # Without items one part is run, so that the result has the right type.
        filled = [n for n, (start, stop) in enumerate(self.bounds) if stop > start]
        filled = filled or [*range(1 if self._values else ranks)]
        self.total = len(filled)
        # The parts of each rank: its own, or a common queue.
        common = deque(filled)
        self.queues = [
            common if asked.chunk else deque([rank] if rank in filled else [])
            for rank in range(ranks)
        ]

    def part(self, number: int) -> dict[str, Any]:
        """Return the variables of one part, by name."""
        found: dict[str, Any] = take(self._values, *self.bounds[number])
        return found

    def __str__(self) -> str:
        """``"17 prompts: 9 + 8"``; empty without variables."""
        return parts_in_words(" and ".join(self._values), self.bounds) if self._values else ""


def check(asked: Sharing, tree: ast.AST, namespace: Mapping[str, Any]) -> None:
    """Raise `GpuError` for a split name that is no variable or that the cell does not read, a
    gathered name that it does not assign, or an unknown reduction."""
    read = [name for name, _ in variables_read(names_read(tree), namespace)] if asked.split else []
    for name in asked.split:
        if name not in namespace:
            question = meant(name, [known for known in namespace if not known.startswith("_")])
            raise GpuError(f"--split {name}: no such variable; {question}make it in a cell before")
        if name not in read:
            raise GpuError(
                f"--split {name}: the cell does not read {name}, so each would do all of it; "
                f"{meant(name, read)}it reads {some(read) or 'no variable'}"
            )
    assigned = names_assigned(tree)
    for option, names in (("gather", asked.gather), ("reduce", tuple(dict(asked.reduce)))):
        for name in names:
            if name not in (*assigned, *asked.split):
                there = f"it assigns {some(assigned)}" if assigned else "it assigns nothing"
                question = meant(name, assigned)
                raise GpuError(
                    f"--{option} {name}: the cell does not assign {name}; {question}{there}"
                )
    for _, how in asked.reduce:
        check_how(how)


def put_together(
    asked: Sharing, parts: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables to set in the notebook, and why some are lists of parts."""
    made: dict[str, Any] = {}
    wrong: list[str] = []
    hows = {**dict.fromkeys(asked.gather, ""), **dict(asked.reduce)}
    for name, how in hows.items():
        found = [part[name] for part in parts if name in part]
        option = f"--reduce {name}={how}" if how else f"--gather {name}"
        try:
            if len(found) < len(parts):
                raise GpuError(f"{len(parts) - len(found)} of {len(parts)} parts did not assign it")
            if unsent := next((each for each in found if isinstance(each, Unsent)), None):
                raise GpuError(f"it cannot leave its rank ({unsent.why})")
            made[name] = reduce(found, how) if how else gather(found)
        except GpuError as error:
            made[name] = found
            wrong.append(f"{option}: {error}; {name} is the list of its {len(found)} parts")
    return made, wrong


def sharing_in_words(asked: Sharing, made: Mapping[str, Any], parts: int) -> tuple[str, ...]:
    """Return what was gathered and reduced, in words."""
    reduced, words = dict(asked.reduce), []
    if asked.gather and made:
        on_cpu = any(isinstance(made[name], Tensor) for name in asked.gather)
        words.append(f"gathered {some(asked.gather)}{' on the CPU' * on_cpu}")
    if reduced and made:
        equal = "" if {*reduced.values()} == {"last"} else ", each counted the same"
        hows = ", ".join(f"{name} is the {how}" for name, how in reduced.items())
        words.append(f"{hows} of {parts} parts{equal}")
    return tuple(words)
