"""Compare each device's results with the results of the first device.

Integers and bools must be equal, and NaN equals NaN. Floats may differ by torch.testing's tolerance
for their dtype. The tolerance is relative to the largest number in the tensor, because the rounding
error of a sum grows with its terms (Higham, Accuracy and Stability of Numerical Algorithms, 3.1).
"""

import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, NamedTuple

from gpumagic import faults
from gpumagic.device import CPU, here
from gpumagic.frameworks.framework import NO_OTHERS, FrameworksOn
from gpumagic.usercode.sweep import key
from gpumagic.usercode.values import (
    CONTAINERS,
    Step,
    attributes,
    comes_from,
    is_module,
    is_tensor,
    items,
    own,
    torch_here,
    walk,
    written,
)

_TOLERANCES = {  # relative and absolute tolerance; all except float8's are torch.testing's
    ("float8",): (0.25, 0.02),
    ("float16", "complex32"): (1e-3, 1e-5),
    ("bfloat16",): (1.6e-2, 1e-5),
    ("float32", "complex64"): (1.3e-6, 1e-5),
    ("float64", "complex128"): (1e-7, 1e-7),
}
_TF32 = 2.0**-10  # TF32 keeps 10 of 23 mantissa bits (NVIDIA, "TensorFloat-32 in the A100 GPU")
_PART = 2**22  # elements compared at a time, because float64 copies may be large
_KEPT = 2**30  # maximum bytes of a device's results to save for the comparison
_NUMBERS = {bool, int, float, complex}
SKIPPED: Any = object()  # the value of each result that was too large to save


@dataclass(frozen=True)
class Agreement:
    """Whether a device's results agree with the first device's, at one value of the sweep."""

    where: str  # the device
    reference: str  # the first device
    same: bool | None  # None if the results were not compared
    largest: float | None = None  # the largest absolute difference
    name: str | None = None  # the name of the result with that difference
    reason: str = ""  # why the results were not compared, or how the results differ
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's variable: {"n": 64}


class AgreementCollector:
    """Compare results with the first device's results, separately for each value of the sweep."""

    def __init__(self) -> None:
        # The key of the sweep's value, the first device, and that device's `results` and `drawn`.
        self._first: tuple[object, str, dict[str, Any], frozenset[str]] | None = None
        self.found: list[Agreement] = []

    def add(
        self, where: str, values: Mapping[str, Any], results: dict[str, Any], drawn: frozenset[str]
    ) -> None:
        """Save the first device's results; compare later devices' results with these. `drawn`
        names the CPU or GPU models that drew random numbers."""
        if self._first is None or self._first[0] != key(values):
            self._first = key(values), where, results, drawn
            return
        _, reference, expected, drew = self._first
        agreement = agree(reference, expected, where, results, drew != drawn)
        self.found.append(replace(agreement, values=dict(values)))

    def forget(self) -> None:
        self._first = None


def agree(
    reference: str, expected: Mapping[str, Any], where: str, found: Mapping[str, Any], random: bool
) -> Agreement:
    """Compare two devices' results. If `random`, the devices drew different random numbers."""
    nothing = Agreement(where, reference, None)
    # cuDNN, JAX and TensorFlow use TF32 by default, so on real GPUs TF32's tolerance applies.
    loose = "cuda" in f"{reference} {where}" and not any(gpu.virtual for gpu in here(memory=False))
    try:
        differences, large = _differences(expected, found, loose)
    except Exception as error:  # noqa: BLE001  a failed comparison must not end the measurement
        faults.keep("comparing the numbers of two devices", error)
        return replace(nothing, reason=f"comparing raised {type(error).__name__}")
    reason = f"too large to compare: {', '.join(large)}" if large else ""
    if not differences:
        return replace(nothing, reason=reason or "the code produced no numbers")
    wrong, largest, name, how = max(differences)
    nothing = replace(nothing, largest=None if math.isinf(largest) else largest, name=name)
    if wrong and random:
        return replace(nothing, reason="random numbers differ between devices")
    return replace(nothing, same=not wrong, reason=f"{name} {how}" if wrong else reason)


def _differences(
    expected: Mapping[str, Any], found: Mapping[str, Any], loose: bool
) -> tuple[list[tuple[bool, float, str, str]], list[str]]:
    """Return (differs, largest difference, name, explanation) by result, and the skipped names."""
    differences, large = [], []
    for name in dict.fromkeys((*expected, *found)):
        one, other = expected.get(name), found.get(name)
        if one is SKIPPED or other is SKIPPED:
            large.append(name)
        else:
            largest, how = _difference(one, other, loose)
            differences.append((how != "", largest, name, how))
    return differences, large


def _difference(one: Any, other: Any, loose: bool) -> tuple[float, str]:
    """Return the largest difference of two results, and how they differ ("" if they agree)."""
    if one is None or other is None:
        return math.inf, "exists on one device only"
    numpy = sys.modules.get("numpy")
    library = torch_here() if numpy is None or any(map(is_tensor, (one, other))) else numpy
    a, b = library.asarray(one), library.asarray(other)
    if (dtype_of(a), a.shape) != (dtype_of(b), b.shape):
        return math.inf, f"is {dtype_of(b)}{list(b.shape)}, not {dtype_of(a)}{list(a.shape)}"
    exact = not any(tolerance(dtype_of(a)))
    if exact and bool((a == b).all()):  # compare integers before they are rounded to floats
        return 0.0, ""
    apart, most, _ = array_differences(a, b)
    if math.isinf(apart):
        return math.inf, "is infinite or NaN at different positions"
    if exact:
        apart = apart or 1.0
        return apart, f"differs by {apart:.2g}"
    dtype = dtype_of(a) if hasattr(one, "dtype") else "float32"  # for Python numbers
    rtol, atol = tolerance(dtype, loose)
    return apart, "" if apart <= atol + rtol * most else f"differs by {apart:.2g}"


def dtype_of(array: Any) -> str:
    """Return the name of an array's dtype: ``"float32"``, ``"bfloat16"``, ``"int4"``."""
    return str(array.dtype).removeprefix("torch.")


def tolerance(dtype: str, loose: bool = False) -> tuple[float, float]:
    """Return the relative and absolute tolerance of a dtype; zeros for integers and bools."""
    known = (found for starts, found in _TOLERANCES.items() if dtype.startswith(starts))
    rtol, atol = next(known, (0.0, 0.0))
    return (_TF32 if loose and dtype in ("float32", "complex64") else rtol), atol


def array_differences(one: Any, other: Any) -> tuple[float, float, int]:
    """Return the largest difference, the largest finite number, and the difference's flat index."""
    # An infinity or NaN makes the difference infinite, unless both elements are the same.
    library: Any = torch_here() if is_tensor(one) else sys.modules["numpy"]
    kind = library.complex128 if "complex" in dtype_of(one) + dtype_of(other) else library.float64
    flat = one.reshape(-1), other.reshape(-1)
    largest, most, place = 0.0, 0.0, 0
    for start in range(0, math.prod(one.shape), _PART):
        x, y = (library.asarray(each[start : start + _PART], dtype=kind) for each in flat)
        usual = library.isfinite(x) & library.isfinite(y)
        same = (x == y) | (library.isnan(x) & library.isnan(y))
        # Replace infinities and NaN by zeros, which do not change the maxima below.
        x, y = library.where(usual, x, 0.0), library.where(usual, y, 0.0)
        apart = library.where(usual | same, abs(x - y), math.inf)
        at = int(apart.argmax())
        if apart[at] > largest:
            largest, place = float(apart[at]), start + at
        most = max(most, float(abs(x).max()), float(abs(y).max()))
    return largest, most, place


class _Numbers(NamedTuple):
    """A box for a number, or for a list of numbers, because `walk` skips bare numbers."""

    value: Any


def outcome(
    globals: dict[str, Any], assigned: Iterable[str], value: Any, others: FrameworksOn = NO_OTHERS
) -> dict[str, Any]:
    """Return a run's results by name: numbers, and CPU copies of tensors (up to 1 GiB in all)."""
    found, most = dict[str, Any](), _KEPT
    values = {name: globals[name] for name in assigned if name in globals} | {"Out": value}
    roots = [((name,), _boxed(each)) for name, each in values.items()]
    for path, item in walk(roots, lambda value: _into(value, others)):
        if type(item) is _Numbers:
            found[written(path)] = item.value
        elif _is_array(item, others):
            # A value without data, such as a tensor on the meta device, raises an error.
            with suppress(RuntimeError, TypeError, ValueError):
                nbytes = _nbytes(item, others)
                found[written(path)] = _on_host(item, others) if nbytes <= most else SKIPPED
                most -= nbytes if nbytes <= most else 0
    return found


def _into(value: Any, others: FrameworksOn) -> list[tuple[Step, Any]]:
    kind = type(value)
    if kind is _Numbers or _is_array(value, others):
        return []
    pairs: Iterable[tuple[Any, Any]]
    if is_module(value):
        state = [own(value).get(name, {}) for name in ("_parameters", "_buffers", "_modules")]
        sign, pairs = ".", [pair for held in state for pair in held.items()]
    elif issubclass(kind, dict):
        sign, pairs = "[]", dict.items(value)
    elif issubclass(kind, CONTAINERS):
        return [(step, _boxed(item)) for step, item in items(value)]
    elif is_dataclass(kind):
        sign, pairs = ".", attributes(value).items()
    else:
        held, _ = others.parts(value) or ((), None)
        sign, pairs = "[]", enumerate(held)
    return [((sign, key), _boxed(item)) for key, item in pairs]


def _boxed(value: Any) -> Any:
    if comes_from(type(value), "numpy.generic") and value.dtype.kind in "biufc":
        value = value.item()
    within = value if type(value) in (list, tuple) else (value,)
    return _Numbers(value) if within and {*map(type, within)} <= _NUMBERS else value


def _is_array(value: Any, others: FrameworksOn) -> bool:
    known = is_tensor(value) or others.of(value) is not None
    return known or (comes_from(type(value), "numpy.ndarray") and value.dtype.kind in "biufc")


def _nbytes(item: Any, others: FrameworksOn) -> int:
    if is_tensor(item):
        # The dense size, also for a sparse tensor, because the copy on the CPU is dense.
        return int(item.numel() * item.element_size())
    framework = others.of(item)
    return int(item.nbytes) if framework is None else framework.nbytes(item)


def _on_host(item: Any, others: FrameworksOn) -> Any:
    if not is_tensor(item):
        numpy: Any = sys.modules["numpy"]
        framework = others.of(item)
        # Copy the numbers, since a later JAX computation may reuse the original's memory.
        return numpy.array(item if framework is None else framework.copy(item, CPU))
    torch = torch_here()
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        plain = item.detach().to("cpu", copy=True)
        plain = plain.to_dense() if plain.layout is not torch.strided else plain
        return plain.resolve_conj().resolve_neg()
