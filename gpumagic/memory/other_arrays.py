"""Find where arrays of other libraries lie: CuPy's, JAX's, MLX's, cuDF's, Numba's.

They tell by the protocols that they exchange arrays by; nothing of theirs is imported here.
"""

from collections.abc import Iterable
from typing import Any

from gpumagic import faults
from gpumagic.frameworks.exchange import Place, place_of, wholes
from gpumagic.frameworks.known import started


def places(arrays: Iterable[Any]) -> list[tuple[Any, Place]]:
    """Arrays with their memory on GPUs; a view of another has the place of that.

    Those of a framework that lists what lives are all there, met or not.
    """
    every = {id(array): array for array in arrays}
    for framework in started():
        with faults.kept(f"listing the arrays of {framework.name}"):
            every |= {id(array): array for array in framework.live()}
    found: list[tuple[Any, Place]] = []
    for array in every.values():
        with faults.kept("asking another library's array where it is"):
            found += [(array, place) for place in _places(array)]
    # What is the whole says by its name who holds it.
    found.sort(key=lambda each: -each[1].nbytes)
    whole = wholes(place for _, place in found)
    return [(array, whole[place]) for array, place in found]


def _places(array: Any) -> list[Place]:
    for framework in started():
        if framework.is_array(array):
            every = framework.places(array)
            break
    else:
        place = place_of(array)
        every = [place] if place is not None else []
    return [place for place in every if place.device != "cpu"]
