"""Support TensorFlow: its devices, its tensors and variables, and Keras's models.

Of TensorFlow's private parts, `context.context()` is touched for the device scope that holds
between two hooks, where no `with` can stand.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from gpumagic.device import Device, here
from gpumagic.errors import GpuError
from gpumagic.frameworks import tensorflow_devices
from gpumagic.frameworks.array_framework import ArrayFramework
from gpumagic.frameworks.framework import Place, Pool
from gpumagic.ledger.entry import Tally
from gpumagic.mismatch.explanation import Explanation, Operand, expression
from gpumagic.usercode.frames import errors, failed_frames

_STAYS = (
    "a tf.Variable stays where it was made; make it in this cell, or give the cell a copy: "
    "v = tf.Variable(v)"
)
_VARIABLES_STAY = "its variables stay where they were made; make it in this cell"
_SAID = re.compile(r"Trying to access resource .+ located in device (\S+) from device (\S+)")
_WHY = (
    "XLA, with which Keras compiles by itself, ran it on {ran} and reaches no variable elsewhere: "
    "run it in a cell of %%ongpu {there}, or without XLA: compile(…, jit_compile=False)"
)
# Bits, so that what counts as two pieces of memory never overlaps.
_APART = 48


class TensorFlow(ArrayFramework):
    """Adapt TensorFlow, and Keras if imported, to the contract of a framework."""

    name = "TensorFlow"

    def __init__(self) -> None:
        self._devices = tensorflow_devices.TensorFlowDevices()
        self._tensor: type = tf.__internal__.EagerTensor

    def started(self) -> bool:
        """Whether it has found its devices; before that, other methods may start it."""
        return bool(getattr(context.context(), "_initialized", True))

    def devices(self) -> list[Device]:
        """The GPUs that it can use here, virtual ones too, by ordinal."""
        count = self._devices.count()
        return [d for d in here(memory=False) if d.ordinal is not None and d.ordinal < count]

    def own(self, device: Device) -> Any:
        """Return TensorFlow's scope of a device, for `with`; or raise GpuError."""
        return tf.device(self._devices.own(device))

    def make_virtual(self, count: int) -> None:
        """Make `count` virtual GPUs, in addition to the CPU; GpuError if it is too late."""
        tensorflow_devices.make_virtual(count)

    @contextmanager
    def place(self, device: Device, **options: Any) -> Iterator[None]:
        """Make this thread's tensors on `device` unless the code names one, within the context."""
        name = self._devices.own(device)
        now = context.context()
        before = now.device_name, now.device_spec
        tf.device(name).__enter__()
        try:
            yield
        finally:
            # Not by that scope's own exit, which is an error if the cell has left one entered.
            now._set_device(*before)

    def is_array(self, value: object) -> bool:
        """Whether it is a tensor with data, a variable, or has variables, as a layer or a model."""
        if isinstance(value, self._tensor):
            return value.dtype not in (tf.resource, tf.variant)  # type: ignore[attr-defined]
        return isinstance(value, tf.Variable) or bool(_variables(value))

    def where(self, array: Any) -> str:
        """Return the device of the operation that made it; for a model, its variables' devices.

        Small integers count as a GPU's, as TensorFlow says, although it keeps them in host memory.
        """
        names = {self._devices.name(each.device) for each in _variables(array) or [array]}
        return " + ".join(sorted(names))

    def name_of(self, device: str) -> str:
        """Return gpumagic's name for TensorFlow's full name of a device."""
        return self._devices.name(device)

    def nbytes(self, array: Any) -> int:
        """Return the bytes of its data; 0 for strings and for values on no device."""
        return sum(bytes_of(each) for each in _variables(array) or [array])

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return a copy of a tensor on another device; GpuError for a variable: it cannot move."""
        if self.where(array) == str(device):
            return array
        if not isinstance(array, self._tensor):
            raise GpuError(_STAYS if isinstance(array, tf.Variable) else _stays(array))
        with self.place(device):
            return tf.identity(array)

    def copy(self, array: Any, device: Device) -> Any:
        """Return a new copy on a device; a model's has its weights and is compiled the same way."""
        with self.place(device):
            if isinstance(array, self._tensor):
                return tf.identity(array)
            if isinstance(array, tf.Variable):
                return tf.Variable(array, trainable=array.trainable, dtype=array.dtype)
            return _model_like(array)

    def parts(self, value: object) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        """Return the tensors that a ragged or sparse one consists of."""
        if not isinstance(value, tf.__internal__.CompositeTensor) or self.is_array(value):
            return None
        made = tf.nest.flatten(value, expand_composites=True)
        return made, lambda new: tf.nest.pack_sequence_as(value, new, expand_composites=True)

    def wait(self, *devices: str) -> None:
        """Wait until all its devices have finished what they were given."""
        tf.test.experimental.sync_devices()

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """Return the bytes of its arrays on a device now, and their peak if known."""
        own = self._devices.own(device)
        if own.startswith("/GPU"):
            info = tf.config.experimental.get_memory_info(own.removeprefix("/"))
            return info["current"], info["peak"]
        every = [place for array in self.live() for place in self.places(array)]
        return sum(place.nbytes for place in every if place.device == str(device)), None

    def places(self, array: Any) -> list[Place]:
        """Return its pieces of memory; for a model, its variables'.

        TensorFlow tells no address: each tensor counts as memory of its own.
        """
        pieces = _variables(array) or [array]
        return [
            Place(self._devices.name(_memory_of(each)), id(each) << _APART, bytes_of(each))
            for each in pieces
            if bytes_of(each)
        ]

    def live(self) -> list[Any]:
        """List all tensors and variables that Python knows."""
        if not self.started():
            return []
        kinds = {self._tensor, *_subclasses(tf.Variable)}
        return [each for each in gc.get_objects() if type(each) in kinds]

    def pool(self, device: Device) -> Pool | None:
        """Return TensorFlow's bytes allocated on a GPU, and their peak; None for a virtual one."""
        if device.virtual or not self.started():
            return None
        used, peak = self.allocated(device)
        return Pool(self.name, used, peak, None, None)

    def count(
        self, tally: Tally, strict: bool, *, warn: bool = False
    ) -> AbstractContextManager[object]:
        """While this holds, count its copies between devices and its waits, by the user's line."""
        from gpumagic.frameworks.tensorflow_copies import TensorFlowCopies

        return TensorFlowCopies(self._devices, tally, strict)

    def explain(self, error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
        """Explain that XLA reaches no variable on another device; None for any other error."""
        return _explain(self, error, namespace)


def _subclasses(kind: type) -> Iterator[type]:
    yield kind
    other: type
    for other in kind.__subclasses__():
        yield from _subclasses(other)


def _memory_of(array: Any) -> str:
    return str(getattr(array, "backing_device", None) or array.device)


def bytes_of(tensor: Any) -> int:
    """Return the bytes of a tensor's data; 0 for a string or resource, which no device holds."""
    size: int = (tensor.shape.num_elements() or 0) * tensor.dtype.size
    return size


def _variables(value: object) -> list[tf.Variable]:
    """Return the variables of a TensorFlow module, or of a Keras layer, model or optimizer."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(value, keras.Variable):
        return [value.value]
    if isinstance(value, tf.Module):
        return [*value.variables]
    if keras is not None and isinstance(value, (keras.Layer, keras.Optimizer)):
        return [variable.value for variable in value.variables]
    return []


def _stays(value: object) -> str:
    """Say how to have a module on this device: Keras's layers and optimizers are made there."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(value, keras.Model):
        how = "new = keras.models.clone_model(old); new.set_weights(old.get_weights())"
        return f"{_VARIABLES_STAY}, or copy it here: {how}"
    if keras is not None and isinstance(value, (keras.Layer, keras.Optimizer)):
        return _VARIABLES_STAY
    how = "for to, old in zip(new.variables, old.variables): to.assign(old)"
    return f"{_VARIABLES_STAY}, as new, and give it the values: {how}"


def _model_like(value: Any) -> Any:
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(value, keras.Model):
        raise GpuError(f"a {type(value).__name__} is not copied; make it in the code itself")
    made = keras.models.clone_model(value)
    made.set_weights(value.get_weights())
    if value.compiled:
        made.compile_from_config(value.get_compile_config())
    return made


def _explain(
    framework: TensorFlow, error: BaseException, namespace: Mapping[str, Any]
) -> Explanation | None:
    """Explain which variables are on another device; None for any other error, or if none is."""
    for each in errors(error):
        said = _SAID.search(str(each))
        frames = failed_frames(each.__traceback__) if said else []
        if said is None or not frames or (node := frames[0].failed) is None:
            continue
        there, ran = map(framework.name_of, said.groups())
        frame = frames[0]
        frame.scope.outer = {**namespace, **frame.scope.outer}
        rows: dict[str, Operand] = {}
        for part in ast.walk(node):
            if not isinstance(part, (ast.Name, ast.Attribute, ast.Subscript)):
                continue
            value, name = frame.scope.value(part), frame.text(part)
            if framework.is_array(value) and framework.where(value) == there:
                about = type(value).__name__
                nbytes = framework.nbytes(value)
                rows[name] = Operand(name, (there,), nbytes, about, odd=True)
        if rows:
            why = _WHY.format(ran=ran, there=there)
            return Explanation(*expression(frame, node), tuple(rows.values()), None, why)
    return None
