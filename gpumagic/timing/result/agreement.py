"""Whether two devices gave the same numbers."""

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._comparison import default_tolerances

from gpumagic.display.units import size
from gpumagic.timing.result.timing import Agreement

# Results beyond this are not kept for the comparison.
_MOST = 2**30
# TF32 keeps 10 bits of a float32's 23 (NVIDIA, "TensorFloat-32 in the A100 GPU").
_TF32 = 2.0**-10
# Numbers that are compared at a time.
_PART = 2**22
_WIDE = {float: torch.float64, complex: torch.complex128}
_DEEPEST = 20
_NUMBERS = (bool, int, float, complex)
_RANDOM = "the cell draws random numbers, which differ by device"


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A result that was not kept, and its size in bytes."""

    nbytes: int


def outcome(globals: dict[str, Any], assigned: Iterable[str], value: Any) -> dict[str, Any]:
    """The numbers that code gave: in what it assigned, and in its last expression's value.

    Parameters
    ----------
    globals : dict
        Where it ran.
    assigned : iterable of str
    value : object
        Of the last expression, or None.

    Returns
    -------
    dict
        By the name that a person would write (``out[0]``; ``Out`` is the value): detached tensors
        on the CPU, numbers, and `Skipped` for what comes after the first GiB.
    """
    found: dict[str, Any] = {}
    room = _MOST
    values = [(n, globals[n]) for n in dict.fromkeys(assigned) if n in globals]
    for name, item in _leaves([*values, ("Out", value)]):
        if not isinstance(item, Tensor):
            found[name] = item
            continue
        try:
            # Of a sparse one what it takes when it is no longer sparse.
            nbytes = item.numel() * item.element_size()
            if nbytes > room:
                found[name] = Skipped(nbytes)
                continue
            found[name] = _on_host(item)
            room -= nbytes
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue  # it has no numbers to show, as a tensor on the meta device
    return found


def _leaves(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}
    stack = [(name, value, 0) for name, value in values][::-1]
    array: Any = sys.modules.get("numpy")
    while stack:
        name, value, depth = stack.pop()
        kind = type(value)
        if kind in _NUMBERS:
            yield name, value
            continue
        if id(value) in seen or depth > _DEEPEST:
            continue
        seen[id(value)] = value
        if issubclass(kind, Tensor):
            yield name, value
        elif array is not None and issubclass(kind, array.generic):
            if value.dtype.kind in "biufc":
                yield name, value.item()
        elif array is not None and issubclass(kind, array.ndarray):
            if value.dtype.kind in "biufc":
                yield name, torch.from_numpy(array.array(value))
        else:
            try:
                parts = [(f"{name}{step}", item, depth + 1) for step, item in _parts(value, kind)]
            except Exception:  # noqa: BLE001  the user's own class, which is not to be shown
                continue
            stack.extend(reversed(parts))


def _parts(value: Any, kind: type) -> Iterable[tuple[str, Any]]:
    if issubclass(kind, (list, tuple)):
        names = getattr(kind, "_fields", None)
        return [(f".{names[n]}" if names else f"[{n}]", v) for n, v in enumerate(value)]
    if issubclass(kind, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if issubclass(kind, nn.Module):
        return [(f".{key}", item) for key, item in value.state_dict(keep_vars=True).items()]
    if dataclasses.is_dataclass(kind):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(kind)]
    return ()


def _on_host(tensor: Tensor) -> Tensor:
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().to("cpu", copy=True)
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.is_quantized:
            plain = plain.dequantize()
        return plain.resolve_conj().resolve_neg()


def agree(
    reference: str,
    expected: Mapping[str, Any],
    where: str,
    found: Mapping[str, Any],
    drawn: bool,
) -> Agreement:
    """Whether `found` are the numbers of `expected`.

    Integers and bools must be equal, and NaN equals NaN. Floats may differ by torch.testing's
    tolerances of their dtype, relative to the largest number in the tensor and not to each: what a
    sum's rounding leaves is in proportion to its terms (Higham, "Accuracy and Stability of
    Numerical Algorithms", 3.1). A GPU that computes in TF32 is allowed TF32's precision. Python's
    floats come from float32 as a rule, and count as such.

    Parameters
    ----------
    reference, where : str
        Devices.
    expected, found : mapping
        What `outcome` gave on them.
    drawn : bool
        The code drew random numbers, on both, that need not be the same.

    Returns
    -------
    Agreement
    """
    try:
        return _agree(reference, expected, where, found, drawn)
    except Exception as error:  # noqa: BLE001  a comparison must never cost the measurement
        reason = f"comparing raised {type(error).__name__}"
        return Agreement(where, reference, None, reason=reason)


def _agree(
    reference: str,
    expected: Mapping[str, Any],
    where: str,
    found: Mapping[str, Any],
    drawn: bool,
) -> Agreement:
    differences: list[_Difference] = []
    skipped = []
    for name in dict.fromkeys((*expected, *found)):
        if name not in found or name not in expected:
            absent = where if name not in found else reference
            differences.append(_Difference(name, math.inf, f"{name} is missing on {absent}"))
        elif isinstance(expected[name], Skipped) or isinstance(found[name], Skipped):
            one = expected[name] if isinstance(expected[name], Skipped) else found[name]
            skipped.append(f"{name} ({size(one.nbytes)})")
        else:
            loose = _uses_tf32(reference) or _uses_tf32(where)
            differences.append(_compare(name, expected[name], found[name], loose, where, reference))
    numbers = [d for d in differences if d.largest is not None]
    wrong = [d for d in differences if d.excess > 1]
    worst = max(wrong, key=lambda d: d.excess, default=None)
    shown = worst or max(numbers, key=lambda d: d.largest or 0.0, default=None)
    largest = shown.largest if shown else None
    which = shown.name if shown else None
    if wrong and drawn:
        return Agreement(where, reference, None, largest, which, _RANDOM)
    if worst is not None:
        return Agreement(where, reference, False, largest, which, worst.reason)
    reason = f"too large to keep: {', '.join(skipped)}" if skipped else ""
    if not differences:
        return Agreement(where, reference, None, reason=reason or "the code gives no numbers")
    return Agreement(where, reference, True, largest, which, reason)


@dataclasses.dataclass(frozen=True)
class _Difference:
    """How far apart one result is: `excess` in units of what is allowed."""

    name: str
    excess: float
    reason: str = ""
    largest: float | None = None


def _compare(
    name: str, one: Any, other: Any, loose: bool, where: str, reference: str
) -> _Difference:
    if not isinstance(one, Tensor) and not isinstance(other, Tensor):
        if not {type(one), type(other)} & {float, complex}:
            apart = float(min(abs(one - other), 2**1000))
            return _Difference(name, math.inf if apart else 0.0, f"{name} differs", apart)
        wide: Any = complex if complex in (type(one), type(other)) else float
        a, b = (torch.tensor(wide(x), dtype=_WIDE[wide]) for x in (one, other))
        return _within(name, a, b, torch.float32, loose)
    a, b = (x if isinstance(x, Tensor) else torch.tensor(x) for x in (one, other))
    for word, left, right in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", a.dtype, b.dtype),
    ):
        if left != right:
            said = f"{name} has {word} {right} on {where}, {left} on {reference}"
            return _Difference(name, math.inf, said.replace("torch.", ""))
    if not (a.is_floating_point() or a.is_complex()):
        if torch.equal(a, b):
            return _Difference(name, 0.0, largest=0.0)
        return _Difference(name, math.inf, f"{name} differs", _apart(a, b)[0])
    return _within(name, a, b, a.dtype, loose)


def _within(name: str, a: Tensor, b: Tensor, dtype: torch.dtype, loose: bool) -> _Difference:
    """How far floats are apart, by what is allowed for `dtype`."""
    rtol, atol = default_tolerances(dtype)
    # torch.testing has none of its own for 8 bits.
    rtol, atol = max(rtol, torch.finfo(dtype).eps), max(atol, torch.finfo(dtype).tiny)
    if loose and dtype in (torch.float32, torch.complex64):
        rtol = max(rtol, _TF32)
    apart, most = _apart(a, b)
    if math.isnan(apart):
        return _Difference(name, math.inf, f"{name} is infinite or NaN in other places")
    return _Difference(name, apart / (atol + rtol * most), f"{name} differs by {apart:.2g}", apart)


def _apart(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest difference of finite numbers, NaN if others differ, and the largest of `a`."""
    apart = most = 0.0
    wide = _WIDE[complex if a.is_complex() else float]
    # In parts: wide copies of all of it could be eight times its memory.
    for x, y in zip(a.reshape(-1).split(_PART), b.reshape(-1).split(_PART), strict=True):
        if not x.numel():
            continue
        x, y = x.to(wide), y.to(wide)
        here = (x - y).abs().max().item()
        if not math.isfinite(here):
            usual = torch.isfinite(x) & torch.isfinite(y)
            if not torch.allclose(x[~usual], y[~usual], equal_nan=True):
                return math.nan, most
            # Zeros make no difference to either.
            x, y = x.where(usual, 0.0), y.where(usual, 0.0)
            here = (x - y).abs().max().item()
        apart, most = max(apart, here), max(most, x.abs().max().item())
    return apart, most


def _uses_tf32(where: str) -> bool:
    if "cuda" not in where or not torch.cuda.is_initialized():
        return False
    try:
        tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
        return bool(tf32) and torch.cuda.get_device_capability() >= (8, 0)
    except RuntimeError:  # torch's new and old way to set it were mixed
        return True
