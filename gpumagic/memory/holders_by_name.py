"""List the holders of each GPU's memory (variables, outputs, …); each storage counts once.

A walk visits all objects reachable from roots (variables, …). Tensors and arrays at the same place
(a device, an address and a size) count as one storage. The result has only names and numbers. User
code runs only to evaluate a part of a variable, as in `net.fc`. CUDA is not initialized.
"""

import gc
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from gpumagic import faults
from gpumagic.device import Device, cuda_state, here, is_where, resolve
from gpumagic.errors import GpuError, meant
from gpumagic.frameworks.framework import Place, library_of, place_of, wholes
from gpumagic.frameworks.known import imported, started
from gpumagic.gputable import SYSTEM, Holder, holders
from gpumagic.memory.memory_report import UNREACHED, DeviceMemory, MemoryHolder, MemoryReport
from gpumagic.memory.object_graph import Paths, Root, Walk, Way, is_other_array
from gpumagic.memory.roots import KeptOutputs, Roots, walk_errors, walk_unreachable
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import GpuSample
from gpumagic.usercode.files import user_namespace
from gpumagic.usercode.frames import first_name
from gpumagic.usercode.values import comes_from, torch_here

if TYPE_CHECKING:
    from gpumagic.memory.allocator import Allocator


class FoundStorage(NamedTuple):
    """Describe a storage on a GPU, and its holders. The bytes count only for the first holder."""

    device: str
    address: int  # as in torch.cuda.memory_snapshot()
    nbytes: int
    ways: tuple[Way, ...]  # the name of each holder, and the kind of its value, such as "parameter"
    path: tuple[str, ...] = ()  # path from the first holder; empty without `find(paths=True)`
    parameter: tuple[str, ...] = ()  # path of the parameter of a gradient, state or saved tensor
    is_of_other_library: bool = False  # torch did not allocate the storage

    @property
    def roots(self) -> set[str]:
        """Return the names of all holders."""
        return {way.root for way in self.ways}


def allocations() -> "Allocator | None":
    """Return torch's allocated blocks and the lines that allocated them; None without torch."""
    if torch_here() is None:
        return None
    from gpumagic.memory.allocator import Allocator

    return Allocator()


def find(
    namespace: Mapping[str, Any],
    *,
    before: Iterable[Root] = (),
    after: Iterable[Root] = (),
    closed: Iterable[Any] = (),  # objects that no path passes through
    allocator: "Allocator | None" = None,
    paths: bool = False,
) -> list[FoundStorage]:
    """List storages on GPUs, largest first. Search `before`, the notebook's roots, then `after`."""
    torch = torch_here()
    # Torch functions are disabled, so that no `__torch_function__` of the user's code runs.
    with cuda_state.no_collections(), torch._C.DisableTorchFunction() if torch else nullcontext():
        allocator = allocator or allocations()
        roots = Roots(namespace)
        walk = Walk([*roots.closed(), *closed], roots.is_users_class)
        for group in (before, *roots.near(), after):
            walk.walk(group)
        visited = _visited(walk, allocator)
        # Search only if storages are missing, because `walk_unreachable` may take seconds.
        for search in (walk_errors, walk_unreachable):
            if allocator is not None and (missing := _missing(allocator, visited)):
                search(walk, missing)
                visited = _visited(walk, allocator)
        return _storages(walk, visited, allocator, paths)


def _visited(walk: Walk, allocator: "Allocator | None") -> dict[Place, list[int]]:
    """Map each block of torch's memory to its visited tensors, as indices of `walk.objects`."""
    found: dict[Place, list[int]] = {}
    if allocator is not None:
        kinds = {id(kind) for kind in walk.kinds if comes_from(kind, "torch.Tensor")}
        for number, obj in enumerate(walk.objects):
            if id(type(obj)) in kinds and (place := allocator.place(obj)) is not None:
                found.setdefault(place, []).append(number)
    return found


def _missing(allocator: "Allocator", visited: Mapping[Place, Any]) -> set[int]:
    """Return the ids of live tensors whose places are not in `visited`."""
    if sum(place.nbytes for place in visited) == allocator.total:
        return set()
    kind = torch_here().Tensor
    every = [obj for obj in gc.get_objects() if issubclass(type(obj), kind)]
    return {id(each) for each in every if (at := allocator.place(each)) and at not in visited}


def _add_arrays(
    walk: Walk, visited: dict[Place, list[int]], allocator: "Allocator | None"
) -> dict[Place, str]:
    """Add non-torch arrays to `visited`; return the library of each place not in torch's memory."""
    library = dict[Place, str]()
    kinds = {id(kind) for kind in walk.kinds if is_other_array(kind)}
    for array, place in array_places(obj for obj in walk.objects if id(type(obj)) in kinds):
        block = allocator.block(place) if allocator is not None else None
        if block is None:
            library[place] = library_of(array)
        if (number := walk.number(array)) is not None:
            visited.setdefault(block or place, []).append(number)
    return library


def _storages(
    walk: Walk, visited: dict[Place, list[int]], allocator: "Allocator | None", paths: bool
) -> list[FoundStorage]:
    found, library = list[FoundStorage](), _add_arrays(walk, visited, allocator)
    for place in library.keys() - visited.keys():  # arrays that the walk did not visit
        holder = f"held by {library[place]} itself, or by no Python object"
        way = Way(holder, f"{library[place]} array")
        found.append(FoundStorage(*place, (way,), (holder,), is_of_other_library=True))
    names = Paths(walk)
    for place, numbers in visited.items():
        is_other = bool(library) and place in library
        kind = f"{library[place]} array" if is_other else ""
        ways = names.ways(numbers[0], kind)
        if len(numbers) > 1:
            numbers = names.plain_first(numbers)
            ways = tuple(dict.fromkeys(way for n in numbers for way in names.ways(n, kind)))
        path = names.path(numbers[0]) if paths else ()
        kept_for = next(filter(None, map(names.parameter, numbers)), ()) if paths else ()
        found.append(FoundStorage(*place, ways, path, kept_for, is_other))
    return sorted(found, key=attrgetter("nbytes"), reverse=True)


def array_places(arrays: Iterable[Any]) -> list[tuple[Any, Place]]:
    """Return `arrays` and all live arrays of frameworks, each with the place of its base array."""
    every = {id(array): array for array in arrays}
    for framework in started():
        with faults.kept(f"listing the arrays of {framework.name}"):
            every |= {id(array): array for array in framework.live()}
    found: list[tuple[Any, Place]] = []
    for array in every.values():
        with faults.kept("asking another library's array where it is"):
            its = next((each for each in started() if each.is_array(array)), None)
            places = [place_of(array)] if its is None else its.places(array)
            found += [(array, at) for at in places if at is not None and at.device != "cpu"]
    # Largest first, so that the name of a base array comes before the names of its views.
    found.sort(key=lambda each: -each[1].nbytes)
    whole = wholes(place for _, place in found)
    return [(array, whole[place]) for array, place in found]


def figures() -> list[DeviceMemory]:
    """Return the memory figures of each GPU that this process can use, without holders."""
    torch = torch_here()
    if torch is not None:
        from gpumagic.placement.torch_devices import tell_cuda_order

        tell_cuda_order()
    snapshot = collect.snapshot()
    gpus = {gpu.ordinal: gpu for gpu in snapshot.gpus if gpu.ordinal is not None and not gpu.lost}
    held = holders(snapshot.gpus, snapshot.processes, each=False)
    ordinals = {*range(torch.cuda.device_count() if torch else 0), *(gpus if imported() else ())}
    found = [_figures(n, gpus.get(n), held) for n in sorted(ordinals)]
    if torch is not None and torch.backends.mps.is_available():  # MPS shares the host's memory
        most = torch.mps.recommended_max_memory()
        taken = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
        found.append(DeviceMemory("mps:0", "Apple GPU", False, most, None, *taken))
    return found


def _figures(ordinal: int, gpu: GpuSample | None, held: Sequence[Holder]) -> DeviceMemory:
    allocated, reserved, split = _allocator(ordinal)
    found = DeviceMemory(f"cuda:{ordinal}", None, False, None, None, allocated, reserved, split)
    if gpu is None:  # the snapshot has no figures of this GPU
        return found
    mine = next((h.memory[gpu.uuid] for h in held if h.mine and gpu.uuid in h.memory), None)
    # In a container, the driver lists this process under an unknown pid, as part of `SYSTEM`.
    others = _others(gpu.uuid, held, reserved if mine is None else 0)
    known = [nbytes for _, nbytes in others if nbytes is not None]
    return replace(
        found,
        name=gpu.name,
        virtual=gpu.virtual,
        total=gpu.memory_total,
        free=_less(_less(gpu.memory_total, gpu.memory_used), gpu.memory_reserved or 0),
        other_in_process=_less(mine, reserved),
        others=sum(known) if known or not others else None,
        others_by_name=others,
        uuid=gpu.uuid,
    )


def _others(
    uuid: str, held: Sequence[Holder], ours: int | None
) -> tuple[tuple[str, int | None], ...]:
    """Return the bytes of other processes on a GPU; subtract `ours`, which `SYSTEM` includes."""
    named = [(h.name, h.memory[uuid]) for h in held if not h.mine and uuid in h.memory]
    named = [(name, _less(n, ours) if name == SYSTEM else n) for name, n in named]
    return tuple(each for each in named if each[1] != 0)


def _less(nbytes: int | None, taken: int | None) -> int | None:
    return None if nbytes is None or taken is None else max(nbytes - taken, 0)


def _allocator(ordinal: int) -> tuple[int | None, int | None, int | None]:
    """Return the bytes allocated, reserved, and free in fragments between allocated blocks."""
    torch = torch_here()
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0, 0
    from gpumagic.memory.allocator import is_native

    stats: dict[str, Any] = torch.cuda.memory_stats(ordinal)
    # Other allocators do not report fragments; then torch returns 0.
    split = stats.get("inactive_split_bytes.all.current") if is_native() else None
    return stats.get("allocated_bytes.all.current"), stats.get("reserved_bytes.all.current"), split


def with_other_libraries(device: DeviceMemory, here: Iterable[FoundStorage]) -> DeviceMemory:
    """Return a GPU's figures, including the memory of other libraries' arrays."""
    kind, _, ordinal = device.device.partition(":")
    nbytes = sum(each.nbytes for each in here if each.is_of_other_library)
    if kind != "cuda" or not (nbytes or started()):
        return device
    gpu = Device("cuda", int(ordinal), virtual=device.virtual)
    pools = tuple(pool for each in started() if (pool := each.pool(gpu)) is not None)
    # If an allocator's figure is unknown, the bytes of the arrays are a lower bound.
    taken = max(nbytes, sum(pool.taken or 0 for pool in pools))
    return replace(
        device,
        allocated=None if device.allocated is None else device.allocated + nbytes,
        reserved=None if device.reserved is None else device.reserved + taken,
        other_in_process=_less(device.other_in_process, taken),
        pools=pools,
    )


_STEP = r"\.[^\W\d]\w*|\[(?:'[^']*'|\"[^\"]*\"|[^\]'\"])*\]"
_NAMED = re.compile(rf"[^\W\d]\w*(?:{_STEP})*")


def memory(*what: object) -> MemoryReport:
    """List the holders of each GPU's memory by name: variables, outputs, exceptions, …

    Parameters
    ----------
    *what : str, int, torch.device or Device
        GPUs (``0``, ``"cuda:1"``) or variables (``"net"``, ``"data['x']"``) to list; by default
        all. A word that names a GPU and a variable means the variable.

    Returns
    -------
    MemoryReport
        The figures and the holders of each GPU. Holders' bytes add up to the allocator's total.

    Raises
    ------
    GpuError
        There is no such GPU or variable, or CUDA is dead.
    """
    cuda_state.check()
    start = perf_counter()
    namespace = user_namespace()
    names, gpus = names_and_gpus(what, namespace)
    is_output = KeptOutputs(namespace).has
    parts = [Root(n, value_of(n, namespace)) for n in names if n not in namespace or is_output(n)]
    with cuda_state.no_collections():  # until the visited objects are released
        allocator = allocations()
        found = find(namespace, before=parts, allocator=allocator)
        shown = [with_holders(each, found, allocator, names) for each in figures()]
    return MemoryReport(tuple(shown), perf_counter() - start).of(gpus)


def names_and_gpus(
    what: Iterable[object], namespace: Mapping[str, Any]
) -> tuple[list[str], set[str]]:
    """Separate variables (or parts of them) from GPUs; any other word counts as a variable."""
    if torch_here() is None:
        devices = here
    else:
        from gpumagic.placement.torch_devices import devices
    names, gpus = list[str](), set[str]()
    for each in what:
        if isinstance(each, str) and (first_name(each) in namespace or not is_where(each)):
            names.append(each)
        else:
            there = devices(memory=isinstance(each, str) and "free" in each)
            gpus |= {str(device) for device in resolve(each, there, cpu=False)}
    return list(dict.fromkeys(names)), gpus


def value_of(name: str, namespace: Mapping[str, Any]) -> Any:
    """Return the value of a variable or of its part (`net.fc`); GpuError if there is none."""
    if not _NAMED.fullmatch(name):
        raise GpuError(f"{name} is neither a variable nor a part of one, such as net or data[0]")
    if first_name(name) not in namespace:
        asked = meant(name, namespace) or "%gpus shows what GPUs there are"
        raise GpuError(f"there is no variable {name!r}; {asked}".rstrip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = eval(name, {}, namespace)
            # Return a copy of `Out`, because a walk does not enter the original.
            return {**value} if value is namespace.get("_oh", {}) else value
    except Exception as error:  # noqa: BLE001  user code may raise anything
        raise GpuError(f"{name} raises {type(error).__name__}: {error}") from None


def with_holders(
    device: DeviceMemory,
    found: Iterable[FoundStorage],
    allocator: "Allocator | None" = None,
    names: Collection[str] = (),
) -> DeviceMemory:
    """Add holders to a GPU's figures; with `names`, add only storages that these names hold."""
    here = [each for each in found if each.device == device.device]
    device = with_other_libraries(device, here)
    if names:  # put these names first among each storage's holders
        here = [
            each._replace(ways=tuple(sorted(each.ways, key=lambda way: way.root not in names)))
            for each in here
            if not each.roots.isdisjoint(names)
        ]
    rows = grouped(here, allocator)
    rest = (device.allocated or 0) - sum(row.nbytes for row in rows)
    if rest > 0 and not names:
        rows.append(MemoryHolder("held by cuBLAS or C++ code", UNREACHED, device.device, rest))
    return replace(device, holders=tuple(sorted(rows, key=lambda row: -row.nbytes)))


def grouped(
    found: Iterable[FoundStorage], allocator: "Allocator | None" = None
) -> list[MemoryHolder]:
    """Return a row for each top-level holder (variable, output, …), the largest first."""
    groups: dict[tuple[str, bool], list[FoundStorage]] = {}
    for each in found:
        groups.setdefault((each.ways[0].root, each.is_of_other_library), []).append(each)
    rows = list[MemoryHolder]()
    for (root, _), group in groups.items():
        device, kinds = group[0].device, Counter[str]()
        for each in group:
            kinds[each.ways[0].kind] += each.nbytes
        roots = dict.fromkeys(way.root for ways in {each.ways: 0 for each in group} for way in ways)
        addresses = (each.address for each in group)
        holder = MemoryHolder(
            path=root,
            kind=kinds.most_common(1)[0][0],
            device=device,
            nbytes=kinds.total(),
            made=None if allocator is None else allocator.made_in(device, addresses),
            aliases=tuple(name for name in roots if name != root),
            count=len(group),
            kinds=tuple(kinds.most_common()),
        )
        rows.append(holder)
    return sorted(rows, key=lambda row: -row.nbytes)
