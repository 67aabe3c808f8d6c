"""Find the memory of JAX's arrays, and what JAX has taken of each GPU. Nothing here starts JAX."""

from typing import Any

import jax

from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.frameworks.exchange import Place, Pool, wholes
from gpumagic.frameworks.jax_clock import marks
from gpumagic.frameworks.jax_devices import JaxDevices, started


def live() -> list[Any]:
    """All arrays that live, those that JAX keeps for itself too, but none of gpumagic's."""
    if not started():
        return []
    ours = {id(mark) for mark in marks.values()}
    return [a for a in jax.live_arrays() if id(a) not in ours and not a.is_deleted()]


def places(devices: JaxDevices, array: Any) -> list[Place]:
    """The pieces of memory that an array has, one for each of its shards in this process."""
    if array.is_deleted() or not has_data(array):
        return []
    # JAX makes an array of each shard, which the array then keeps, and lists it as one that lives.
    one = array.sharding.num_devices == 1
    pieces = [array] if one else [shard.data for shard in array.addressable_shards]
    return [
        Place(devices.names(data.sharding), data.unsafe_buffer_pointer(), data.nbytes)
        for data in pieces
        if data.nbytes
    ]


def has_data(array: Any) -> bool:
    """Whether an array has its data, once it is there: of one on the CPU that failed it has none.

    JAX ends the process when it is asked where those data are.
    """
    if next(iter(array.sharding.device_set)).platform == "cpu":
        try:
            array.block_until_ready()
        except Exception:  # noqa: BLE001  the user's computation, whose error they see elsewhere
            return False
    return True


def allocated(devices: JaxDevices, device: Device) -> int:
    """The bytes of all arrays on a device, of which several may share the same."""
    every = wholes(place for array in live() for place in places(devices, array))
    return sum(place.nbytes for place in {*every.values()} if place.device == str(device))


def pool(devices: JaxDevices, device: Device) -> Pool | None:
    """What JAX's allocator has of a GPU; None of a virtual one, and before JAX has started."""
    if device.virtual or not started():
        return None
    try:
        told = devices.own(device).memory_stats() or {}
    except GpuError:  # JAX does not see it
        return None
    names = ("bytes_in_use", "peak_bytes_in_use", "pool_bytes", "bytes_limit")
    used, peak, taken, limit = map(told.get, names)
    return Pool("JAX", used, peak, taken, limit) if told else None
