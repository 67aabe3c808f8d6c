"""Name the variables whose arrays are copied: those that are the array, or else hold it."""

import sys
from functools import partial
from numbers import Number
from types import FrameType
from typing import Any

import jax
import numpy

from gpumagic.usercode.lines import name_in

_MOST = 4096  # leaves of a variable that are looked at


def name_of(array: Any, user: FrameType) -> str:
    """The variable in the expression of a user's frame that is an array or holds it, or nothing."""
    return name_in(user, partial(_is, array)) or name_in(user, partial(_holds, array))


def _is(array: Any, value: Any) -> bool:
    """Whether a variable's value is an array; NumPy's come here as other objects of their bytes."""
    if value is array or not (hasattr(value, "__array_interface__") and hasattr(array, "ctypes")):
        return array is not None and value is array
    ours, theirs = array.__array_interface__, value.__array_interface__
    return bool(ours["data"] == theirs["data"] and ours["shape"] == theirs["shape"])


def _holds(array: Any, value: Any) -> bool:
    """Whether a variable is a pytree with an array in it, which a copy may stand for."""
    try:
        leaves = [] if changes(value) else jax.tree.leaves(value)
    except Exception:  # noqa: BLE001  of a class of the user's
        return False
    return any(_is(array, leaf) for leaf in leaves[:_MOST]) and all(map(is_data, leaves))


def is_data(leaf: Any) -> bool:
    """Whether `device_put` takes a leaf of a pytree: a module of Equinox's may hold functions."""
    return isinstance(leaf, (jax.Array, numpy.ndarray, Number))


def changes(value: object) -> bool:
    """Whether it is an object of Flax NNX, which changes in place."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, (nnx.Variable, nnx.Pytree))
