"""Support JAX: its devices, arrays, pytrees and memory, and Flax NNX's objects.

JAX returns before its devices are done. A device works in order, so a small computation is done
once everything before it is; that is how waiting works here. Reading memory never starts JAX.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import jax
import numpy
from jax._src import xla_bridge
from jax.tree_util import tree_flatten, tree_structure, treedef_is_leaf

from gpumagic.device import Device, here
from gpumagic.errors import GpuError
from gpumagic.frameworks import jax_devices
from gpumagic.frameworks.array_framework import ArrayFramework
from gpumagic.frameworks.framework import Place, Pool, wholes
from gpumagic.ledger.entry import Tally
from gpumagic.mismatch.explanation import Explanation

marks: dict[Any, Any] = {}
"""What barriers compute with, by device."""


class JaxBarrier:
    """Wait for devices by a small computation on each, compiled at the first use."""

    def __init__(self) -> None:
        self._bump = jax.jit(_bump)

    def wait(self) -> None:
        """Return when each device of this process has done what this thread gave it."""
        given = []
        # Kept short, because it is not part of the timed code: `jax.local_devices` takes 10 ×.
        clients = xla_bridge.backends().values()
        for device in chain.from_iterable(client.local_devices() for client in clients):
            if device not in marks:
                marks[device] = jax.device_put(numpy.float32(0), device)
            given.append(self._bump(marks[device]))
        for mark in given:
            mark.block_until_ready()


def _bump(mark: Any) -> Any:
    return mark + 1


def has_data(array: Any) -> bool:
    """Whether an array has data, waiting for it; one whose computation failed on the CPU has none.

    JAX ends the process if asked for the address of missing data.
    """
    if next(iter(array.sharding.device_set)).platform == "cpu":
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001  the user's computation, whose error they see elsewhere
            return False
    return True


_Parts = tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]
# What is looked into without asking here, and what is no container.
_PLAIN = (list, tuple, dict, set, str, int, float, type(None))


class Jax(ArrayFramework):
    """Adapt JAX to the contract of a framework."""

    name = "JAX"

    def __init__(self) -> None:
        self._devices = jax_devices.JaxDevices()
        self._barrier = JaxBarrier()
        self._failed = weakref.WeakValueDictionary[int, Any]()

    def started(self) -> bool:
        """Whether its backends are there; this starts nothing."""
        return jax_devices.started()

    def devices(self) -> list[Device]:
        """Return the GPUs that it can use here, virtual ones too, by ordinal; starts JAX."""
        there = self._devices.gpus()
        return [device for device in here(memory=False) if device.ordinal in there]

    def own(self, device: Device) -> Any:
        """Return JAX's own object for a device, or raise GpuError."""
        return self._devices.own(device)

    def default(self) -> str:
        """Return the device of new arrays for which none is named."""
        own = jax.config.jax_default_device or jax.devices()[0]
        return own if isinstance(own, str) else self._devices.name(own)

    def make_virtual(self, count: int) -> None:
        """Make `count` virtual GPUs, in addition to the CPU; GpuError if it is too late."""
        jax_devices.make_virtual(count)

    def place(self, device: Device, **options: Any) -> AbstractContextManager[object]:
        """Make this thread's arrays on `device` unless the code names one, within the context."""
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
        """Return the device that an array is on; ``"cuda:0 + cuda:1"`` if sharded over two."""
        return self._devices.names(array.sharding)

    def name_of(self, device: Any) -> str:
        """Return gpumagic's name of a JAX device."""
        return self._devices.name(device)

    def nbytes(self, array: Any) -> int:
        """Return the bytes of its data; copies on several devices count once."""
        size: int = array.size * array.dtype.itemsize
        return size

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return a copy on another device, committed or not; the array itself if it is there."""
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
        """Return a new copy committed to a device: donating it does not affect the array."""
        return jax.device_put(array, self._devices.own(device), may_alias=False)

    def parts(self, value: object) -> _Parts | None:
        """Return the parts of a registered pytree or Flax NNX object, and its builder."""
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

    def wait(self, *devices: str) -> None:
        """Wait until every requested array is there, also unreferenced ones.

        Raises a failed array's error once, although the array lives on.
        """
        self._barrier.wait()
        error: Exception | None = None
        for array in self.live():
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
        """Return the bytes on a device now, and their peak if JAX keeps one (on a GPU).

        Memory that arrays share counts once.
        """
        if stats := self._devices.own(device).memory_stats():
            return stats["bytes_in_use"], stats.get("peak_bytes_in_use")
        every = wholes(place for array in self.live() for place in self.places(array))
        return sum(place.nbytes for place in {*every.values()} if place.device == str(device)), None

    def places(self, array: Any) -> list[Place]:
        """Return the pieces of memory of an array, one for each of its shards in this process."""
        if array.is_deleted() or not has_data(array):
            return []
        # JAX makes an array of each shard, which the array then keeps, and lists it as a live one.
        one = array.sharding.num_devices == 1
        pieces = [array] if one else [shard.data for shard in array.addressable_shards]
        return [
            Place(self._devices.names(data.sharding), data.unsafe_buffer_pointer(), data.nbytes)
            for data in pieces
            if data.nbytes
        ]

    def live(self) -> list[Any]:
        """List all live arrays, also JAX's own, but none of gpumagic's."""
        if not self.started():
            return []
        ours = {id(mark) for mark in marks.values()}
        return [a for a in jax.live_arrays() if id(a) not in ours and not a.is_deleted()]

    def pool(self, device: Device) -> Pool | None:
        """Return JAX's allocator's figures for a GPU; None if virtual, or before JAX started."""
        if device.virtual or not self.started():
            return None
        try:
            told = self._devices.own(device).memory_stats() or {}
        except GpuError:  # JAX does not see it
            return None
        names = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "bytes_limit")
        return Pool(self.name, *map(told.get, names)) if told else None

    def count(
        self, tally: Tally, strict: bool, *, warn: bool = False
    ) -> AbstractContextManager[object]:
        """While this holds, count its copies between devices and its waits, by the user's line."""
        from gpumagic.frameworks.jax_copies import JaxCopies

        return JaxCopies(self._devices, tally, strict)

    def explain(self, error: BaseException, namespace: Mapping[str, Any]) -> Explanation | None:
        """Explain JAX's error between devices; None for any other."""
        from gpumagic.frameworks.jax_mismatch import explain_jax

        return explain_jax(self, error, namespace)


def _of_variable(variable: Any) -> _Parts:
    held = variable.get_raw_value()

    def change(parts: Sequence[Any]) -> Any:
        if parts[0] is not held:
            variable.set_raw_value(parts[0])
        return variable

    return [held], change


def _of_object(thing: Any) -> _Parts:
    """Split an object of Flax NNX, which is changed in place, so that its sharers agree."""
    held = {name: value for name, value in vars(thing).items() if not name.startswith("_pytree__")}

    def change(parts: Sequence[Any]) -> Any:
        for (name, old), new in zip(held.items(), parts, strict=True):
            if new is not old:
                vars(thing)[name] = new  # its own __setattr__ would ask what the value is
        return thing

    return [*held.values()], change
