"""Define what gpumagic asks of a framework: its devices, its arrays, its copies.

Where an array of any library is, is read by the protocols for exchanging arrays, and by the class
of the value: an object that answers every attribute is no array. Nothing is imported.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpumagic.device import Device
from gpumagic.errors import as_typed
from gpumagic.ledger.entry import Tally

# The numbers of DLPack's header, dlpack.h. Memory of the host that a GPU can read is the CPU's;
# what torch calls "cuda" is called so: CUDA, its managed memory, ROCm.
_KINDS = {
    **dict.fromkeys((1, 3, 11), "cpu"),
    **dict.fromkeys((2, 10, 13), "cuda"),
    8: "mps",
    14: "xpu",
}
# Tables, of which not every column has a protocol.
_TABLES = {"cudf": "cuda", "pandas": "cpu", "polars": "cpu", "pyarrow": "cpu"}
_NAMES = {
    "cudf": "cuDF",
    "cupy": "CuPy",
    "jax": "JAX",
    "jaxlib": "JAX",
    "mlx": "MLX",
    "numba": "Numba",
    "numpy": "NumPy",
    "tensorflow": "TensorFlow",
}


class Place(NamedTuple):
    """Describe a piece of a device's memory."""

    device: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Pool:
    """Record the figures of a framework's allocator for one GPU, in bytes; None if unknown."""

    framework: str
    """As its people write it: ``"JAX"``."""
    used: int | None
    """Given out now: to arrays, and to what computes."""
    peak: int | None
    taken: int | None
    """From the driver, given out or not."""
    limit: int | None
    """It takes no more than so much."""


def device_of(value: Any) -> str | None:
    """Return ``"cuda:1"``, ``"cuda"`` (only the driver knows which), ``"cpu"``; or None."""
    kind = type(value)
    if hasattr(kind, "__dlpack_device__"):
        try:
            number, ordinal = map(int, value.__dlpack_device__())
        except Exception:  # noqa: BLE001  a library's own: an array that was deleted or donated
            return None
        name = _KINDS.get(number, f"DLPack's device type {number}")
        return name if name in ("cpu", "mps") else f"{name}:{ordinal}"
    if hasattr(kind, "__cuda_array_interface__"):
        return _by_itself(getattr(value, "device", None))
    if hasattr(kind, "__array_interface__"):
        return "cpu"
    return _TABLES.get(_root(kind))


def _by_itself(device: Any) -> str:
    """Return the device by an array's own `device`: a number, an object with one, or a name."""
    ordinal = getattr(device, "id", device)
    if isinstance(ordinal, int):
        return f"cuda:{ordinal}"
    return str(device) if str(device).startswith("cuda") else "cuda"


def address_of(value: Any) -> int:
    """Return the address of its data; if unknown, a number that no other array has."""
    if hasattr(type(value), "__cuda_array_interface__"):
        return int(value.__cuda_array_interface__["data"][0])
    return id(value)


def nbytes_of(value: Any) -> int:
    """Return the bytes of its data; 0 if unknown."""
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0


def place_of(value: Any) -> Place | None:
    """Return an array's memory, by a protocol; None if its device or size is unknown."""
    device = device_of(value)
    if device is None or not (nbytes := nbytes_of(value)):
        return None
    # Where only the driver knows which GPU it is, it is most often the first one.
    return Place("cuda:0" if device == "cuda" else device, address_of(value), nbytes)


def wholes(places: Iterable[Place]) -> dict[Place, Place]:
    """Return the enclosing place of each place: a view has the place of its base."""
    found: dict[Place, Place] = {}
    whole: Place | None = None
    for place in sorted({*places}, key=lambda each: (each.device, each.address, -each.nbytes)):
        inside = whole is not None and (
            place.device == whole.device
            and place.address + place.nbytes <= whole.address + whole.nbytes
        )
        whole = whole if inside and whole is not None else place
        found[place] = whole
    return found


def library_of(value: Any) -> str:
    """Return the library of its class, as its authors write it: ``"CuPy"``."""
    root = _root(type(value))
    return _NAMES.get(root, root)


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


class Framework(Protocol):
    """Define the contract of an imported framework; method bodies here are the defaults."""

    name: str
    """As its people write it: ``"JAX"``."""

    def started(self) -> bool:
        """Whether it has found its devices; before that, other methods may start it."""

    def devices(self) -> list[Device]:
        """Return the GPUs that it can use here, virtual ones too, by ordinal."""

    def own(self, device: Device) -> Any:
        """Return its own object for a device, as its functions or `with` take it; or GpuError."""

    def make_virtual(self, count: int) -> None:
        """Make `count` virtual GPUs, in addition to the CPU; GpuError if it is too late."""

    def place(self, device: Device) -> AbstractContextManager[object]:
        """Make new arrays on `device` unless the code names one, within the context."""

    def is_array(self, value: object) -> bool:
        """Whether it is an array of this framework, with bytes on a device."""

    def where(self, array: Any) -> str:
        """Return the device that an array is on, ``"cuda:1"``; several are joined by ``" + "``."""

    def nbytes(self, array: Any) -> int:
        """Return the bytes of its data."""

    def bring(self, array: Any, device: Device, *, committed: bool = True) -> Any:
        """Return a copy on another device, or GpuError; an object that can move in place, itself.

        JAX itself may move an array that is not `committed`.
        """

    def copy(self, array: Any, device: Device) -> Any:
        """Return a new copy on a device, even if the array is there: donating it is harmless."""

    def parts(self, value: object) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]] | None:
        """Return the parts of its own container, and a function that rebuilds it from others.

        None for everything else: lists, dicts and the like are walked without this method.
        """
        return None

    def knows(self, kind: type) -> bool:
        """Whether it knows a class by its identity, so that a copy of the class would not work."""
        return False

    def wait(self) -> None:
        """Wait until all its devices have finished what they were given."""

    def compile_seconds(self) -> float | None:
        """Return the seconds it has compiled since this was first called; None if unknown."""
        return None

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """Return the bytes of its arrays on a device now, and their peak if known."""

    def places(self, array: Any) -> list[Place]:
        """Return the pieces of memory of an array: one on each device where it has data."""

    def live(self) -> list[Any]:
        """List all its live arrays, also unreachable ones; empty if it cannot.

        This starts nothing.
        """
        return []

    def pool(self, device: Device) -> Pool | None:
        """Return its allocator's figures for a GPU; None if unknown, or if it has not started."""

    def count(self, tally: Tally, strict: bool) -> AbstractContextManager[object]:
        """Count its copies between devices and its waits by the user's line, within the context.

        With `strict`, an implicit one raises `ImplicitCopyError` at its line.
        """


def too_late(framework: str, there: int, wanted: int) -> str:
    """Return the error's text if a framework has started with too few devices for virtual GPUs."""
    devices = f"{there} CPU device{'s' * (there != 1)}"
    return (
        f"{framework} has started in this kernel with {devices}: restart the kernel, and type "
        f"{as_typed(f'%gpus --virtual {wanted}')} before anything uses {framework}"
    )
