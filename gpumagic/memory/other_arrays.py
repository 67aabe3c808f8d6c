"""Find where arrays of other libraries lie: CuPy's, JAX's, MLX's, cuDF's, Numba's.

They tell by the protocols that they exchange arrays by; nothing of theirs is imported here.
"""

from collections.abc import Iterable
from typing import Any

from gpumagic import faults
from gpumagic.frameworks.exchange import address_of, device_of, nbytes_of
from gpumagic.memory.allocator import Place


def places(arrays: Iterable[Any]) -> list[tuple[Any, Place]]:
    """Arrays on GPUs with their memory; a view of another has the place of that."""
    found: list[tuple[Any, Place]] = []
    for array in arrays:
        with faults.kept("asking another library's array where it is"):
            place = _place(array)
            if place is not None:
                found.append((array, place))
    found.sort(key=lambda each: (each[1].device, each[1].address, -each[1].nbytes))
    for n, (array, place) in enumerate(found[1:], 1):
        whole = found[n - 1][1]
        inside = whole.address <= place.address and _end(place) <= _end(whole)
        if place.device == whole.device and inside:
            found[n] = array, whole
    return found


def _end(place: Place) -> int:
    return place.address + place.nbytes


def _place(array: Any) -> Place | None:
    device = device_of(array) or ""
    if not device.startswith("cuda") or not nbytes_of(array):
        return None
    # Where only the driver knows which GPU it is, it is most often the first one.
    return Place("cuda:0" if device == "cuda" else device, address_of(array), nbytes_of(array))
