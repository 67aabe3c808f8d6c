"""Compare two arrays on the host: tensors of torch, or NumPy's, into which all others are made."""

import cmath
import math
import sys
from typing import Any

from gpumagic.usercode.values import is_tensor, torch_here

# Relative and absolute, as torch.testing has them; of 8 bits it has none of its own.
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
# Numbers that are compared at a time: wide copies of all could be eight times its memory.
_PART = 2**22


def alike(one: Any, other: Any) -> tuple[Any, Any]:
    """Two results as arrays of one library: tensors where one of them is, else NumPy's."""
    library = torch_here() if is_tensor(one) or is_tensor(other) else sys.modules["numpy"]
    return library.asarray(one), library.asarray(other)


def dtype_of(array: Any) -> str:
    """``"float32"``, ``"bfloat16"``, ``"int4"``."""
    return str(array.dtype).removeprefix("torch.")


def tolerance(array: Any) -> tuple[float, float] | None:
    """How far floats of an array's dtype may be apart, relative and absolute; None for others."""
    name = dtype_of(array)
    if not name.startswith(("float", "bfloat", "complex")):
        return None
    # NumPy knows nothing of the dtypes that JAX and TensorFlow bring along.
    about = torch_here() if is_tensor(array) else sys.modules.get("ml_dtypes", sys.modules["numpy"])
    info = about.finfo(array.dtype)
    relative, absolute = _TOLERANCES.get(name, (0.0, 0.0))
    return max(relative, float(info.eps)), max(absolute, float(info.tiny))


def same(one: Any, other: Any) -> bool:
    """Whether all numbers are equal."""
    if is_tensor(one):
        return bool(one.equal(other))
    return bool(sys.modules["numpy"].array_equal(one, other))


def apart(one: Any, other: Any) -> tuple[float, float]:
    """The largest difference of finite numbers, NaN if others differ, and the largest of `one`."""
    library: Any = torch_here() if is_tensor(one) else sys.modules["numpy"]
    kind = library.complex128 if "complex" in dtype_of(one) else library.float64
    flat = one.reshape(-1), other.reshape(-1)
    largest = most = 0.0
    for start in range(0, math.prod(one.shape), _PART):
        x, y = (library.asarray(each[start : start + _PART], dtype=kind) for each in flat)
        usual = library.isfinite(x) & library.isfinite(y)
        if not library.allclose(x[~usual], y[~usual], equal_nan=True):
            return math.nan, most
        # Zeros make no difference to either.
        x, y = library.where(usual, x, 0.0), library.where(usual, y, 0.0)
        largest = max(largest, float(abs(x - y).max()))
        most = max(most, float(abs(x).max()))
    return largest, most


def numbers_apart(one: complex, other: complex) -> tuple[float, float]:
    """The same of two numbers of Python's."""
    if cmath.isfinite(one) and cmath.isfinite(other):
        return abs(one - other), abs(one)
    both = one == other or (cmath.isnan(one) and cmath.isnan(other))
    return (0.0 if both else math.nan), 0.0
