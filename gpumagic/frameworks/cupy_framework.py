"""Support CuPy's GPUs, arrays and memory pool. CuPy makes no implicit copies."""

from contextlib import AbstractContextManager
from typing import Any, cast

import cupy

from gpumagic.device import Device, here
from gpumagic.errors import GpuError
from gpumagic.frameworks.array_framework import ArrayFramework
from gpumagic.frameworks.framework import Place, Pool, place_of


class CuPy(ArrayFramework):
    name = "CuPy"

    def __init__(self) -> None:
        super().__init__()
        # Ordinals of GPUs that gpumagic used via CuPy. To query another GPU would allocate 500 MiB.
        self._used: set[int] = set()

    def started(self) -> bool:
        return bool(self._used)

    def devices(self) -> list[Device]:
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError:  # no driver, or no GPU
            return []
        known = {device.ordinal: device for device in here(memory=False) if not device.virtual}
        return [known.get(number, Device("cuda", number)) for number in range(count)]

    def own(self, device: Device) -> Any:
        if device.kind != "cuda" or device.ordinal is None:
            cure = "cupy.asnumpy(x) returns a NumPy array"
            raise GpuError(f"CuPy's arrays are only on GPUs, not on {device}; {cure}")
        if device.virtual:
            self.make_virtual(1)
        self._used.add(device.ordinal)
        return cupy.cuda.Device(device.ordinal)

    def make_virtual(self, count: int) -> None:
        raise GpuError("CuPy has no virtual GPUs, it needs real ones; NumPy has the same functions")

    def place(self, device: Device, **options: Any) -> AbstractContextManager[object]:
        return cast(AbstractContextManager[object], self.own(device))

    def is_array(self, value: object) -> bool:
        return isinstance(value, cupy.ndarray)

    def where(self, array: Any) -> str:
        return f"cuda:{array.device.id}"

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        with self.own(device):
            return cupy.asarray(array)

    def copy(self, array: Any, device: Device) -> Any:
        with self.own(device):
            return cupy.array(array)

    def wait(self, *devices: str) -> None:
        """Wait for the current GPU, and for all GPUs that gpumagic has used through CuPy."""
        for ordinal in {*self._used, cupy.cuda.Device().id}:
            cupy.cuda.Device(ordinal).synchronize()

    def allocated(self, device: Device) -> tuple[int, int | None]:
        with self.own(device):
            return int(cupy.get_default_memory_pool().used_bytes()), None

    def places(self, array: Any) -> list[Place]:
        return [] if (place := place_of(array)) is None else [place]

    def pool(self, device: Device) -> Pool | None:
        if device.ordinal not in self._used:
            return None
        with self.own(device):
            pool = cupy.get_default_memory_pool()
            return Pool(self.name, int(pool.used_bytes()), None, int(pool.total_bytes()), None)
