"""List the variables that stay where they are: arrays of libraries that nothing here can bring."""

from collections.abc import Iterable, Mapping
from typing import Any

from gpumagic import faults
from gpumagic.device import Device
from gpumagic.display.units import size
from gpumagic.frameworks.exchange import device_of, library_of, nbytes_of
from gpumagic.frameworks.known import imported
from gpumagic.moving.moved import Left
from gpumagic.usercode.torch_classes import is_tensor


def left_alone(names: Iterable[str], namespace: Mapping[str, Any], device: Device) -> list[Left]:
    """Those of these variables that are on another GPU: ``a: CuPy, on cuda:0, 1.2 GiB``."""
    found = []
    for name in names:
        value = namespace.get(name)
        if is_tensor(value) or any(each.is_array(value) for each in imported()):
            continue
        with faults.kept("asking another library's array where it is"):
            where = device_of(value)
            # What NumPy has is for the host, and stays there.
            if where not in (None, "cpu", str(device)):
                nbytes = nbytes_of(value) or None
                found.append(Left(name, f"{library_of(value)}, on {where}, {size(nbytes)}"))
    return found
