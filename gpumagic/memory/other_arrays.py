"""Find where arrays of other libraries lie: CuPy's, JAX's, MLX's, cuDF's, Numba's.

They tell by the protocols that they exchange arrays by; nothing of theirs is imported here.
"""

from collections.abc import Iterable
from typing import Any

from gpumagic import faults
from gpumagic.memory.allocator import Place

# DLPack's numbers of what torch calls "cuda": CUDA, its managed memory, ROCm.
_CUDA = (2, 10, 13)


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
    described = getattr(array, "__cuda_array_interface__", None)
    if hasattr(array, "__dlpack_device__"):
        kind, number = array.__dlpack_device__()
        if int(kind) not in _CUDA:
            return None
    elif described is not None:
        number = 0
    else:
        return None
    address = described["data"][0] if described is not None else id(array)
    nbytes = getattr(array, "nbytes", 0)
    return Place(f"cuda:{int(number)}", address, nbytes) if nbytes else None
