"""Serve JAX: its devices, its arrays and pytrees, and Flax NNX's objects, which change in place."""

import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.tree_util import tree_flatten, tree_structure, treedef_is_leaf

from gpumagic.device import Device, here
from gpumagic.errors import GpuError
from gpumagic.frameworks import jax_devices, jax_memory
from gpumagic.frameworks.exchange import Place, Pool
from gpumagic.frameworks.jax_clock import CompileClock, JaxBarrier
from gpumagic.ledger.counts import Tally

_Parts = tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]
# What is looked into without asking here, and what is no container.
_PLAIN = (list, tuple, dict, set, str, int, float, type(None))


class Jax:
    """JAX as it is in this process."""

    name = "JAX"

    def __init__(self) -> None:
        self._devices = jax_devices.JaxDevices()
        self._barrier = JaxBarrier()
        self._failed = weakref.WeakValueDictionary[int, Any]()
        self.compile_seconds = CompileClock().seconds

    def started(self) -> bool:
        """Whether its backends are there; to ask starts nothing."""
        return jax_devices.started()

    def devices(self) -> list[Device]:
        """The GPUs that it can use here, virtual ones too, by ordinal; starts JAX."""
        there = self._devices.gpus()
        return [device for device in here(memory=False) if device.ordinal in there]

    def own(self, device: Device) -> Any:
        """JAX's own object for a device, or GpuError."""
        return self._devices.own(device)

    def default(self) -> str:
        """The device on which an array is made where none is named."""
        own = jax.config.jax_default_device or jax.devices()[0]
        return own if isinstance(own, str) else self._devices.name(own)

    def make_virtual(self, count: int) -> None:
        """Have `count` virtual GPUs beside the CPU; GpuError in one line where it is too late."""
        jax_devices.make_virtual(count)

    def place(self, device: Device) -> AbstractContextManager[object]:
        """While this holds, in its thread, what names no device is made on `device`."""
        own = self._devices.own(device)
        # Where that is so, JAX looks nothing up at each call.
        if jax.config.jax_default_device is None and own == jax.local_devices()[0]:
            return nullcontext()
        held: AbstractContextManager[object] = jax.default_device(own)
        return held

    def is_array(self, value: object) -> bool:
        """Whether it is an array, or keys of random numbers, that was not deleted or donated."""
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
            return False
        return not value.is_deleted()

    def where(self, array: Any) -> str:
        """The device that an array is on; ``"cuda:0 + cuda:1"`` where it is sharded over two."""
        return self._devices.names(array.sharding)

    def name_of(self, device: Any) -> str:
        """JAX's own object for a device as gpumagic calls it."""
        return self._devices.name(device)

    def nbytes(self, array: Any) -> int:
        """The bytes of its data; copies on several devices count once."""
        size: int = array.size * array.dtype.itemsize
        return size

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """A copy on another device, committed to it or not; the array itself if it is there."""
        if array.sharding.num_devices > 1:
            raise GpuError(
                f"it is sharded over {self.where(array)}, and stays so; "
                "jax.device_put(x, device) gathers it"
            )
        if self.where(array) == str(device):
            return array
        own = self._devices.own(device)
        if committed or jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended):
            return jax.device_put(array, own)
        with jax.default_device(own):
            return jax.numpy.asarray(jax.device_get(array))

    def copy(self, array: Any, device: Device) -> Any:
        """A copy of its own on a device, committed to it: donating it leaves the array as it is."""
        return jax.device_put(array, self._devices.own(device), may_alias=False)

    def parts(self, value: object) -> _Parts | None:
        """What a registered pytree or an object of Flax NNX holds, and what makes it of others."""
        if type(value) in _PLAIN or isinstance(value, jax.Array):
            return None
        nnx = sys.modules.get("flax.nnx")
        if nnx is not None and isinstance(value, nnx.Variable):
            return _of_variable(value)
        if nnx is not None and isinstance(value, nnx.Pytree):
            return _of_object(value)
        children, treedef = tree_flatten(value, is_leaf=lambda inner: inner is not value)
        return None if treedef_is_leaf(treedef) else (children, treedef.unflatten)

    def knows(self, kind: type) -> bool:
        """Whether a class is registered as a pytree; copies of Flax NNX's register themselves."""
        if issubclass(kind, getattr(sys.modules.get("flax.nnx"), "Pytree", ())):
            return False
        try:
            return not treedef_is_leaf(tree_structure(object.__new__(kind)))
        except TypeError:  # a class of C's
            return False
        except Exception:  # noqa: BLE001  its own, which looks into an object that has nothing yet
            return True

    def wait(self) -> None:
        """Wait until every array is there that was asked for, also those that nobody holds.

        Raises the error of one that failed, once: it lives on.
        """
        self._barrier.wait()
        error: Exception | None = None
        for array in jax_memory.live():
            if self._failed.get(id(array)) is array:
                continue
            try:
                array.block_until_ready()
            except Exception as raised:  # noqa: BLE001  of the user's computation
                self._failed[id(array)] = array
                error = error or raised
        if error is not None:
            raise error

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """The bytes on a device now, and their peak where JAX keeps one (a GPU's)."""
        own = self._devices.own(device)
        if stats := own.memory_stats():
            return stats["bytes_in_use"], stats.get("peak_bytes_in_use")
        return jax_memory.allocated(self._devices, device), None

    def places(self, array: Any) -> list[Place]:
        """The pieces of memory that an array has: one on each device where it has data."""
        return jax_memory.places(self._devices, array)

    def live(self) -> list[Any]:
        """All its arrays that live, those that JAX keeps for itself too."""
        return jax_memory.live()

    def pool(self, device: Device) -> Pool | None:
        """What JAX has taken of a GPU; None of a virtual one, and before JAX has started."""
        return jax_memory.pool(self._devices, device)

    def count(self, tally: Tally, strict: bool) -> AbstractContextManager[object]:
        """While this holds, count its copies between devices and its waits, by the user's line."""
        from gpumagic.frameworks.jax_copies import JaxCopies

        return JaxCopies(self._devices, tally, strict)


def _of_variable(variable: Any) -> _Parts:
    held = variable.get_raw_value()

    def change(parts: Sequence[Any]) -> Any:
        if parts[0] is not held:
            variable.set_raw_value(parts[0])
        return variable

    return [held], change


def _of_object(thing: Any) -> _Parts:
    """An object of Flax NNX is changed in place: who shares it sees the same one."""
    held = {name: value for name, value in vars(thing).items() if not name.startswith("_pytree__")}

    def change(parts: Sequence[Any]) -> Any:
        for (name, old), new in zip(held.items(), parts, strict=True):
            if new is not old:
                vars(thing)[name] = new  # its own __setattr__ would ask what the value is
        return thing

    return [*held.values()], change
