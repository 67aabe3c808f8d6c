"""Check the bounds of indices, labels and probabilities, which CUDA's kernels assert.

After a failed assert, the process cannot use CUDA any more. So values are checked before the kernel
runs. The error shows the user's variable, the bad value, its bounds and the likely cause.
"""

import ast
import math
import sys
from collections.abc import Callable, Iterator
from functools import cache
from traceback import walk_stack
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from gpumagic.ledger.attribute import uncounted
from gpumagic.mismatch.explanation import bracketed
from gpumagic.mismatch.operand import NAMED, Reader, tensors_of
from gpumagic.mismatch.operation import operation
from gpumagic.usercode.frames import FailedFrame, failed_frames
from gpumagic.usercode.values import own

_LONG = 80  # maximum number of characters of a displayed expression


class CheckedIndexError(IndexError):
    """Raised by `gpumagic.check` for an index or a label out of bounds."""


class CheckedValueError(ValueError):
    """Raised by `gpumagic.check` for a probability out of bounds."""


class Bounded(NamedTuple):
    """Values to check in one torch call, and their bounds."""

    values: Any  # a tensor
    low: float
    high: float  # the largest allowed value; infinity if there is no limit
    bound: str  # the bounds as text, such as "10 classes: 0 … 9" or "numbers from 0 are needed"
    at: Any  # the checked argument, named in the error: a tensor, an array or a list
    of: Any  # the tensor whose size sets the bound, or None
    ignored: int | None = None  # a value that is always allowed, such as `ignore_index`
    role: str = "index"  # shown if the argument has no name in the user's code
    part: str = ""  # shown after the name of `at`: "[0]", ".sum(-1)"


Find = Callable[[Any, Any], Iterator[Bounded]]  # (args, kwargs) → the values to check


class Indexing(NamedTuple):
    """Describe torch functions that have the same parameters and the same check."""

    functions: str  # names, separated by spaces
    parameters: str  # names of the functions' first parameters
    at: str  # the parameter to check
    of: str = ""  # the parameter that sets the bounds: an indexed tensor or a size
    unit: str = "elements"  # shown in errors: "rows", "numbers from 0"
    dim: int | None = None  # the indexed dimension, if there is no parameter `dim`
    high: float = math.inf  # the largest allowed number, if no tensor is indexed
    wraps: bool = False  # whether negative indices count from the end
    unless: str = ""  # if this parameter is given, `at` is not checked

    def find(self, args: Any, kwargs: Any) -> Iterator[Bounded]:
        """Yield the values to check in one call, with their bounds."""
        names = self.parameters.split()
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        values, of, dim = given.get(self.at), given.get(self.of), given.get("dim", self.dim)
        # A floating-point target has class probabilities, for which torch allows any value.
        if self.unless in given or (self.of and getattr(values, "is_floating_point", bool)()):
            return
        if isinstance(of, (tuple, list)):  # a sparse tensor's size, with batch dimensions first
            of = of[values.dim() - 1 + (self.dim or 0)] if isinstance(values, Tensor) else None
        ignored = given.get("ignore_index", -100) if "ignore_index" in names else None
        bounds: tuple[float, float, str] = (0, self.high, f"{self.unit} are needed")
        if isinstance(of, Tensor):
            dim = dim if self.dim is None else min(self.dim, of.dim() - 1)
            bounds = _along(of, dim, self.unit, wraps=self.wraps)
        elif of is not None and of >= 0:
            bounds = 0, of - 1, f"{self.of} is {of}: 0 … {of - 1}"
        of = of if isinstance(of, Tensor) else None
        yield Bounded(values, *bounds, values, of, ignored, self.at)


def _along(
    of: Tensor, dim: int | None, unit: str = "elements", *, wraps: bool = True
) -> tuple[float, float, str]:
    """Return the bounds of an index along `dim`, and a text. None means the flattened tensor."""
    size = of.numel() if dim is None or not of.dim() else of.shape[dim]
    text, low, high = f"{size} {unit}", -size if wraps else 0, size - 1
    if dim is not None and of.dim() > 1 and unit == "elements":
        text += f" in dimension {dim % of.dim()}"
    return low, high, f"{text}: {low} … {high}"


_ALONG = (
    "gather scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_select "
    "index_add index_add_ index_copy index_copy_ index_reduce index_reduce_"
)
_LOSS = "input target weight size_average ignore_index"
_LEAST, _LARGEST = 5e-324, torch.finfo(torch.double).max
_FINITE = "finite numbers from 0"
_COLUMNS, _ROWS = "col_indices values size", "row_indices values size"
_BCE, _TO_1, _TARGETS = "F.binary_cross_entropy", "numbers from 0 to 1", "targets from 0 to 1"
_TABLE = (
    Indexing("F.embedding F.embedding_bag", "input weight", "input", "weight", "rows", 0),
    Indexing("F.cross_entropy F.nll_loss", _LOSS, "target", "input", "classes", 1),
    Indexing("F.multi_margin_loss", "input target", "target", "input", "classes", 1),
    Indexing(_ALONG, "input dim index", "index", "input"),
    Indexing("index_fill index_fill_", "input dim index", "index", "input", wraps=True),
    Indexing("take_along_dim", "input indices dim", "indices", "input", wraps=True),
    Indexing("take put put_", "input index", "index", "input", wraps=True),
    Indexing("F.one_hot", "tensor num_classes", "tensor", "num_classes", "numbers from 0"),
    Indexing("bincount poisson", "input", "input", unit="numbers from 0"),
    Indexing("repeat_interleave", "input repeats", "repeats", unit="numbers from 0"),
    Indexing("sparse_csr_tensor", f"crow_indices {_COLUMNS}", "col_indices", "size", dim=1),
    Indexing("sparse_csc_tensor", f"ccol_indices {_ROWS}", "row_indices", "size", dim=0),
    Indexing(_BCE, "input target", "input", unit=_TO_1, high=1),
    Indexing(_BCE, "input target", "target", unit=_TARGETS, high=1),
    Indexing("bernoulli", "input p", "input", unit=_TO_1, high=1, unless="p"),
    Indexing("multinomial", "input", "input", unit=_FINITE, high=_LARGEST),
)

_NAN = "--check nan finds where NaN is made"
_LOGITS = "These look like logits: use sigmoid or softmax first, or a loss with logits"
_NO_CLASS = "{0} often means 'no class': ignore_index={0} leaves it out"
_SCALE = "Scale them to 0 … 1, such as bytes by x / 255, or labels of -1 and 1 by (y + 1) / 2"
_FROM_1 = "They are 1 to {}: counting starts at 0, so perhaps subtract 1"
_PADDING = "Only {} is too large: perhaps a token added later, such as padding"
_FROM_END = "Negative indices do not count from the end here"


@cache
def finders() -> dict[Any, list[Find]]:
    """Map torch's functions and methods to the `Find` functions for their arguments."""
    rows: list[tuple[str, Find]] = [(row.functions, row.find) for row in _TABLE]
    rows.append(("__getitem__ __setitem__ index_put index_put_", _of_subscript))
    rows += [("multinomial", _of_sums), ("sparse_coo_tensor", _of_sparse)]
    found: dict[Any, list[Find]] = {}
    for functions, find in rows:
        for name in functions.split():
            for owner in (F,) if name.startswith("F.") else (torch, Tensor):
                if function := getattr(owner, name.removeprefix("F."), None):
                    found.setdefault(function, []).append(find)
    return found


def _of_subscript(args: Any, kwargs: Any) -> Iterator[Bounded]:
    """Yield the indices of ``x[…]``, ``x[…] = …`` and `index_put`."""
    of, key = args[0], args[1] if len(args) > 1 else kwargs["indices"]
    if type(key) is list and key and isinstance(key[0], list):
        return  # depending on torch's version, nested lists are one index or several
    several = type(key) is tuple or (type(key) is list and isinstance(next(iter(key), 0), Tensor))
    items, dim = [*map(_index_item, key if several else (key,))], 0
    for given, index, dims in items:
        if given is Ellipsis:
            dim += of.dim() - sum(item[2] for item in items)
        elif index is not None and dim < of.dim():
            yield Bounded(index, *_along(of, dim), given, of)
        dim += dims


def _of_sums(args: Any, kwargs: Any) -> Iterator[Bounded]:
    """Yield the sums of the probabilities, because `multinomial` divides by these sums."""
    of = args[0] if args else kwargs["input"]
    sums, bound = of.sum(-1, dtype=torch.double), "a sum above 0 is needed"
    yield Bounded(sums, _LEAST, math.inf, bound, of, None, role="input", part=".sum(-1)")


def _of_sparse(args: Any, kwargs: Any) -> Iterator[Bounded]:
    """Yield a sparse tensor's indices for each dimension. torch does not check these indices."""
    given = dict(zip(("indices", "values", "size"), args, strict=False)) | kwargs
    of = given.get("indices", ())
    for dim, (row, size) in enumerate(zip(of, given.get("size", ()), strict=False)):
        bound = f"size[{dim}] is {size}: 0 … {size - 1}"
        yield Bounded(_index_item(row)[1], 0, size - 1, bound, of, None, part=f"[{dim}]")


def _index_item(item: Any) -> tuple[Any, Tensor | None, int]:
    """Return a subscript's item, its index tensor or None, and the number of indexed dimensions."""
    if item is None or item is Ellipsis or type(item) is bool:
        return item, None, 0
    if type(item) is list or type(item).__module__ == "numpy":
        return item, *_index_item(torch.as_tensor(item, device="cpu"))[1:]
    if isinstance(item, Tensor) and item.dtype not in (torch.bool, torch.uint8):
        return item, item, 1
    return item, None, item.dim() if isinstance(item, Tensor) else 1


def find_bad_value(finds: list[Find], args: Any, kwargs: Any) -> Exception | None:
    """Return the error for the first value that is out of bounds; None if there is none."""
    with uncounted(), torch._C.DisableTorchFunction():
        for bounded in (bounded for find in finds for bounded in find(args, kwargs)):
            if text := _described(bounded, args, kwargs):
                is_float = bounded.values.is_floating_point()
                return CheckedValueError(text) if is_float else CheckedIndexError(text)
    return None


def _described(bounded: Bounded, args: Any, kwargs: Any) -> str:
    """Return the error text for the first value out of bounds; empty if there is none."""
    values, low, high = bounded.values, bounded.low, bounded.high
    if not readable(values) or values.dtype == torch.bool or values.is_complex():
        return ""
    # Stack minimum and maximum, so that the host waits once. If a value is NaN, both are NaN.
    ends = torch.stack(torch.aminmax(values.detach())).tolist()
    if low <= ends[0] and ends[1] <= high:
        return ""
    values = values.detach().cpu()
    values = values.double() if values.is_floating_point() else values  # the bounds are doubles
    bad = ~((values >= low) & (values <= high)) & (values != bounded.ignored)
    if not bad.any():
        return ""
    place, wrong, value = first(values, bad)
    call = RunningCall(args, kwargs)
    owner = call.name(bounded.of) if bounded.of is not None else None
    has = "" if owner is None else f"{owner} has " if owner else "there are "
    name = f"{call.name(bounded.at) or f'the {bounded.role}'}{bounded.part}{place}"
    shown = f"{value:.6g}" if isinstance(value, float) else value
    text = f"{call.expression}{name} = {shown}, but {has}{bounded.bound}"
    text += f"; {wrong} of {values.numel()} are out of range" * (wrong > 1)
    same = bool((values[bad] == value).all())
    return f"{text}. {_cause(bounded, value, ends, same=same)}".removesuffix(". ")


def _cause(bounded: Bounded, value: float, ends: list[float], *, same: bool) -> str:
    """Return the likely cause, or "". `same` tells whether all bad values equal `value`."""
    index, above = not bounded.values.is_floating_point(), value - bounded.high
    indexed = index and bounded.of is not None and " classes: " not in bounded.bound
    causes = (
        (_NAN, math.isnan(value)),
        (_SCALE, bounded.bound.startswith(_TARGETS)),
        (_LOGITS, bounded.bound.startswith((_TO_1, _FINITE)) and ends[0] < 0 < ends[1]),
        (_NO_CLASS, same and bounded.ignored is not None and value in (-1, 255)),
        (_FROM_1, same and above == ends[0] == 1),
        (_PADDING, same and above > 0 and " rows: " in bounded.bound),
        (_FROM_END, same and indexed and value < 0 == bounded.low),
    )
    return next((text.format(value) for text, applies in causes if applies), "")


def readable(value: Any) -> bool:
    """Whether `value` is a plain tensor whose elements can be read now; False within `vmap`."""
    if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
        return False
    if value.is_meta or is_functorch_wrapped_tensor(value) or not value.numel():
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def first(values: Tensor, wrong: Tensor) -> tuple[str, int, Any]:
    """Return the first wrong value's position ``"[3, 7]"``, how many are wrong, and the value."""
    places = wrong.nonzero()
    place = places[0].tolist()
    return str(place) if place else "", len(places), values[tuple(place)].item()


class RunningCall:
    """Find the user's expressions for the running torch call and for the call's arguments."""

    def __init__(self, args: Any, kwargs: Any) -> None:
        trace: TracebackType | None = None
        for frame, line in walk_stack(sys._getframe(1)):
            trace = TracebackType(trace, frame, frame.f_lasti, line)
        found = next(iter(failed_frames(trace)), None)
        self.expression, self._names = "", dict[int, str]()
        if found is not None and found.failed is not None:
            text = found.text(found.failed)
            self.expression = f"{text}: " if len(text) <= _LONG else f"{text[:_LONG]}…: "
            self._names = _variables(found, found.failed)
            if found.direct:
                given = tree_leaves((args, kwargs))
                self._names |= _results(found, found.failed, given, self._names)
                self._names |= _subscripts(found, found.failed, args)

    def name(self, value: Any) -> str:
        """Return the user's expression for an argument; empty if unknown."""
        return self._names.get(id(value), "")


def _variables(frame: FailedFrame, failed: ast.AST) -> dict[int, str]:
    """Map ids to names, for variables in the expression `failed` and for tensors of its modules."""
    names: dict[int, str] = {}
    for node in (node for node in ast.walk(failed) if isinstance(node, NAMED)):
        value = frame.scope.value(node)
        names.setdefault(id(value), frame.text(node))
        for path, tensor in tensors_of(value) if issubclass(type(value), nn.Module) else ():
            names.setdefault(id(tensor), f"{frame.text(node)}.{path}".removesuffix(".weight"))
    return names


def _subscripts(frame: FailedFrame, failed: ast.AST, args: Any) -> dict[int, str]:
    """Map the ids of the items in a subscript to the items' expressions."""
    if not isinstance(failed, ast.Subscript) or len(args) < 2:
        return {}
    nodes = failed.slice.elts if isinstance(failed.slice, ast.Tuple) else [failed.slice]
    items = args[1] if type(args[1]) is tuple else (args[1],)
    if len(nodes) != len(items):
        return {}
    return {id(i): bracketed(n, frame.text(n)) for i, n in zip(items, nodes, strict=True)}


def _results(
    frame: FailedFrame, failed: ast.AST, given: list[Any], known: dict[int, str]
) -> dict[int, str]:
    """Map ids of unnamed tensors to the expressions that made the tensors; empty if uncertain."""
    done = operation(failed, Reader(frame))
    parts = () if done is None else done.parts
    if any(own(part.value).get("_modules") for part in parts):
        return {}  # a submodule, not the user's code, may have made the tensors
    texts = [bracketed(p.node, p.text) for p in parts if p.value is None and p.kind != "module"]
    # A Parameter is a weight of an unnamed module, not the value of an expression in the code.
    given = [g for g in given if isinstance(g, Tensor) and not isinstance(g, nn.Parameter)]
    lost = [id(each) for each in given if id(each) not in known]
    return dict(zip(lost, texts, strict=True)) if len(lost) == len(texts) else {}
