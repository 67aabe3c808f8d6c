"""Ask JAX's compiler what a call would need, by the shapes of its arguments.

Nothing is computed and no array is read; the Python of the function runs once, as for any `jit`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import jax
import numpy
from jax.sharding import SingleDeviceSharding
from jax.tree_util import register_static, tree_flatten, tree_leaves, tree_map

Failed = jax.errors.ConcretizationTypeError
"""The errors of code that asks for a value, which depends on data."""


@dataclass(frozen=True)
class Compiled:
    """Record a compiled call; bytes are those on each device that it runs on."""

    arguments: int
    outputs: int
    temporary: int
    aliased: int  # of the outputs: in the memory of arguments that are given away
    result: Any  # shapes, in what the function returns
    jitted: bool  # by the user
    platform: str  # that it was compiled for: "cpu", "gpu"


def is_abstract(value: object) -> bool:
    """Whether it is a shape and a dtype without data."""
    return isinstance(value, jax.ShapeDtypeStruct)


def is_jitted(function: object) -> bool:
    """Whether JAX compiles it: by `jax.jit`, or by that of Flax or Equinox."""
    return callable(function) and hasattr(function, "lower")


def leaves(values: object) -> list[Any]:
    """Return all arrays in pytrees, and all shapes of arrays."""
    return [leaf for leaf in tree_leaves(values) if _is_array(leaf)]


@register_static
@dataclass(frozen=True, eq=False)
class _Plain:
    """Wrap a part of an Equinox module that is no array, such as a function: `jit` sees no data."""

    value: Any


def compile_call(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    own: Any = None,
) -> Compiled:
    """Compile ``function(*args, **kwargs)`` for a device of JAX's, or for where arguments are."""
    jitted = is_jitted(function)
    whole = function, tuple(args), dict(kwargs)
    with jax.default_device(own) if own is not None else nullcontext():
        if hasattr(function, "trace"):
            _, args, kwargs = tree_map(lambda leaf: _shape(leaf, own), whole)
            lowered = function.lower(*args, **kwargs)  # type: ignore[attr-defined]
        else:
            held, treedef = tree_flatten(whole)
            given = {n: _shape(leaf, own) for n, leaf in enumerate(held) if _is_array(leaf)}

            def call(arrays: dict[int, Any]) -> Any:
                filled = [arrays.get(n, leaf) for n, leaf in enumerate(held)]
                inner, args, kwargs = treedef.unflatten(filled)
                made = inner(*args, **kwargs)
                return tree_map(lambda leaf: leaf if _is_array(leaf) else _Plain(leaf), made)

            lowered = jax.jit(call).lower(given)
        of_nnx = getattr(lowered, "lowered", None)  # JAX's own, within that of Flax NNX
        compiled = (of_nnx or lowered).compile()
    told = compiled.memory_analysis()
    # The arguments as they will be come before the result.
    result = of_nnx.out_info[-1] if of_nnx else lowered.out_info
    return Compiled(
        told.argument_size_in_bytes,
        told.output_size_in_bytes,
        told.temp_size_in_bytes,
        told.alias_size_in_bytes,
        tree_map(_whole, result, is_leaf=lambda leaf: isinstance(leaf, _Plain)),
        jitted,
        (own or jax.devices()[0]).platform,
    )


def _whole(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, _Plain) else leaf


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, (jax.Array, numpy.ndarray, jax.ShapeDtypeStruct))


def _shape(leaf: Any, own: Any) -> Any:
    """Return an array's shape without its data; any other object itself."""
    if not _is_array(leaf):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    spread = sharding is not None and sharding.num_devices > 1
    if own is not None and not spread:
        sharding = SingleDeviceSharding(own)
    elif not getattr(leaf, "committed", True):
        sharding = None  # it goes where the others are
    dtype = leaf.dtype
    if isinstance(leaf, numpy.ndarray):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)
