"""Define the protocol of a framework's adapter, and find the device of any library's array."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from gpumagic.device import CPU, Device
from gpumagic.errors import as_typed
from gpumagic.ledger.entry import Memory, Tally
from gpumagic.moving.moved import Moves, Origins

if TYPE_CHECKING:
    from gpumagic.mismatch.explanation import Explanation

# Device types of DLPack (dlpack.h). Managed memory and ROCm are "cuda", as in torch.
_KINDS = dict.fromkeys((1, 3, 11), "cpu") | dict.fromkeys((2, 10, 13), "cuda")
_KINDS |= {8: "mps", 14: "xpu"}
# Devices by table library, because tables and some columns support no array protocol.
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

Split = tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]
"""The parts of a container, and a function that rebuilds the container from new parts."""

Counting = AbstractContextManager[object]


class Place(NamedTuple):
    """Describe an address range in a device's memory."""

    device: str
    address: int
    nbytes: int


@dataclass(frozen=True)
class Pool:
    """Record the bytes of a framework's allocator on one GPU; unknown values are None."""

    framework: str  # in official spelling: "JAX"
    used: int | None  # allocated now for arrays and temporary data
    peak: int | None
    taken: int | None  # obtained from the driver, both allocated and free
    limit: int | None  # maximum that the allocator obtains from the driver


def device_of(value: Any) -> str | None:
    """Return an array's device: ``"cuda:1"``, or ``"cuda"`` without a number; None if unknown."""
    kind = type(value)  # test the class, because a mock object has every attribute
    if hasattr(kind, "__dlpack_device__"):
        try:
            number, ordinal = map(int, value.__dlpack_device__())
        except Exception:  # noqa: BLE001  the library's error for a deleted or donated array
            return None
        name = _KINDS.get(number, f"DLPack's device type {number}")
        return name if name in ("cpu", "mps") else f"{name}:{ordinal}"
    if hasattr(kind, "__cuda_array_interface__"):
        own = getattr(value, "device", None)
        by_number = getattr(own, "id", own)
        named = f"cuda:{by_number}" if isinstance(by_number, int) else str(own)
        return named if named.startswith("cuda") else "cuda"
    return "cpu" if hasattr(kind, "__array_interface__") else _TABLES.get(_root(kind))


def nbytes_of(value: Any) -> int:
    """Return the bytes of an array's data; 0 if unknown."""
    nbytes = getattr(value, "nbytes", 0)
    return nbytes if isinstance(nbytes, int) else 0


def place_of(value: Any) -> Place | None:
    """Return an array's device, address and size; None if the device or size is unknown."""
    device, address = device_of(value), id(value)  # the id is used if the address is unknown
    if device is None or not (nbytes := nbytes_of(value)):
        return None
    if hasattr(type(value), "__cuda_array_interface__"):
        address = int(value.__cuda_array_interface__["data"][0])
    return Place("cuda:0" if device == "cuda" else device, address, nbytes)


def wholes(places: Iterable[Place]) -> dict[Place, Place]:
    """Map each place to the largest place that contains it, such as a view to its base array."""
    found: dict[Place, Place] = {}
    whole: Place | None = None
    for place in sorted({*places}, key=lambda each: (each.device, each.address, -each.nbytes)):
        end = place.address + place.nbytes
        if whole is None or place.device != whole.device or end > whole.address + whole.nbytes:
            whole = place
        found[place] = whole
    return found


def library_of(value: Any) -> str:
    """Return the name of a value's library in its official spelling: ``"CuPy"``."""
    root = _root(type(value))
    return _NAMES.get(root, root)


def _root(kind: type) -> str:
    return str(kind.__module__).partition(".")[0]


class Framework(Protocol):
    """Define the methods of a framework's adapter; method bodies here are the defaults."""

    name: str  # the framework's name in its official spelling: ``"JAX"``
    counts_allocations: bool = False  # whether `peak` is known to include all allocations

    def started(self) -> bool:
        """Whether the framework is initialized. Other methods may initialize the framework."""

    def devices(self) -> list[Device]:
        """Return the real or virtual GPUs that the framework can use, in order of ordinals."""

    def own(self, device: Device) -> Any:
        """Return the framework's own object for a device; GpuError if there is no such device."""

    def make_virtual(self, count: int) -> None:
        """Create `count` virtual GPUs; GpuError if that is unsupported or too late."""

    def place(
        self, device: Device, *, batches: bool = True, namespace: dict[str, Any] | None = None
    ) -> AbstractContextManager[Any]:
        """Return a context that places new arrays on `device` unless the code names a device."""
        # `batches`: whether to move DataLoaders' batches. torch's context yields a `Placement`.

    def is_array(self, value: object) -> bool:
        """Whether a value is an array of this framework with data on a device."""

    def arrays(self, namespace: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the variables that are arrays of this framework, with their names."""
        return [(name, value) for name, value in [*namespace.items()] if self.is_array(value)]

    def where(self, array: Any) -> str:
        """Return the device or devices of an array: ``"cuda:1"``, ``"cuda:0 + cuda:1"``."""

    def nbytes(self, array: Any) -> int:
        """Return the bytes of an array's data."""
        return nbytes_of(array)

    def move(
        self,
        variables: Iterable[tuple[str, Any]],
        device: Device,
        namespace: dict[str, Any],
        origins: Origins,
        line: Any = None,
    ) -> Moves:
        """Move these variables, or rebind their names to copies; GpuError if memory is short."""

    def remember(self, origins: Origins, cell: str) -> None:
        """Store the origins of arrays that a cell has moved, so that `home` can move them back."""

    def home(self, namespace: dict[str, Any], origins: Origins | None = None) -> Moves:
        """Move back all arrays that cells have moved, or only the arrays in `origins`."""

    def away(self, namespace: Mapping[str, Any]) -> dict[str, set[str]]:
        """Map the names of variables with arrays on GPUs to the names of these GPUs."""

    def copy(self, array: Any, device: Device) -> Any:
        """Return a new copy on `device`, even if the array is already on `device`."""

    def parts(self, value: object) -> Split | None:
        """Split a container of this framework; None for any other value, such as a list."""
        return None

    def knows(self, kind: type) -> bool:
        """Whether the framework knows `kind`, but would not know a copy, as with JAX's pytrees."""
        return False

    def wait(self, *devices: str) -> None:
        """Wait for the work of these devices, or of all devices if none is given."""

    def allocated(self, device: Device) -> tuple[int, int | None]:
        """Return the bytes of the arrays on a device, and the peak, which is None if unknown."""

    def peak(self, device: Device) -> Callable[[], Iterable[Memory]]:
        """Start to measure memory; return a function that stops and returns the known peaks."""
        before, peak_before = self.allocated(device)

        def stop() -> list[Memory]:
            allocated, peak = self.allocated(device)
            # An unchanged peak is from an earlier cell, so omit the peak.
            known = peak is not None and peak != peak_before
            return [Memory(str(device), peak or 0, allocated, before)] if known else []

        return stop

    def places(self, array: Any) -> list[Place]:
        """Return the memory of an array: one place for each device with data of the array."""

    def live(self) -> list[Any]:
        """List all live arrays, even unreachable ones; empty if unsupported or not started."""
        return []

    def pool(self, device: Device) -> Pool | None:
        """Return the allocator's bytes on a GPU; None if unknown, or if the GPU is unused."""

    def count(self, tally: Tally, strict: bool, *, warn: bool = False) -> Counting:
        """Return a context that counts waits and copies in `tally`; see `watch` for options."""

    def explain(self, error: BaseException, namespace: Mapping[str, Any]) -> "Explanation | None":
        """Explain an error about arrays on several devices; None for other errors, or if unsure."""
        return None


@dataclass(frozen=True)
class FrameworksOn:
    """Use several frameworks on one device."""

    device: Device
    frameworks: tuple[Framework, ...] = ()

    def place(self, stack: ExitStack) -> None:
        """Place this thread's new arrays on the device, until `stack` is closed."""
        for framework in self.frameworks:
            stack.enter_context(framework.place(self.device))

    def wait(self) -> None:
        for framework in self.frameworks:
            framework.wait()

    def know(self, kind: type) -> bool:
        return any(framework.knows(kind) for framework in self.frameworks)

    def parts(self, value: object) -> Split | None:
        """Split a container of one of the frameworks; None for any other value."""
        return next(filter(None, (framework.parts(value) for framework in self.frameworks)), None)

    def of(self, value: object) -> Framework | None:
        """Return the framework that an array belongs to; None for any other value."""
        return next((each for each in self.frameworks if each.is_array(value)), None)


NO_OTHERS = FrameworksOn(CPU)


def too_late(framework: str, there: int, wanted: int) -> str:
    """Return the error text for a framework that started with too few devices for virtual GPUs."""
    devices = f"{there} CPU device{'s' * (there != 1)}"
    typed = as_typed(f"%gpus --virtual {wanted}")
    cure = f"restart the kernel, and type {typed} before anything uses {framework}"
    return f"{framework} has started in this kernel with {devices}: {cure}"
