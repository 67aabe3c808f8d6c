"""Rewrite calls of torch as they are made, to ones that need less memory; for dry runs alone."""

import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from gpumagic.usercode.files import is_users

_PAIRS = {"sub", "rsub", "mul", "add", "div", "eq", "mse_loss", "l1_loss", "smooth_l1_loss"}
# What may stand between the product of queries and keys and that with the values; and between the
# differences of all pairs and their sum.
_SCORES = {
    "mul",
    "div",
    "truediv",
    "add",
    "masked_fill",
    "where",
    "softmax",
    "dropout",
    "to",
    "float",
}
_DISTANCES = {"pow", "square", "abs", "mul"}
_SUMS = {"sum", "norm", "vector_norm"}
_LOOKS = {"get", "size", "dim", "type", "numel", "is_contiguous"}
# An intermediate result so many times larger than both operands is worth avoiding.
_LARGER = 4


@dataclass
class _Later:
    """Hold a call that is not made yet, and those made with its result."""

    inputs: tuple[Tensor, Tensor]
    calls: list[tuple[str, Callable[[Any], Any], tuple[Any, ...]]]  # with their other arguments

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def make(self) -> Any:
        result: Any = None
        for _, call, _ in self.calls:
            result = call(result)
        return result

    def options(self) -> Iterator[str]:
        """Yield what `scaled_dot_product_attention` is to be told besides its operands."""
        width = self.inputs[0].shape[-1]
        scale = 1.0
        for name, _, others in self.calls[1:]:
            by = others[0] if others and isinstance(others[0], int | float) else 1
            if name == "dropout" and others[1:2] == (True,):
                yield f"dropout_p={by}"
            elif name in ("masked_fill", "where", "add"):
                yield "attn_mask=…"
            elif name in ("div", "truediv", "mul"):
                scale *= by if name == "mul" else 1 / by
        if not math.isclose(scale, width**-0.5, rel_tol=1e-3):
            yield f"scale={scale:.4g}"


class Rewrites(TorchFunctionMode):
    """Call torch in other ways within; note in words what was rewritten."""

    MARK = ": try "
    """Between the name of a rewrite and its words, in a note."""

    def __init__(self, note: Callable[[str], object], name: str = "") -> None:
        super().__init__()
        self._note, self._name = note, name
        # By the id of what stands for the result, which it keeps.
        self._later: dict[int, tuple[Tensor, _Later]] = {}

    @classmethod
    def only(cls, name: str) -> Callable[[Callable[[str], object]], "Rewrites"]:
        """Return what makes the context of one rewrite."""
        return partial(cls, name=name)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "").strip("_")
        if self._later and name not in _LOOKS:
            if (found := self._goes_on(func, name, args, kwargs)) is not None:
                return found
            args, kwargs = tree_map(self._made, (args, kwargs))
        if (later := self._avoided(func, name, args)) is not None:
            return later
        if name in _PAIRS and self._is_on("broadcast"):
            args = self._aligned(args)
        elif name == "cat" and self._name == "cat":
            args = ([each.cpu() for each in args[0]], *args[1:])
        elif name in ("to", "cuda") and self._is_on("float") and _is_double(args[0]):
            self._told("float", f"`.float()` before `.{name}(…)`: float64 takes twice the memory")
            args = (args[0].float(), *args[1:])
        return func(*args, **kwargs)

    def _is_on(self, name: str) -> bool:
        return self._name in ("", name)

    def _told(self, name: str, words: str) -> None:
        self._note(f"{name}{self.MARK}{words}")

    def _avoided(self, func: Any, name: str, args: tuple[Any, ...]) -> Tensor | None:
        """Put off a product or difference much larger than its operands."""
        product = _product(name, args) if self._is_on("attention") else None
        pair = product or (args[:2] if name == "sub" and self._is_on("cdist") else None)
        if not pair or not all(isinstance(t, Tensor) and t.dim() >= 3 for t in pair):
            return None
        x, y = pair
        if product:
            shape = torch.Size((*x.shape[:-1], y.shape[-1]))
        elif x.shape[-2] == 1 == y.shape[-3] and x.shape[-1] == y.shape[-1]:
            x, y = x.squeeze(-2), y.squeeze(-3)
            shape = torch.broadcast_shapes(pair[0].shape, pair[1].shape)
        else:
            return None
        if shape.numel() < _LARGER * max(x.numel(), y.numel()):
            return None
        first = "product" if product else "sub"
        return self._put_off(x, shape, _Later((x, y), [(first, lambda _: func(*args), ())]))

    def _put_off(self, like: Tensor, shape: Any, later: _Later) -> Tensor:
        stands = like.detach().new_empty(()).expand(shape)
        self._later[id(stands)] = stands, later
        return stands

    def _made(self, value: Any) -> Any:
        """Return the result of a call that was put off; any other value as it is."""
        return self._later[id(value)][1].make() if id(value) in self._later else value

    def _goes_on(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """Return what a call with a result that was put off gives; None if it must be made now."""
        at = next((n for n, each in enumerate(args) if id(each) in self._later), None)
        if at is None:
            return None
        stands, later = self._later[id(args[at])]
        (x, y), first, shape = later.inputs, later.names[0], [*stands.shape]
        others = (*args[:at], *args[at + 1 :], *kwargs.values())
        if name in (_DISTANCES if first == "sub" else _SCORES):
            call = lambda made: func(*args[:at], made, *args[at + 1 :], **kwargs)  # noqa: E731
            new = _Later((x, y), [*later.calls, (name, call, others)])
            if func.__name__.strip("_") + "_" == func.__name__:
                self._later[id(stands)] = stands, new
                return stands
            return self._put_off(x, shape, new)
        last = {-1, stands.dim() - 1}
        if first == "sub" and name in _SUMS and any(_one(each) in last for each in others):
            return self._distances(x, y, [*later.names, name], shape)
        pair = _product(name, args)
        if pair and pair[0] is stands and "softmax" in later.names:
            return self._attention(later, x, y.mT, pair[1], shape)
        return None

    def _attention(self, later: _Later, q: Tensor, k: Tensor, v: Tensor, shape: Any) -> Tensor:
        operands = [_named(t) or old for t, old in ((q, "q"), (k, "k"), (v, "v"))]
        if flat := q.dim() == 3:  # the kernels that keep no scores take four dimensions
            operands, (q, k, v) = (
                [f"{name}[None]" for name in operands],
                (q[None], k[None], v[None]),
            )
        given = ", ".join([*operands, *dict.fromkeys(later.options())])
        causal = "; for a causal mask is_causal=True" if "attn_mask" in given else ""
        call = f"F.scaled_dot_product_attention({given}){'[0]' * flat}"
        self._told("attention", f"`{call}`, which keeps no scores, {shape}{causal}")
        found = functional.scaled_dot_product_attention(q, k, v)
        return found[0] if flat else found

    def _distances(self, x: Tensor, y: Tensor, names: list[str], shape: list[int]) -> Tensor:
        call = f"torch.cdist({_named(x) or 'x'}, {_named(y) or 'y'}{', p=1' * ('abs' in names)})"
        if names[-1] == "sum" and "abs" not in names:
            call += ".square()"
        self._told("cdist", f"`{call}` in place of all differences, {shape}")
        return torch.cdist(x, y)

    def _aligned(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Give two operands, [N] and [N, 1], one shape; else they broadcast to [N, N].

        One that the code itself has made from the other shape is meant so.
        """
        if len(args) < 2 or not all(isinstance(each, Tensor) for each in args[:2]):
            return args
        (one, two), more = args[:2], args[2:]
        if one.numel() != two.numel() or one.numel() < 2 or one.dim() == two.dim():
            return args
        column = one if one.dim() > two.dim() else two
        if column.shape[-1] != 1 or column._is_view():
            return args
        names = [_name_of(one), _name_of(two)]
        each, other = (one, two) if names[0] and not names[1] else (two, one)
        name = (names[1] or names[0]) or "x"
        code = f"{name}.view({', '.join(map(str, other.shape))})"
        shapes = f"{[*one.shape]} and {[*two.shape]} broadcast to {one.numel():,} × {two.numel():,}"
        self._told("broadcast", f"`{code}` for `{name}`: {shapes}")
        new = each.view(other.shape)
        return (new, two, *more) if each is one else (one, new, *more)


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, tuple | list) and len(value) == 1 else value


def _product(name: str, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
    """Return the two matrices that a call multiplies; None for any other call."""
    if name in ("matmul", "bmm"):
        return args[0], args[1]
    letters = re.split(",|->", args[0].replace(" ", "")) if name == "einsum" else []
    if len(letters) != 3 or len(args) != 3:
        return None
    (*one, row, inner), (*two, near, far), (*out, first, second) = map(list, letters)
    if not one == two == out or first != row:
        return None
    if (near, far) == (second, inner):
        return args[1], args[2].mT
    return (args[1], args[2]) if (near, far) == (inner, second) else None


def _variables() -> dict[str, Tensor]:
    """Return the tensors that the user's innermost frame knows by name."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    names = {**frame.f_globals, **frame.f_locals}
    return {name: each for name, each in names.items() if isinstance(each, Tensor)}


def _name_of(value: Any) -> str:
    return next((name for name, each in _variables().items() if each is value), "")


def _named(value: Tensor) -> str:
    """Return code for a tensor: a variable that is it, or of which it is the transpose."""
    for name, each in _variables().items():
        if each.dim() >= 2 and each.untyped_storage()._cdata == value.untyped_storage()._cdata:
            if _place(each) == _place(value):
                return name
            if _place(each.mT) == _place(value):
                return f"{name}.mT"
    return ""


def _place(value: Tensor) -> tuple[Any, ...]:
    return value.storage_offset(), value.shape, value.stride()
