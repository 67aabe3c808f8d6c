"""Find the values that a call of torch must have within bounds: indices, labels, probabilities.

CUDA's kernels check these by an assert, which ends CUDA for the whole process. The table lists the
functions with such an assert, and what their index counts. Negative indices are allowed where the
kernel counts them from the end.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

Place = tuple[int, str, int | None]
"""An argument of a call: its position, its keyword, and which item of an index it is."""


class Bounded(NamedTuple):
    """Values of one call, and their bounds."""

    values: Any  # a tensor
    low: float
    high: float  # the largest that is allowed; infinity if any is
    at: Place
    of: Place | None  # the argument that has the bound, if its size is the bound
    bound: str  # "10 classes: 0 … 9"; "numbers from 0 are needed"
    ignored: int | None = None  # a value that is allowed too


Find = Callable[[Any, Any], Iterator[Bounded]]
"""Yield what is bounded in a call's arguments and keyword arguments."""


def _along(
    of: Tensor, dim: int | None, unit: str = "elements", *, wraps: bool = True
) -> tuple[float, float, str]:
    """Return the least and the largest index in a dimension, or of all elements, and the bound."""
    size = of.numel() if dim is None or not of.dim() else of.shape[dim]
    text, low, high = f"{size} {unit}", -size if wraps else 0, size - 1
    if dim is not None and of.dim() > 1 and unit == "elements":
        text += f" in dimension {dim % of.dim()}"
    return low, high, f"{text}: {low} … {high}"


class Indexing(NamedTuple):
    """How functions use an index, or numbers from 0; `parameters` are their first ones."""

    functions: str
    parameters: str
    at: str  # the index
    of: str = ""  # what is indexed, or the number of classes
    unit: str = "elements"  # or the numbers that are needed if nothing is indexed
    dim: int | None = None  # that is indexed, where it is no parameter
    high: float = math.inf  # if nothing is indexed
    wraps: bool = False  # negative indices count from the end

    def find(self, args: Any, kwargs: Any) -> Iterator[Bounded]:
        """Yield the bounds of one call."""
        names = self.parameters.split()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        values, of, dim = given.get(self.at), given.get(self.of), given.get("dim", self.dim)
        at, place = (names.index(self.at), self.at, None), None
        ignored = given.get("ignore_index", -100) if "ignore_index" in names else None
        bounds: tuple[float, float, str] = (0, self.high, f"{self.unit} are needed")
        if isinstance(of, Tensor):
            dim = dim if self.dim is None else min(self.dim, of.dim() - 1)
            bounds = _along(of, dim, self.unit, wraps=self.wraps)
            place = (names.index(self.of), self.of, None)
        elif of is not None and of >= 0:
            bounds = 0, of - 1, f"{self.of} is {of}: 0 … {of - 1}"
        yield Bounded(values, *bounds[:2], at, place, bounds[2], ignored)


_ALONG = (
    "gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_select "
    "index_add index_add_ index_copy index_copy_ index_reduce index_reduce_"
)
_LOSS = "input target weight size_average ignore_index"
_LARGEST, _FINITE = torch.finfo(torch.double).max, "finite numbers from 0"
_BCE, _TO_1 = "F.binary_cross_entropy", "numbers from 0 to 1"
_TABLE = (
    Indexing("F.embedding F.embedding_bag", "input weight", "input", "weight", "rows", 0),
    Indexing("F.cross_entropy F.nll_loss", _LOSS, "target", "input", "classes", 1),
    Indexing("F.multi_margin_loss", "input target", "target", "input", "classes", 1),
    Indexing(_ALONG, "input dim index", "index", "input"),
    Indexing("index_fill index_fill_", "input dim index", "index", "input", wraps=True),
    Indexing("take_along_dim", "input indices dim", "indices", "input", wraps=True),
    Indexing("take put put_", "input index", "index", "input", wraps=True),
    Indexing("F.one_hot", "tensor num_classes", "tensor", "num_classes", "numbers from 0"),
    Indexing("bincount", "input", "input", unit="numbers from 0"),
    Indexing(_BCE, "input target", "input", unit=_TO_1, high=1),
    Indexing(_BCE, "input target", "target", unit=_TO_1, high=1),
    Indexing("multinomial", "input", "input", unit=_FINITE, high=_LARGEST),
)
_SPARSE = "sparse_coo_tensor sparse_csr_tensor sparse_csc_tensor sparse_compressed_tensor"


@cache
def finders() -> dict[Any, list[Find]]:
    """Return how to find what is bounded, by torch's functions and methods; empty: torch can."""
    rows: list[tuple[str, Find]] = [(row.functions, row.find) for row in _TABLE]
    rows.append(("__getitem__ __setitem__ index_put index_put_", _of_subscript))
    found: dict[Any, list[Find]] = {getattr(torch, name): [] for name in _SPARSE.split()}
    for functions, find in rows:
        for name in functions.split():
            for owner in (F,) if name.startswith("F.") else (torch, Tensor):
                if function := getattr(owner, name.removeprefix("F."), None):
                    found.setdefault(function, []).append(find)
    return found


def _as_index(item: Any) -> Any:
    """Return a list or an array of an index as torch takes it: as a tensor."""
    if type(item) is list or type(item).__module__ == "numpy":
        return torch.as_tensor(item, device="cpu")
    return item


def _dims(item: Any) -> int:
    """Return how many dimensions an item of an index takes."""
    if item is None or item is Ellipsis or type(item) is bool:
        return 0
    return item.dim() if isinstance(item, Tensor) and _is_mask(item) else 1


def _is_mask(item: Tensor) -> bool:
    return item.dtype in (torch.bool, torch.uint8)


def _of_subscript(args: Any, kwargs: Any) -> Iterator[Bounded]:
    """Yield the indices of ``x[…]``, ``x[…] = …`` and `index_put`."""
    of, key = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    several = type(key) is tuple or (type(key) is list and isinstance(next(iter(key), 0), Tensor))
    items = [_as_index(item) for item in (key if several else (key,))]
    used, dim = sum(map(_dims, items)), 0
    for n, item in enumerate(items):
        if item is Ellipsis:
            dim += of.dim() - used
        elif isinstance(item, Tensor) and not _is_mask(item) and dim < of.dim():
            low, high, text = _along(of, dim)
            at = (1, "indices", n if several else None)
            yield Bounded(item, low, high, at, (0, "input", None), text)
        dim += _dims(item)
