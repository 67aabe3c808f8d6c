"""Support TensorFlow: its devices, its tensors and variables, and Keras's models.

Virtual GPU k is logical device k + 1 of the CPU. The functions that list devices are patched.
"""

import functools
import gc
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context

from gpumagic.device import Device, here
from gpumagic.errors import GpuError
from gpumagic.frameworks.array_framework import ArrayFramework, failures, operands
from gpumagic.frameworks.framework import Place, Pool, Split, too_late
from gpumagic.frameworks.tensorflow_copies import TensorFlowCopies, size_of
from gpumagic.mismatch.explanation import Explanation, expression
from gpumagic.usercode.files import swap_attribute
from gpumagic.usercode.values import comes_from

_STAYS = "TensorFlow cannot move a variable; create the variable in this cell"
_COPIED = ", or copy it here: {}"
_MODEL = "new = keras.models.clone_model(old); new.set_weights(old.get_weights())"
_SAID = re.compile(r"Trying to access resource .+ located in device (\S+) from device (\S+)")
_WHY = (
    "XLA, which Keras uses by default, ran the code on {} and cannot use other devices' variables; "
    "run the code{} without XLA: compile(…, jit_compile=False)"
)
_AGAIN = ", after compile(…) with a new optimizer there"
_APART = 48  # `places` shifts ids by this many bits, to make up addresses that never overlap
_physical_devices = tf.config.list_physical_devices  # the original, before `patch`
_GPU = re.compile(r"(?:^|(?<=/)|(?<=:))(?:device:)?gpu(?::(\d+))?$", re.IGNORECASE)
_DEVICE = re.compile(r"(CPU|GPU):(\d+)$", re.IGNORECASE)
# Keras modules that must not see virtual GPUs, because they would choose kernels of real GPUs.
_CHOOSE_KERNELS = {f"keras.src.backend.tensorflow.{part}" for part in ("rnn", "nn")}


class TensorFlow(ArrayFramework):
    """Implement the `Framework` protocol for TensorFlow, and for Keras if it is imported."""

    name = "TensorFlow"

    def __init__(self) -> None:
        super().__init__()
        self._tensor: type = tf.__internal__.EagerTensor
        self.copies = TensorFlowCopies(self.name_of)

    def started(self) -> bool:
        return bool(getattr(context.context(), "_initialized", True))

    def devices(self) -> list[Device]:
        count = self._count()
        return [d for d in here(memory=False) if d.ordinal is not None and d.ordinal < count]

    def own(self, device: Device) -> Any:
        return tf.device(self._own(device))

    def _count(self) -> int:
        """Return the number of virtual GPUs, or of real ones if none are virtual."""
        if self.virtual:
            return min(self.virtual, _logical_cpus() - 1)
        return len(_physical_devices("GPU"))

    def _own(self, device: Device) -> str:
        """Return TensorFlow's name of a device: ``"/GPU:1"``; GpuError if the device is missing."""
        if device.kind == "cpu":
            return "/CPU:0"
        number = device.ordinal
        if device.kind == "cuda" and number is not None and number < self._count():
            return f"/CPU:{number + 1}" if self.virtual else f"/GPU:{number}"
        raise self.missing(device, _logical_cpus(), "'tensorflow[and-cuda]'")

    def name_of(self, own: str) -> str:
        """Translate TensorFlow's full name of a device to gpumagic's, such as ``"cuda:1"``."""
        if (found := _DEVICE.search(own)) is None:
            return own
        kind, number = found[1].upper(), int(found[2])
        if kind == "GPU":
            return f"cuda:{number}"
        return f"cuda:{number - 1}" if self.virtual and number else "cpu"

    def make_virtual(self, count: int) -> None:
        cpu = _physical_devices("CPU")[0]
        each = tf.config.LogicalDeviceConfiguration()
        try:
            # Neither call starts TensorFlow; both raise an error if TensorFlow has started.
            tf.config.set_logical_device_configuration(cpu, [each] * (count + 1))
            tf.config.set_visible_devices([] if count else _physical_devices("GPU"), "GPU")
        except RuntimeError:
            if (there := _logical_cpus()) <= count:
                raise GpuError(too_late("TensorFlow", there, count)) from None

    def patch(self, stack: ExitStack) -> None:
        config = tf.config
        for name, kind, word in (
            ("list_physical_devices", config.PhysicalDevice, "physical_"),
            ("get_visible_devices", config.PhysicalDevice, "physical_"),
            ("list_logical_devices", config.LogicalDevice, ""),
        ):
            for owner in (config, config.experimental):
                swap_attribute(stack, owner, name, self._listing(getattr(owner, name), kind, word))
        on, grow = tf.device, config.experimental.set_memory_growth

        @functools.wraps(on)
        def device(device_name: Any) -> Any:
            return on(self._translated(device_name))

        @functools.wraps(grow)
        def set_memory_growth(device: Any, enable: bool) -> Any:
            return None if device.device_type == "GPU" else grow(device, enable)

        swap_attribute(stack, tf, "device", device)
        swap_attribute(stack, config.experimental, "set_memory_growth", set_memory_growth)

    def _translated(self, given: Any) -> Any:
        """Replace a virtual GPU's name by its logical CPU device; return other names unchanged."""
        name = getattr(given, "name", given)  # `given` may be a logical device
        found = _GPU.search(name) if isinstance(name, str) else None
        number = int(found[1] or 0) if found else 0
        if found is None or number >= self._count():
            return given
        return f"{name[: found.start()] or '/'}device:CPU:{number + 1}"

    def _listing(self, real: Callable[..., Any], kind: Any, word: str) -> Callable[..., Any]:
        """Return a replacement of `real` that lists the CPU and the virtual GPUs."""

        @functools.wraps(real)
        def devices(device_type: str | None = None) -> list[Any]:
            asks = sys._getframe(1).f_globals.get("__name__")
            count = 0 if asks in _CHOOSE_KERNELS else self._count()
            gpus = [kind(f"/{word}device:GPU:{number}", "GPU") for number in range(count)]
            own = [] if device_type == "GPU" else real(device_type)
            own = [each for each in own if each.name == f"/{word}device:CPU:0"]
            return own + (gpus if device_type in (None, "GPU") else [])

        return devices

    @contextmanager
    def place(self, device: Device, **options: Any) -> Iterator[None]:
        now = context.context()
        before = now.device_name, now.device_spec
        tf.device(self._own(device)).__enter__()
        try:
            yield
        finally:
            # The exit of `tf.device` raises an error if the cell has left another `tf.device` open.
            now._set_device(*before)

    def is_array(self, value: object) -> bool:
        """Whether a value is a tensor with data, a variable, or an object with variables."""
        if isinstance(value, self._tensor):
            return value.dtype not in (tf.resource, tf.variant)  # type: ignore[attr-defined]
        return isinstance(value, tf.Variable) or bool(_variables(value))

    def where(self, array: Any) -> str:
        """Return the device of the operation that made a tensor, or the devices of a model."""
        names = {self.name_of(each.device) for each in _variables(array) or [array]}
        return " + ".join(sorted(names))

    def nbytes(self, array: Any) -> int:
        return sum(size_of(each) or 0 for each in _variables(array) or [array])

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        if self.where(array) == str(device):
            return array
        if not isinstance(array, self._tensor):
            raise GpuError(_STAYS + _way_to_copy(array))
        with self.place(device):
            return tf.identity(array)

    def copy(self, array: Any, device: Device) -> Any:
        """Return a new copy on a device; a model is copied with its weights and compile options."""
        with self.place(device):
            if isinstance(array, self._tensor):
                return tf.identity(array)
            if isinstance(array, tf.Variable):
                return tf.Variable(array, trainable=array.trainable, dtype=array.dtype)
            keras = sys.modules.get("keras")
            if keras is None or not isinstance(array, keras.Model):
                why = f"a {type(array).__name__} cannot be copied"
                raise GpuError(f"{why}; create it in the code that you run")
            made = keras.models.clone_model(array)
            made.set_weights(array.get_weights())
            if array.compiled:
                made.compile_from_config(array.get_compile_config())
            return made

    def parts(self, value: object) -> Split | None:
        if not isinstance(value, tf.__internal__.CompositeTensor) or self.is_array(value):
            return None
        made = tf.nest.flatten(value, expand_composites=True)
        return made, lambda new: tf.nest.pack_sequence_as(value, new, expand_composites=True)

    def wait(self, *devices: str) -> None:
        tf.test.experimental.sync_devices()

    def allocated(self, device: Device) -> tuple[int, int | None]:
        if (own := self._own(device)).startswith("/GPU"):
            info = tf.config.experimental.get_memory_info(own.removeprefix("/"))
            return info["current"], info["peak"]
        return super().allocated(device)

    def places(self, array: Any) -> list[Place]:
        """Return a `Place` for a tensor, or for each variable of a model. Addresses are made up."""
        return [
            Place(self.name_of(at or each.device), id(each) << _APART, nbytes)
            for each in _variables(array) or [array]
            for at in [getattr(each, "backing_device", None)]
            if (nbytes := size_of(each))
        ]

    def live(self) -> list[Any]:
        """List all tensors and variables that Python's garbage collector tracks."""
        if not self.started():
            return []
        kinds = self._tensor, tf.Variable
        return [each for each in gc.get_objects() if issubclass(type(each), kinds)]

    def pool(self, device: Device) -> Pool | None:
        if device.virtual or not self.started():
            return None
        if (device.ordinal or 0) >= len(tf.config.list_logical_devices("GPU")):
            return None
        used, peak = self.allocated(device)
        return Pool(self.name, used, peak, None, None)

    def explain(self, error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
        for said, frame, node in failures(error, namespace, _SAID):
            there, ran = map(self.name_of, said.groups())
            found = operands(node, frame, lambda value: [value] if _variables(value) else [])
            model = next((held[0] for _, held in found), None)
            home = there if model is None else self.where(model)
            # A failed `fit` may leave the optimizer's variables elsewhere: advise a new optimizer.
            state = getattr(model, "optimizer", None)
            again = _AGAIN if _variables(state) and self.where(state) != home else ""
            there = f" in a cell of %%ongpu {home}{again}, or" if "+" not in home else ""
            return Explanation(*expression(frame, node), (), None, _WHY.format(ran, there))
        return None


def _logical_cpus() -> int:
    cpu = _physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or [cpu])


def _variables(value: Any) -> list[tf.Variable]:
    """Return the variables of a TensorFlow module, or of a Keras layer, model or optimizer."""
    if isinstance(value, tf.Module):
        return [*value.variables]
    if comes_from(type(value), "keras.Layer", "keras.Optimizer"):
        return [variable.value for variable in value.variables]
    return []


def _way_to_copy(value: Any) -> str:
    if comes_from(type(value), "keras.Model"):
        return _COPIED.format(_MODEL)
    return _COPIED.format("v = tf.Variable(v)") if isinstance(value, tf.Variable) else ""
