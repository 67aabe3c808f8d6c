"""Name JAX's devices as gpumagic does, and find JAX's own by those names.

If GPUs are virtual, JAX has logical devices of the CPU: number 0 is the CPU, number k + 1 is
virtual GPU k. `jax.devices("gpu")` then returns the virtual GPUs, as on a machine with GPUs.
"""

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import jax
from jax._src import xla_bridge

from gpumagic.device import Device, devices_changed, here
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import replace, too_late

_GPU = ("gpu", "cuda", "rocm")
# Each function of `jax` that is asked about GPUs, and the place of its argument `backend`.
_ASKED = {"devices": 0, "local_devices": 1, "device_count": 0, "local_device_count": 0}


class JaxDevices:
    """Find JAX's devices in this process; JAX starts when one is asked for, not before."""

    def __init__(self) -> None:
        self.virtual = False
        self._patched, self._patches = False, ExitStack()
        devices_changed.append(self._changed)
        self._changed()

    def own(self, device: Device) -> Any:
        """Return JAX's own object for a device, or raise GpuError."""
        if device.kind == "cpu":
            return _cpus()[0]
        if device.kind != "cuda":
            raise GpuError(f"JAX has no device {device}; type cpu, or a GPU's number")
        gpus = self.gpus()
        if device.ordinal not in gpus:
            raise GpuError(self._lacking(device, len(gpus)))
        return gpus[device.ordinal]

    def gpus(self) -> dict[int, Any]:
        """The GPUs that JAX has, virtual ones too, by ordinal."""
        if self.virtual:
            count = sum(device.virtual for device in here(memory=False))
            return dict(enumerate(_cpus()[1 : count + 1]))
        try:
            return {device.local_hardware_id: device for device in jax.local_devices(backend="gpu")}
        except RuntimeError:  # a build for the CPU, or no GPU
            return {}

    def name(self, own: Any) -> str:
        """Return gpumagic's name of a JAX device, ``"cuda:1"``."""
        if own.platform in _GPU:
            return f"cuda:{own.local_hardware_id}"
        if own.platform != "cpu":
            return f"{own.platform}:{own.id}"
        return f"cuda:{own.id - 1}" if self.virtual and own.id else "cpu"

    def names(self, sharding: Any) -> str:
        """Return the devices of a sharding; several are joined by ``" + "``."""
        on_host = (sharding.memory_kind or "").endswith("_host")
        own = sorted(sharding.device_set, key=lambda device: device.id)
        if on_host and own[0].platform != "cpu":
            return "cpu"
        return " + ".join(map(self.name, own))

    def _lacking(self, device: Device, count: int) -> str:
        if not self.virtual:
            return f"JAX sees no {device} here; a build for GPUs is pip install 'jax[cuda13]'"
        wanted = sum(device.virtual for device in here(memory=False))
        return too_late("JAX", count + 1, wanted)

    def _changed(self) -> None:
        """Answer for virtual GPUs while there are any."""
        self.virtual = any(device.virtual for device in here(memory=False))
        if not self.virtual:
            self._patches.close()
        elif not self._patched:
            for name, position in _ASKED.items():
                ours = self._answering(getattr(jax, name), position, name.endswith("_count"))
                replace(self._patches, jax, name, ours)
        self._patched = self.virtual

    def _answering(self, real: Callable[..., Any], position: int, counts: bool) -> Any:
        @functools.wraps(real)
        def answer(*args: Any, **kwargs: Any) -> Any:
            asked = dict(enumerate(args)).get(position, kwargs.get("backend"))
            if not self.virtual or asked not in _GPU:
                return real(*args, **kwargs)
            gpus = [*self.gpus().values()]
            return len(gpus) if counts else gpus

        return answer


def started() -> bool:
    """Whether JAX has started; by a private function, without which it counts as started."""
    asked = getattr(xla_bridge, "backends_are_initialized", lambda: True)
    return bool(asked())


def make_virtual(count: int) -> None:
    """Make `count` devices, in addition to the CPU's; GpuError if JAX has started."""
    try:
        # This is an error where JAX has started, and starts nothing.
        jax.config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        if (there := len(_cpus())) <= count:
            raise GpuError(too_late("JAX", there, count)) from None
    except (AttributeError, KeyError):
        raise GpuError(
            f"JAX {jax.__version__} has no jax_num_cpu_devices; type pip install -U jax"
        ) from None


def _cpus() -> list[Any]:
    found: Iterable[Any] = jax.local_devices(backend="cpu")
    return [*found]
