"""Count TensorFlow's copies between devices, and the host's waits, at each line of the user's code.

A copy is implicit if TensorFlow's device policy "explicit" would refuse it, or if an operator
converts a NumPy array. docs/frameworks.md lists the copies that are not counted.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import constant_op, op_callbacks, op_def_registry

from gpumagic.frameworks.watching import PRINTING, Call, CopyCounting, inside_of
from gpumagic.ledger.entry import OFTEN, Count, Entry, Tally
from gpumagic.ledger.ledger_view import ADVISERS, Advice
from gpumagic.usercode.files import swap_attribute

_SOFT = "soft placement; tf.config.set_soft_device_placement(False) makes it an error"


def advise(entry: Entry) -> Advice | None:
    """Return advice on a copy, or on an operation that ran on an unwanted device; else None."""
    if entry.kind == "placement":
        where = "the CPU" if entry.destination == "cpu" else entry.destination
        return Advice(f"asked for {own(entry.source)[1:]}, but the result is on {where}: {_SOFT}")
    if entry.operator in ("operand", "assign"):
        put = f"with tf.device('{own(entry.destination)}'): … = tf.identity(…)"
        where = "in host memory" if entry.source == "cpu" else f"on {entry.source}"
        text = f"an operand is {where}: make it on {entry.destination}, or copy it once, {put}"
        return Advice(text, entry.count)
    if entry.operator == "tf.function":
        text = f"each call copies an operand: pass tensors on {entry.destination} to the function"
        return Advice(f"{text}, and make its variables there", entry.count)
    if entry.operator == "batch" and entry.calls >= OFTEN:
        there = f"tf.data.experimental.prefetch_to_device('{own(entry.destination)}')"
        return Advice(f"ds = ds.apply({there}) copies batches in advance")
    return None


def own(device: str) -> str:
    """Return TensorFlow's name for a device: ``"/GPU:1"``."""
    kind, _, number = device.partition(":")
    return f"/GPU:{number}" if kind == "cuda" else "/CPU:0"


def size_of(tensor: Any) -> int | None:
    """Return the bytes of a tensor, or of the variable whose handle is given; None if unknown."""
    shape, dtype = tensor.shape, tensor.dtype
    if dtype == tf.resource:
        # A variable's handle has one shape. An iterator's handle has none.
        held: Any = getattr(tensor._handle_data, "shape_and_type", ())
        if len(held) != 1:
            return None
        shape, dtype = tf.TensorShape(held[0].shape), tf.dtypes.as_dtype(held[0].dtype)
    elements = shape.num_elements()
    return None if elements is None else int(elements * dtype.size)


_READING = {"__float__", "__int__", "__bool__", "__index__", "__complex__"}  # read a single value
_OWN = PRINTING | _READING | {"numpy", "__array__"}  # all tensor methods that read data
# Functions that convert an array explicitly. Their copies are not counted.
_ASKED = {"constant", "convert_to_tensor_v2_with_dispatch", "from_tensors", "from_tensor_slices"}
_VARIABLES = {"_init_from_args"}  # creating a variable is an explicit conversion too
_NO_DATA = (tf.resource, tf.variant, tf.string)

ADVISERS["TensorFlow"] = advise


class TensorFlowCopies(CopyCounting):
    """Count copies and waits of threads that called `count`. `name` is `TensorFlow.name_of`."""

    framework = "TensorFlow"
    inside = staticmethod(inside_of(tf, "tensorflow_"))
    around = ("error_handler", "op_dispatch_handler", "wrapper", "wrapped")

    def __init__(self, name: Callable[[str], str]) -> None:
        super().__init__()
        self._name = name
        self._batches = weakref.WeakValueDictionary[int, Any]()  # batches of `tf.data`, by id
        # Tensors of which TensorFlow caches a copy, by the tensor's id and the copy's device.
        self._copied = weakref.WeakValueDictionary[tuple[int, str], Any]()

    @contextmanager
    def count(self, tally: Tally, strict: bool) -> Iterator[None]:
        """Count this thread's copies and waits in `tally`, within the context."""
        with super().count(tally, strict), ExitStack() as stack:
            if self._seen not in context.context().op_callbacks:  # callbacks are per thread
                op_callbacks.add_op_callback(self._seen)
                stack.callback(op_callbacks.remove_op_callback, self._seen)
            yield

    def patch(self, stack: ExitStack) -> None:
        """Until `stack` is closed, patch functions that read, convert or compute tensors."""
        for owner, name, ask in (
            (tf.__internal__.EagerTensor.__mro__[1], "_numpy", self._read),
            (constant_op, "convert_to_eager_tensor", self._convert),
            (pywrap_tfe, "TFE_Py_FastPathExecute", self._execute),
        ):
            swap_attribute(stack, owner, name, self.wrapped(getattr(owner, name), ask))

    def _read(self, tensor: Any) -> Callable[[Any, float], None] | None:
        __tracebackhide__ = True
        source = self._name(tensor.backing_device)
        call = self.called_from()
        if source == "cpu" or call is None or not self._is_data(tensor.dtype):
            return None
        asked = call.function
        name = asked.strip("_") if asked in _READING else "numpy"
        kind = "copy" if tensor.shape.rank else "wait"
        within = call.library or ("" if asked in _OWN else f"tensorflow.{asked}")
        about = {"implicit": asked not in ("numpy", "__array__"), "within": within}
        about["seconds"] = 0.0 if kind == "wait" or name == "numpy" else None
        counts = self.counts(call, kind, name, (source, "cpu"), **about)
        self.refuse(counts)

        def after(result: Any, seconds: float) -> None:
            for count in counts:
                count.add(size_of(tensor) or 0, seconds)

        return after

    def _convert(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """Count a NumPy array that becomes a tensor, unless the conversion is explicit."""
        return self._given([value]) if isinstance(value, np.ndarray) else None

    def _execute(self, ctx: Any, operation: str, name: Any, *operands: Any) -> Any:
        # Omit integers, because most are shapes or indices, which stay on the host.
        arrays = [x for x in operands if isinstance(x, np.ndarray) and x.dtype.kind in "fc"]
        return self._given(arrays)

    def _given(self, arrays: list[Any]) -> Any:
        arrays = [array for array in arrays if array.ndim]
        call = self.called_from(_VARIABLES) if arrays else None
        if call is None or call.function in _ASKED:
            return None
        return partial(self._converted, call, arrays)

    def _converted(self, call: Call, arrays: list[Any], made: Any, seconds: float) -> None:
        __tracebackhide__ = True
        first: Any = made if isinstance(made, tf.Tensor) else next(iter(made or ()), None)
        if first is not None and self._is_data(first.dtype):
            there = self._name(first.backing_device)
            counts: list[Count] = []
            for array in arrays:
                counts += self._add(call, "copy", "operand", ("cpu", there), [array.nbytes])
            self.refuse(counts)

    def _seen(
        self, operation: Any, operands: Any, attributes: Any, results: Any, *rest: Any, **of: Any
    ) -> None:
        """Count an operation's copies; TensorFlow calls this after each operation."""
        __tracebackhide__ = True
        if of.get("graph") is None:
            name = operation.decode() if isinstance(operation, bytes) else operation
            self.guarded(self._look, name, operands, results)

    def _look(self, operation: str, operands: Sequence[Any], results: Any) -> None:
        __tracebackhide__ = True
        if operation == "IteratorGetNext":
            for result in results:
                self._batches[id(result)] = result
        ran_on = _ran_on(operands, results)
        away = [each for each in operands if ran_on and _held_on(each) != ran_on]
        wanted = results and results[0].dtype not in _NO_DATA and self._asked(ran_on, operands)
        call = self.called_from() if away or wanted else None
        if call is None:
            return
        counts: list[Count] = []
        there = self._name(ran_on)
        for operand in away:
            counts += self._operand(call, operation, operand, there)
        if wanted:
            ends, nbytes = (self._name(f"/device:{wanted}"), there), map(size_of, results)
            counts += self._add(call, "placement", "soft placement", ends, [*nbytes])
        self.refuse(counts)

    def _operand(self, call: Call, operation: str, operand: Any, there: str) -> list[Count]:
        """Count a copied operand, unless TensorFlow used a cached copy."""
        ends = self._name(_held_on(operand)), there
        if op_def_registry.get(operation) is None:  # a call of a tf.function
            held = getattr(operand, "_handle_data", None) if operand.dtype == tf.resource else None
            if not (getattr(held, "shape_and_type", ()) or self._is_data(operand.dtype)):
                return []
            kind = "tf.function"
        else:
            if not self._is_data(operand.dtype) or (id(operand), there) in self._copied:
                return []
            self._copied[id(operand), there] = operand
            kind = "batch" if id(operand) in self._batches else "operand"
            kind = {"Identity": "identity", "AssignVariableOp": "assign"}.get(operation, kind)
        return self._add(call, "copy", kind, ends, [size_of(operand)])

    def _add(
        self, call: Call, kind: str, operator: str, ends: tuple[str, str], sizes: list[int | None]
    ) -> list[Count]:
        if ends[0] == ends[1]:
            return []
        within = call.library if operator == "assign" else ""  # Keras may be the caller
        about = {"implicit": operator not in ("batch", "identity"), "seconds": None}
        found = self.counts(call, kind, operator, ends, within=within, **about)
        for count in found:
            count.unsized |= None in sizes
            count.add(sum(filter(None, sizes)), None)
        return found

    def _is_data(self, dtype: Any) -> bool:
        """Whether a GPU can store tensors of this type. TensorFlow keeps int32 in host memory."""
        return dtype not in (*_NO_DATA, tf.int32)

    def _asked(self, ran_on: str, operands: Sequence[Any]) -> str:
        """Return the device that the code named, if the operation ran elsewhere; else empty."""
        asked = context.context().device_spec
        if asked is None or asked.device_type is None or asked.device_index is None:
            return ""
        wanted = f"{asked.device_type}:{asked.device_index}"
        # An operation on a variable or on a `tf.data` pipeline must run on that object's device.
        bound = any(operand.dtype in (tf.resource, tf.variant) for operand in operands)
        return "" if bound or ran_on.endswith(wanted) else wanted

    def instead(self, count: Count) -> str:
        if count.kind == "placement":
            return "name a device that exists"
        if count.destination == "cpu":
            return "read it first, by .numpy()"
        put = f"with tf.device('{own(count.destination)}'): … = tf.identity(…)"
        return f"copy it there first: {put}"


def _held_on(operand: Any) -> str:
    """Return TensorFlow's name for the device that stores a tensor, or a handle's variable."""
    return str(operand.device if operand.dtype == tf.resource else operand.backing_device)


def _ran_on(operands: Sequence[Any], results: Sequence[Any]) -> str:
    """Return TensorFlow's name for the device that ran an operation; empty if unknown."""
    if results:
        return str(results[0].device)
    bound = next((each for each in operands if each.dtype == tf.resource), None)
    return str(bound.device if bound is not None else context.context().device_name or "")
