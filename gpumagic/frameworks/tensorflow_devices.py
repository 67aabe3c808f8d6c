"""Name TensorFlow's devices as gpumagic does, and make it list virtual GPUs while there are any.

If GPUs are virtual, TensorFlow has logical devices of the CPU: number 0 is the CPU, number k + 1 is
virtual GPU k. `tf.device("/GPU:1")` and the lists of `tf.config` then return these, and are put
back when virtual GPUs go. The name of a missing GPU is left to TensorFlow.
"""

import functools
import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import tensorflow as tf

from gpumagic.device import Device, devices_changed, here
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import replace, too_late

_Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]
# TensorFlow's own, before anything stands in front of it.
_physical_devices = tf.config.list_physical_devices
_GPU = re.compile(r"(?:^|(?<=/)|(?<=:))(?:device:)?gpu(?::(\d+|\*))?$", re.IGNORECASE)
# Parts of Keras that would choose cuDNN's kernels, and layouts that only GPUs have.
_CHOOSE_KERNELS = {f"keras.src.backend.tensorflow.{part}" for part in ("rnn", "nn")}
_DEVICE = re.compile(r"(CPU|GPU):(\d+)$", re.IGNORECASE)


class TensorFlowDevices:
    """Find TensorFlow's devices in this process; it starts when one is placed on, not before."""

    def __init__(self) -> None:
        self.virtual = 0
        self._patched, self._patches = False, ExitStack()
        devices_changed.append(self._changed)
        self._changed()

    def count(self) -> int:
        """Return the number of TensorFlow's GPUs, virtual ones if there are any; start nothing."""
        if self.virtual:
            return min(self.virtual, _logical_cpus() - 1)
        return len(_physical_devices("GPU"))

    def own(self, device: Device) -> str:
        """Return TensorFlow's name of a device, such as ``"/GPU:1"``; or raise GpuError."""
        if device.kind == "cpu":
            return "/CPU:0"
        if device.kind != "cuda" or device.ordinal is None:
            raise GpuError(f"TensorFlow has no device {device}; type cpu, or a GPU's number")
        if device.ordinal < self.count():
            return f"/CPU:{device.ordinal + 1}" if self.virtual else f"/GPU:{device.ordinal}"
        if self.virtual:
            raise GpuError(too_late("TensorFlow", _logical_cpus(), self.virtual))
        raise GpuError(
            f"TensorFlow sees no {device} here; a build for GPUs is "
            "pip install 'tensorflow[and-cuda]'"
        )

    def name(self, own: str) -> str:
        """Return gpumagic's name, ``"cuda:1"``, for TensorFlow's full name of a device."""
        found = _DEVICE.search(own)
        if found is None:
            return own
        kind, number = found[1].upper(), int(found[2])
        if kind == "GPU":
            return f"cuda:{number}"
        return f"cuda:{number - 1}" if self.virtual and number else "cpu"

    def _changed(self) -> None:
        """Replace TensorFlow's own functions while GPUs are virtual."""
        self.virtual = sum(device.virtual for device in here(memory=False))
        if not self.virtual:
            self._patches.close()
        elif not self._patched:
            for owner, name, wrap in self._stand_ins():
                real = getattr(owner, name)
                replace(self._patches, owner, name, functools.wraps(real)(wrap(real)))
        self._patched = bool(self.virtual)

    def _stand_ins(self) -> list[tuple[Any, str, _Wrap]]:
        found: list[tuple[Any, str, _Wrap]] = [(tf, "device", self._on)]
        config = tf.config
        physical = self._listing(
            config.PhysicalDevice, "/physical_device:", lambda own: own.device_type != "GPU"
        )
        logical = self._listing(
            config.LogicalDevice, "/device:", lambda own: own.name == "/device:CPU:0"
        )
        for owner in (config, config.experimental):
            found += [
                (owner, "list_physical_devices", physical),
                (owner, "get_visible_devices", physical),
                (owner, "list_logical_devices", logical),
            ]
        found.append((tf.config.experimental, "set_memory_growth", self._growing))
        return found

    def _on(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def device(device_name: Any) -> Any:
            return real(self._translated(device_name))

        return device

    def _translated(self, given: Any) -> Any:
        """Return the logical CPU device for a virtual GPU's name; any other name unchanged."""
        name = given
        if isinstance(given, tf.config.LogicalDevice):
            name = given.name
        elif isinstance(given, tf.DeviceSpec):
            name = given.to_string()
        found = _GPU.search(name) if isinstance(name, str) else None
        if found is None:
            return given
        number = int(found[1]) if (found[1] or "*") != "*" else 0
        if number >= self.count():
            return given
        return f"{name[: found.start()] or '/'}device:CPU:{number + 1}"

    def _listing(self, kind: Any, named: str, is_own: Callable[[Any], bool]) -> _Wrap:
        """Return a function that lists TensorFlow's own devices and the virtual GPUs."""

        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def devices(device_type: str | None = None) -> list[Any]:
                asks = sys._getframe(1).f_globals.get("__name__")
                count = 0 if asks in _CHOOSE_KERNELS else self.count()
                gpus = [kind(f"{named}GPU:{number}", "GPU") for number in range(count)]
                own = [] if device_type == "GPU" else [d for d in real(device_type) if is_own(d)]
                return own + (gpus if device_type in (None, "GPU") else [])

            return devices

        return wrap

    def _growing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def set_memory_growth(device: Any, enable: bool) -> Any:
            # A virtual GPU takes what its tensors take.
            return None if device.device_type == "GPU" else real(device, enable)

        return set_memory_growth


def make_virtual(count: int) -> None:
    """Make `count` logical devices after the CPU's; GpuError if TensorFlow has started."""
    cpu = _physical_devices("CPU")[0]
    each = tf.config.LogicalDeviceConfiguration()
    try:
        # Each is an error where TensorFlow has started, and starts nothing.
        tf.config.set_logical_device_configuration(cpu, [each] * (count + 1))
        tf.config.set_visible_devices([] if count else _physical_devices("GPU"), "GPU")
    except RuntimeError:
        if (there := _logical_cpus()) <= count:
            raise GpuError(too_late("TensorFlow", there, count)) from None


def _logical_cpus() -> int:
    """How many logical devices of the CPU there are, or will be once TensorFlow has started."""
    cpu = _physical_devices("CPU")[0]
    return len(tf.config.get_logical_device_configuration(cpu) or [cpu])
