"""Count TensorFlow's copies between devices and its waits, by the user's line.

TensorFlow silently copies an operand from another device, and keeps the copy while the tensor
lives, so each tensor counts once per device. A copy is implicit where TensorFlow's own policy
"explicit" would refuse it, except `tf.identity` and batches of `tf.data`, and where an operator
converts an array of NumPy's. Functions are read by their parts (`tensorflow_graphs`); what NumPy
reads by itself (`np.asarray(x)`) is not seen. Only reads have a time of their own.

Private parts used, and put back: callbacks of `op_callbacks`, `_numpy` of tensors,
`convert_to_eager_tensor` and `TFE_Py_FastPathExecute`.
"""

import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context
from tensorflow.python.framework import constant_op, kernels, op_callbacks, op_def_registry

from gpumagic import faults
from gpumagic.errors import ImplicitCopyError
from gpumagic.frameworks.framework import replace
from gpumagic.frameworks.tensorflow_devices import TensorFlowDevices
from gpumagic.frameworks.tensorflow_graphs import Graphs
from gpumagic.frameworks.watching import PRINTING, Call, Inside, called_from, refusal
from gpumagic.ledger.advice import ADVISERS, OFTEN, Advice, all_of_them
from gpumagic.ledger.entry import DISPLAY, LIBRARY, USER, Count, Entry, Tally, kinds
from gpumagic.usercode.files import module_of

_SOFT = "soft placement; tf.config.set_soft_device_placement(False) makes it an error"


def advise(entry: Entry) -> Advice | None:
    """Advise on what only TensorFlow does; None for any other entry."""
    if entry.kind == "placement":
        return Advice(f"{fell(entry)}: {_SOFT}", 0, 0.0, "")
    if entry.operator == "operand":
        put = f"with tf.device('{own(entry.destination)}'): … = tf.identity(…)"
        where = "NumPy's, or on the CPU" if entry.source == "cpu" else f"on {entry.source}"
        text = f"an operand is {where}: make it there, or put it there once, {put}"
        return all_of_them(entry, text)
    if entry.operator == "tf.function":
        text = f"each call copies it: give the function what is on {entry.destination}"
        return all_of_them(entry, f"{text}, and make its variables there")
    if entry.operator == "batch" and entry.calls >= OFTEN:
        there = f"tf.data.experimental.prefetch_to_device('{own(entry.destination)}')"
        return Advice(f"ds = ds.apply({there}) copies ahead", 0, 1.0, "at most: all of it")
    return None


def fell(entry: Entry) -> str:
    """``"asked for GPU:7, is on the CPU"``."""
    where = "the CPU" if entry.destination == "cpu" else entry.destination
    return f"asked for {own(entry.source)[1:]}, is on {where}"


def own(device: str) -> str:
    """Return TensorFlow's name of a device: ``"/GPU:1"``."""
    kind, _, number = device.partition(":")
    return f"/GPU:{number}" if kind == "cuda" else "/CPU:0"


def is_function(operation: str) -> bool:
    """Whether it is a call of a `tf.function`."""
    return op_def_registry.get(operation) is None


def in_host_memory(operation: str, kind: str, attributes: Sequence[Any]) -> set[int]:
    """Return the operands kept in host memory on a kind of device (``"GPU"``): shapes, axes, …"""
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
    """Return the kernels for a kind of device, the one that TensorFlow prefers first."""
    every = kernels.get_registered_kernels_for_op(operation).kernel
    usual = [k for k in every if k.device_type in (kind, "DEFAULT") and not k.label]
    return sorted(usual, key=lambda k: (k.device_type == "DEFAULT", -k.priority))


def _takes(kernel: Any, given: dict[str, Any]) -> bool:
    return all(
        tf.dtypes.as_dtype(given[limit.name]).as_datatype_enum in limit.allowed_values.list.type
        for limit in kernel.constraint
        if limit.name in given and limit.allowed_values.list.type
    )


_inside = Inside(tf, "tensorflow_")
# Functions of TensorFlow's that stand around its others.
_AROUND = {"error_handler", "op_dispatch_handler", "wrapper", "wrapped"}
_READING = {"__float__", "__int__", "__bool__", "__index__", "__complex__"}
# Functions that make a tensor of an array, as their name says.
_ASKED = {"constant", "convert_to_tensor_v2_with_dispatch", "from_tensors", "from_tensor_slices"}
_VARIABLES = {"_init_from_args"}  # a variable is made where the code says
_OWN = PRINTING | _READING | {"numpy", "__array__"}
# Operations of pipelines: what makes batches, and what a GPU's kernel too answers in host memory.
_MAKING, _ASKING = {"IteratorGetNext"}, {"OptionalHasValue", "DatasetCardinality"}
_NOTED = _MAKING | _ASKING
_NO_DATA = (tf.resource, tf.variant, tf.string)

ADVISERS["TensorFlow"] = advise
_graphs = Graphs()
# Copies that TensorFlow keeps: of which tensor, and where.
_copied: dict[tuple[int, str], "weakref.ref[Any]"] = {}


class TensorFlowCopies:
    """Count from `__enter__` to `__exit__`, on the thread that entered."""

    def __init__(self, devices: TensorFlowDevices, tally: Tally, strict: bool) -> None:
        self._devices = devices
        self._tally = tally
        self._strict = strict
        self._thread = 0
        self._stack = ExitStack()
        self._batches: dict[int, weakref.ref[Any]] = {}
        self._on_host: dict[int, weakref.ref[Any]] = {}

    def __enter__(self) -> "TensorFlowCopies":
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            op_callbacks.add_op_callback(self._seen)
            stack.callback(op_callbacks.remove_op_callback, self._seen)
            _graphs.start()
            stack.callback(_graphs.stop)
            self._stand_before_reads(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def _stand_before_reads(self, stack: ExitStack) -> None:
        owner: Any = tf.__internal__.EagerTensor.__mro__[1]
        real = owner._numpy

        def _numpy(tensor: Any) -> Any:
            __tracebackhide__ = True
            count = self._read_of(tensor)
            start = time.perf_counter()
            read = real(tensor)
            if count is not None:
                count.add(_size(tensor), time.perf_counter() - start)
            return read

        replace(stack, owner, "_numpy", _numpy)
        convert = constant_op.convert_to_eager_tensor
        execute = pywrap_tfe.TFE_Py_FastPathExecute

        def convert_to_eager_tensor(value: Any, *args: Any, **kwargs: Any) -> Any:
            __tracebackhide__ = True
            made = convert(value, *args, **kwargs)
            if isinstance(value, np.ndarray):
                self._convert([value], made, sys._getframe(1))
            return made

        def fast_path_execute(ctx: Any, operation: str, name: Any, *operands: Any) -> Any:
            __tracebackhide__ = True
            made = execute(ctx, operation, name, *operands)
            # Integers are mostly shapes and indices, which stay with the host.
            arrays = [x for x in operands if isinstance(x, np.ndarray) and x.dtype.kind in "fc"]
            if arrays:
                self._convert(arrays, made, sys._getframe(1))
            return made

        replace(stack, constant_op, "convert_to_eager_tensor", convert_to_eager_tensor)
        replace(stack, pywrap_tfe, "TFE_Py_FastPathExecute", fast_path_execute)

    def _convert(self, arrays: list[Any], made: Any, frame: FrameType) -> None:
        """Count arrays of NumPy's that an operator copies, unless the user asked for it."""
        __tracebackhide__ = True
        counts: list[Count | None] = []
        if threading.get_ident() == self._thread:
            with faults.kept("counting an array of NumPy's that TensorFlow copies"):
                call = called_from(frame, _inside, _AROUND, _VARIABLES)
                asked = call is None or call.function in _ASKED
                first: Any = made if isinstance(made, tf.Tensor) else next(iter(made or ()), None)
                for array in arrays if first is not None and not asked else ():
                    if array.ndim and self._is_data(first.dtype):
                        to = self._devices.name(first.backing_device)
                        counts.append(self._copy("operand", "cpu", to, array.nbytes))
        for count in filter(None, counts):
            self._refuse(count)

    def _read_of(self, tensor: Any) -> Count | None:
        """Return how a tensor's read by the host counts; None for one in the host's memory."""
        __tracebackhide__ = True
        count = None
        if threading.get_ident() == self._thread:
            with faults.kept("counting a read of TensorFlow's"):
                count = self._reading(tensor, sys._getframe(2))
        if count is not None:
            self._refuse(count)
        return count

    def _reading(self, tensor: Any, frame: FrameType) -> Count | None:
        source = self._devices.name(tensor.backing_device)
        call = called_from(frame, _inside, _AROUND)
        if source == "cpu" or call is None or not self._is_data(tensor.dtype):
            return None
        if (known := self._on_host.get(id(tensor))) is not None and known() is tensor:
            return None
        asked = call.function
        name = asked.strip("_") if asked in _READING else "numpy"
        kind = "copy" if tensor.shape.rank else "wait"
        return self._count(kind, name, source, "cpu", call, asked not in ("numpy", "__array__"))

    def _seen(
        self,
        operation: Any,
        operands: Sequence[Any],
        attributes: Sequence[Any],
        results: Sequence[Any],
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        """Count an operation; TensorFlow calls this after each, also within functions."""
        __tracebackhide__ = True
        if graph is not None:
            return
        refused: list[Count] = []
        with faults.kept("counting a copy of TensorFlow's"):
            name = operation.decode() if isinstance(operation, bytes) else operation
            refused = self._look(name, operands, attributes, results)
        for count in refused:
            self._refuse(count)

    def _look(
        self, operation: str, operands: Sequence[Any], attributes: Sequence[Any], results: Any
    ) -> list[Count]:
        ran_on = _ran_on(operands, results)
        found = []
        if is_function(operation):
            for sent in _graphs.copies(operation, ran_on, operands) if ran_on else ():
                if self._is_data(sent.dtype):
                    ends = self._devices.name(sent.source), self._devices.name(sent.destination)
                    kind = "batch" if sent.batch else "tf.function"
                    found.append(self._copy(kind, *ends, sent.nbytes))
            return [count for count in found if count is not None]
        if operation in _NOTED:
            for result in results:
                _note(self._batches if operation in _MAKING else self._on_host, id(result), result)
        for number, operand in enumerate(operands):
            if operand.backing_device != ran_on and self._is_data(operand.dtype):
                to = _expected(operation, ran_on, attributes, number)
                found.append(self._operand(operation, operand, to))
        if results and results[0].dtype not in _NO_DATA:
            found.append(self._soft(ran_on, results, operands))
        return [count for count in found if count is not None]

    def _is_data(self, dtype: Any) -> bool:
        """Whether it is data that devices hold; virtual GPUs leave small integers on the CPU."""
        return dtype not in _NO_DATA and not (self._devices.virtual and dtype == tf.int32)

    def _operand(self, operation: str, operand: Any, to: str) -> Count | None:
        """Count an operand if it was copied now, not kept from an earlier copy."""
        source, destination = self._devices.name(operand.backing_device), self._devices.name(to)
        key = id(operand), destination
        known = _copied.get(key)
        if source == destination or (known is not None and known() is operand):
            return None
        _note(_copied, key, operand)
        batch = self._batches.get(id(operand))
        kind = "batch" if batch is not None and batch() is operand else "operand"
        kind = "identity" if operation == "Identity" else kind
        return self._copy(kind, source, destination, _size(operand))

    def _copy(self, kind: str, source: str, destination: str, nbytes: int | None) -> Count | None:
        call = called_from(sys._getframe(1), _inside, _AROUND)
        if call is None or source == destination:
            return None
        implicit = kind in ("operand", "tf.function")
        count = self._count("copy", kind, source, destination, call, implicit)
        count.unsized |= nbytes is None
        count.add(nbytes or 0, 0.0)
        return count

    def _soft(self, ran_on: str, results: Sequence[Any], operands: Sequence[Any]) -> Count | None:
        """Count results that are on another device than requested."""
        asked = context.context().device_spec
        if asked is None or asked.device_type is None or asked.device_index is None:
            return None
        wanted = f"{asked.device_type}:{asked.device_index}"
        # What works on a variable, or on a pipeline, is where that is.
        bound = any(operand.dtype in (tf.resource, tf.variant) for operand in operands)
        call = (
            None
            if bound or ran_on.endswith(wanted)
            else called_from(sys._getframe(1), _inside, _AROUND)
        )
        if call is None:
            return None
        ends = self._devices.name(f"/device:{wanted}"), self._devices.name(ran_on)
        count = self._count("placement", "soft placement", *ends, call, True)
        count.add(sum(map(_size, results)), 0.0)
        return count

    def _count(
        self, kind: str, operator: str, source: str, destination: str, call: Call, implicit: bool
    ) -> Count:
        key = (kind, operator, source, destination, call.how, *call.at())
        count = self._tally.counts.get(key)
        if count is not None:
            return count
        about = {
            # An operand is elsewhere because of who gave it; a library reads by itself.
            "within": _library(call) if operator in _BY_ITSELF else "",
            "framework": "TensorFlow",
            "kind": kind,
            "untimed": kind != "wait" and operator != "numpy",
        }
        ends = source, destination
        return self._tally.add(
            key, call.counting(kind == "copy", operator, ends, implicit, **about)
        )

    def _refuse(self, count: Count) -> None:
        """Raise for an implicit copy or wait, under strict."""
        __tracebackhide__ = True
        if self._strict and count.implicit and count.how != DISPLAY and not count.within:
            raise ImplicitCopyError(_refusal(count))


_BY_ITSELF = {"numpy", *(name.strip("_") for name in _READING)}


def _library(call: Call) -> str:
    """Return the library's module that read by itself; empty for one of TensorFlow's own reads."""
    file = "" if call.inner is None else call.inner.f_code.co_filename
    if call.how == LIBRARY and kinds[file] != USER:
        return module_of(file)
    return "" if call.function in _OWN else f"tensorflow.{call.function}"


def _expected(operation: str, ran_on: str, attributes: Sequence[Any], number: int) -> str:
    """The device on which the kernel of an operation takes an operand."""
    task, _, device = ran_on.partition("/device:")
    kind = device.partition(":")[0]
    host = number in in_host_memory(operation, kind, attributes)
    return f"{task}/device:CPU:0" if host else ran_on


def _ran_on(operands: Sequence[Any], results: Sequence[Any]) -> str:
    """Return TensorFlow's name of an operation's device; its variable's if it has no result."""
    if results:
        return str(results[0].device)
    bound = next((each for each in operands if each.dtype == tf.resource), None)
    return str(bound.device if bound is not None else context.context().device_name or "")


def _note(table: dict[Any, "weakref.ref[Any]"], key: Any, tensor: Any) -> None:
    """Put a tensor into a table as long as it lives."""
    table[key] = weakref.ref(tensor, lambda _: table.pop(key, None))


def _size(tensor: Any) -> int:
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def _refusal(count: Count) -> str:
    if count.kind == "placement":
        said = f"`{count.entry().code}` {fell(count.entry())} by soft placement"
        return refusal(count, "ask for a device that is there", said)
    if count.destination == "cpu":
        return refusal(count, "name it first, by .numpy()")
    there = own(count.destination)
    put = f"with tf.device('{there}'): … = tf.identity(…)"
    return refusal(count, f"bring it there first: {put}")
