"""Tell which operands of one of TensorFlow's operations its kernel takes in host memory."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry


def is_function(operation: str) -> bool:
    """Whether it is a call of a `tf.function`."""
    return op_def_registry.get(operation) is None


def in_host_memory(operation: str, kind: str, attributes: Sequence[Any]) -> set[int]:
    """The numbers of those operands, on a device of this kind (``"GPU"``): shapes, axes, paths."""
    given = dict(zip(attributes[::2], attributes[1::2], strict=True))
    kernel = next((k for k in _kernels(operation, kind) if _takes(k, given)), None)
    if kernel is None or not kernel.host_memory_arg:
        return set()
    found: set[int] = set()
    number = 0
    for argument in op_def_registry.get(operation).input_arg:
        many = int(given.get(argument.number_attr, 1)) if argument.number_attr else 1
        if argument.type_list_attr:
            many = len(given.get(argument.type_list_attr, ()))
        if argument.name in kernel.host_memory_arg:
            found.update(range(number, number + many))
        number += many
    return found


@lru_cache(maxsize=512)
def _kernels(operation: str, kind: str) -> list[Any]:
    """Those of a kind of device, the one that TensorFlow prefers first."""
    every = kernels.get_registered_kernels_for_op(operation).kernel
    usual = [k for k in every if k.device_type in (kind, "DEFAULT") and not k.label]
    return sorted(usual, key=lambda k: (k.device_type == "DEFAULT", -k.priority))


def _takes(kernel: Any, given: dict[str, Any]) -> bool:
    return all(
        tf.dtypes.as_dtype(given[limit.name]).as_datatype_enum in limit.allowed_values.list.type
        for limit in kernel.constraint
        if limit.name in given and limit.allowed_values.list.type
    )
