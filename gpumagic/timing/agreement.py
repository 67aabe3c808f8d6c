"""Compare the results of each device with those of the first.

Integers and bools must be equal, and NaN equals NaN. Floats may differ by torch.testing's
tolerances of their dtype, relative to the largest number in the tensor: the rounding error of a sum
is proportional to its terms (Higham, "Accuracy and Stability of Numerical Algorithms", 3.1). A GPU
that computes in TF32 is allowed TF32's precision. Python's floats mostly come from float32 and
count as such.
"""

import cmath
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.device import CPU, here
from gpumagic.display.units import size
from gpumagic.frameworks.framework import FrameworksOn
from gpumagic.timing.timing import Agreement
from gpumagic.usercode.values import MISSING, comes_from, is_tensor, torch_here

# Relative and absolute, from torch.testing, which has none for 8-bit floats.
_TOLERANCES = {
    "float16": (1e-3, 1e-5),
    "bfloat16": (1.6e-2, 1e-5),
    "float32": (1.3e-6, 1e-5),
    "float64": (1e-7, 1e-7),
    "complex32": (1e-3, 1e-5),
    "complex64": (1.3e-6, 1e-5),
    "complex128": (1e-7, 1e-7),
}
FLOAT32 = _TOLERANCES["float32"]
# Numbers compared at a time: wider copies of a whole array could take eight times its memory.
_PART = 2**22


def alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Return two results as arrays of one library: tensors if one of them is, else NumPy's."""
    library = torch_here() if is_tensor(one) or is_tensor(other) else sys.modules["numpy"]
    return library.asarray(one), library.asarray(other)


def dtype_of(array: Any) -> str:
    """``"float32"``, ``"bfloat16"``, ``"int4"``."""
    return str(array.dtype).removeprefix("torch.")


def tolerance(array: Any) -> tuple[float, float] | None:
    """Return the relative and absolute tolerance of a dtype; None if it is no float."""
    name = dtype_of(array)
    if not name.startswith(("float", "bfloat", "complex")):
        return None
    # NumPy does not know the dtypes that JAX and TensorFlow add.
    about = torch_here() if is_tensor(array) else sys.modules.get("ml_dtypes", sys.modules["numpy"])
    info = about.finfo(array.dtype)
    relative, absolute = _TOLERANCES.get(name, (0.0, 0.0))
    return max(relative, float(info.eps)), max(absolute, float(info.tiny))


def array_differences(one: Any, other: Any) -> tuple[float, float]:
    """Return the largest difference of finite numbers (NaN if others differ) and largest number."""
    library: Any = torch_here() if is_tensor(one) else sys.modules["numpy"]
    kind = library.complex128 if "complex" in dtype_of(one) else library.float64
    flat = one.reshape(-1), other.reshape(-1)
    largest = most = 0.0
    for start in range(0, math.prod(one.shape), _PART):
        x, y = (library.asarray(each[start : start + _PART], dtype=kind) for each in flat)
        usual = library.isfinite(x) & library.isfinite(y)
        if not library.allclose(x[~usual], y[~usual], equal_nan=True):
            return math.nan, most
        # Zeros affect neither.
        x, y = library.where(usual, x, 0.0), library.where(usual, y, 0.0)
        largest = max(largest, float(abs(x - y).max()))
        most = max(most, float(abs(x).max()))
    return largest, most


def numbers_apart(one: complex, other: complex) -> tuple[float, float]:
    """Return the same for two Python numbers."""
    if cmath.isfinite(one) and cmath.isfinite(other):
        return abs(one - other), abs(one)
    both = one == other or (cmath.isnan(one) and cmath.isnan(other))
    return (0.0 if both else math.nan), 0.0


# TF32 keeps 10 bits of a float32's 23 (NVIDIA, "TensorFloat-32 in the A100 GPU").
_TF32 = 2.0**-10
# Results above this many bytes are not kept for the comparison.
_KEPT = 2**30
_DEEPEST = 20
_NUMBERS = (bool, int, float, complex)
_RANDOM = "the cell draws random numbers, which differ by device"


class Agreeing:
    """The first device's results at one value, and the worst agreement of each other one."""

    def __init__(self) -> None:
        self._at: dict[str, Any] | None = None
        self._first: tuple[str, dict[str, Any], frozenset[str]] | None = None
        self.worst: dict[str, Agreement] = {}  # of each device but the first

    def add(
        self, where: str, values: Mapping[str, Any], numbers: dict[str, Any], drawn: frozenset[str]
    ) -> None:
        """Compare an `outcome`; `drawn` are the kinds of devices whose generators were used."""
        if self._first is None or self._at != dict(values):
            self._at, self._first = dict(values), (where, numbers, drawn)
            return
        reference, expected, drew = self._first
        found = agree(reference, expected, where, numbers, drew != drawn)
        if found.same is not True:
            found = replace(found, values=dict(values))
        self.worst[where] = max(self.worst.get(where, found), found, key=_badness)

    def forget(self) -> None:
        """Free the results."""
        self._first = None


def _badness(found: Agreement) -> tuple[int, float]:
    return {True: 0, None: 1, False: 2}[found.same], found.largest or 0.0


def agree(
    reference: str, expected: Mapping[str, Any], where: str, found: Mapping[str, Any], drawn: bool
) -> Agreement:
    """Whether two devices gave the same `outcome`; random numbers (`drawn`) may differ."""
    loose = _may_use_tf32(reference) or _may_use_tf32(where)
    differences: list[_Difference] = []
    skipped = []
    try:
        for name in dict.fromkeys((*expected, *found)):
            one, other = expected.get(name, MISSING), found.get(name, MISSING)
            if large := [each for each in (one, other) if isinstance(each, Skipped)]:
                skipped.append(f"{name} ({size(large[0].nbytes)})")
            elif one is MISSING or other is MISSING:
                absent = where if other is MISSING else reference
                differences.append(_Difference(name, math.inf, f"{name} is missing on {absent}"))
            else:
                differences.append(_compare(name, one, other, loose, where, reference))
    except Exception as error:  # noqa: BLE001  a comparison must never cost the measurement
        faults.keep("comparing the numbers of two devices", error)
        reason = f"comparing raised {type(error).__name__}"
        return Agreement(where, reference, None, reason=reason)
    reason = f"too large to keep: {', '.join(skipped)}" if skipped else ""
    if not differences:
        return Agreement(where, reference, None, reason=reason or "the code gives no numbers")
    worst = max(differences, key=lambda d: d.excess)
    if worst.excess > 1:
        same, reason = (None, _RANDOM) if drawn else (False, worst.reason)
        return Agreement(where, reference, same, worst.largest, worst.name, reason)
    most = max(differences, key=lambda d: d.largest or 0.0)
    return Agreement(where, reference, True, most.largest, most.name, reason)


class _Difference(NamedTuple):
    """The difference of one result; `excess` is in units of the tolerance."""

    name: str
    excess: float
    reason: str
    largest: float | None = None


def _compare(
    name: str, one: Any, other: Any, loose: bool, where: str, reference: str
) -> _Difference:
    if isinstance(one, _NUMBERS) and isinstance(other, _NUMBERS):
        if {type(one), type(other)} & {float, complex}:
            return _within(name, numbers_apart(one, other), FLOAT32, loose)
        return _exact(name, float(min(abs(one - other), 2**1000)))
    a, b = alike(one, other)
    for word, left, right in (
        ("shape", tuple(a.shape), tuple(b.shape)),
        ("dtype", dtype_of(a), dtype_of(b)),
    ):
        if left != right:
            said = f"{name} has {word} {right} on {where}, {left} on {reference}"
            return _Difference(name, math.inf, said)
    if (allowed := tolerance(a)) is not None:
        loose = loose and dtype_of(a) in ("float32", "complex64")
        return _within(name, array_differences(a, b), allowed, loose)
    # Large integers may be equal as floats.
    return _exact(name, 0.0 if bool((a == b).all()) else array_differences(a, b)[0] or 1.0)


def _exact(name: str, apart: float) -> _Difference:
    return _Difference(name, math.inf if apart else 0.0, f"{name} differs by {apart:.2g}", apart)


def _within(
    name: str, found: tuple[float, float], allowed: tuple[float, float], loose: bool
) -> _Difference:
    """Return the difference of floats against the tolerance `allowed`, or TF32's if `loose`."""
    (apart, most), (rtol, atol) = found, allowed
    if loose:
        rtol = max(rtol, _TF32)
    if math.isnan(apart):
        return _Difference(name, math.inf, f"{name} is infinite or NaN in other places")
    return _Difference(name, apart / (atol + rtol * most), f"{name} differs by {apart:.2g}", apart)


def _may_use_tf32(where: str) -> bool:
    # cuDNN, JAX and TensorFlow use it by default.
    return "cuda" in where and not any(device.virtual for device in here(memory=False))


@dataclass(frozen=True)
class Skipped:
    """A result that was not kept, and its size in bytes."""

    nbytes: int


def outcome(
    globals: dict[str, Any],
    assigned: Iterable[str],
    value: Any,
    most: int = _KEPT,
    others: FrameworksOn | None = None,
) -> dict[str, Any]:
    """Return numbers and tensors on the CPU, at most `most` bytes in all, by their names in code.

    Arrays of other frameworks (`others`) become NumPy's.
    """
    found: dict[str, Any] = {}
    others = others or FrameworksOn(CPU)
    values = {name: globals[name] for name in assigned if name in globals}
    seen: dict[int, Any] = {}
    for first, each in [*values.items(), ("Out", value)]:
        for name, item in _leaves(first, each, seen, others):
            if isinstance(item, _NUMBERS):
                found[name] = item
                continue
            try:
                nbytes = _nbytes(item, others)
                found[name] = _on_host(item, others) if nbytes <= most else Skipped(nbytes)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                continue  # it has no data, as a tensor on the meta device
            most -= nbytes if nbytes <= most else 0
    return found


def _leaves(
    name: str, value: Any, seen: dict[int, Any], others: FrameworksOn, depth: int = 0
) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind in _NUMBERS:
        yield name, value
        return
    if id(value) in seen or depth > _DEEPEST:
        return
    seen[id(value)] = value
    numpy: Any = sys.modules.get("numpy")
    if is_tensor(value) or others.of(value) is not None:
        yield name, value
    elif numpy is not None and issubclass(kind, (numpy.generic, numpy.ndarray)):
        if value.dtype.kind in "biufc":
            one = issubclass(kind, numpy.generic)
            yield name, value.item() if one else value
    else:
        try:
            parts = [(f"{name}{step}", item) for step, item in _parts(value, kind, others)]
        except Exception:  # noqa: BLE001  the user's own class, which is not to be shown
            return
        for path, item in parts:
            yield from _leaves(path, item, seen, others, depth + 1)


def _parts(value: Any, kind: type, others: FrameworksOn) -> Iterable[tuple[str, Any]]:
    if issubclass(kind, (list, tuple)):
        names = getattr(kind, "_fields", None)
        return [(f".{names[n]}" if names else f"[{n}]", v) for n, v in enumerate(value)]
    if issubclass(kind, dict):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if comes_from(kind, "torch.nn.Module"):
        return [(f".{key}", item) for key, item in value.state_dict(keep_vars=True).items()]
    if is_dataclass(kind):
        return [(f".{f.name}", getattr(value, f.name, None)) for f in fields(kind)]
    split = others.parts(value)
    return [] if split is None else [(f"[{n}]", item) for n, item in enumerate(split[0])]


def _nbytes(item: Any, others: FrameworksOn) -> int:
    if is_tensor(item):
        # A sparse tensor counts as dense.
        return int(item.numel() * item.element_size())
    framework = others.of(item)
    return int(item.nbytes) if framework is None else framework.nbytes(item)


def _on_host(item: Any, others: FrameworksOn) -> Any:
    if not is_tensor(item):
        numpy: Any = sys.modules["numpy"]
        framework = others.of(item)
        # A copy, since a computation may donate the original's memory.
        return numpy.array(item if framework is None else framework.copy(item, CPU))
    torch = torch_here()
    tensor = item
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = tensor.detach().to("cpu", copy=True)
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        return plain.resolve_conj().resolve_neg()
