"""Ask who holds the memory of each GPU now.

Nothing here starts CUDA or makes a context on a GPU that has none; unknown figures are None. JAX
lists its live arrays cheaply, so which cell made each is noted after the cell.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gpumagic.device import Device, cuda_state
from gpumagic.errors import GpuError
from gpumagic.frameworks.known import imported, jax_here, started
from gpumagic.gputable import SYSTEM, Holder, holders
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.memory_report import (
    UNREACHED,
    DeviceMemory,
    Made,
    MemoryHolder,
    MemoryReport,
    is_of_other_library,
)
from gpumagic.memory.object_graph import no_collections
from gpumagic.memory.paths import Way
from gpumagic.telemetry import collect
from gpumagic.telemetry.snapshot import GpuSample
from gpumagic.usercode.files import user_namespace
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.allocator import Allocator, MadeIn


_cells: dict[int, tuple["weakref.ref[Any]", str]] = {}
Places = Mapping[tuple[str, int], str]


def note(cell: str) -> None:
    """Record that a cell, ``"In [3]"``, made the new arrays; or that their cell is unknown."""
    for key in [key for key, (array, _) in _cells.items() if array() is None]:
        del _cells[key]
    for array in jax_here().live():
        if id(array) not in _cells:
            _cells[id(array)] = weakref.ref(array), cell


def forget() -> None:
    """Forget the cells of all arrays."""
    _cells.clear()


def places() -> Places:
    """Return the cells by device and address of the live arrays that they made."""
    found: dict[tuple[str, int], str] = {}
    framework = jax_here() if "jax" in sys.modules and _cells else None
    for known, cell in [*_cells.values()]:
        if framework is not None and framework.is_array(array := known()):
            for place in framework.places(array):  # a part of an array, made later, is no other
                found.setdefault((place.device, place.address), cell)
    return found


def most_of(storages: Iterable[FoundStorage], made: Places) -> Made | None:
    """Return the cell that made most bytes of some storages; None if unknown."""
    by_cell: Counter[str] = Counter()
    for each in storages:
        by_cell[made.get((each.device, each.address), "")] += each.nbytes
    cell = max(by_cell, key=lambda cell: by_cell[cell], default="")
    return Made(cell) if cell else None


def figures() -> list[DeviceMemory]:
    """Return the GPUs that this process can use, with torch's figures but without holders."""
    torch = torch_here()
    if torch is not None:
        from gpumagic.placement.torch_devices import tell_cuda_order

        tell_cuda_order()
    snapshot = collect.snapshot()
    gpus = {gpu.ordinal: gpu for gpu in snapshot.gpus if gpu.ordinal is not None and not gpu.lost}
    held = holders(snapshot.gpus, snapshot.processes, each=False)
    ordinals = {*range(torch.cuda.device_count() if torch else 0), *(gpus if imported() else ())}
    found = [_figures(n, gpus.get(n), held) for n in sorted(ordinals)]
    return found + (_apple(torch) if torch else [])


def with_other_libraries(device: DeviceMemory, found: Iterable[FoundStorage]) -> DeviceMemory:
    """Return a GPU's figures with the memory that other libraries' arrays take."""
    kind, _, ordinal = device.device.partition(":")
    here = [each for each in found if each.device == device.device and each.is_of_other_library]
    nbytes = sum(each.nbytes for each in here)
    if kind != "cuda" or not (nbytes or started()):
        return device
    gpu = Device("cuda", int(ordinal), virtual=device.virtual)
    pools = tuple(pool for each in started() if (pool := each.pool(gpu)) is not None)
    # What no allocator tells of was taken at least for what there is.
    taken = max(nbytes, sum(pool.taken or 0 for pool in pools))
    rest = device.other_in_process
    return replace(
        device,
        allocated=None if device.allocated is None else device.allocated + nbytes,
        reserved=None if device.reserved is None else device.reserved + taken,
        other_in_process=None if rest is None else max(rest - taken, 0),
        pools=pools,
    )


def _figures(ordinal: int, gpu: GpuSample | None, held: Sequence[Holder]) -> DeviceMemory:
    allocated, reserved, torn = _allocator(ordinal)
    device = f"cuda:{ordinal}"
    if gpu is None:  # nobody tells
        return DeviceMemory(device, None, False, None, None, allocated, reserved, torn)
    mine, others = None, []
    for holder in held:
        if gpu.uuid in holder.memory and holder.mine:
            mine = holder.memory[gpu.uuid]
        elif gpu.uuid in holder.memory:
            others.append((holder.name, holder.memory[gpu.uuid]))
    if mine is None and reserved:
        # Our own pid is another one out there (a container): ours counts as the system's.
        others = [(name, b - reserved if b and name == SYSTEM else b) for name, b in others]
        others = [(name, b) for name, b in others if b is None or b > 0]
    known = [b for _, b in others if b is not None]
    return DeviceMemory(
        device=device,
        name=gpu.name,
        virtual=gpu.virtual,
        total=gpu.memory_total,
        free=_free(gpu),
        allocated=allocated,
        reserved=reserved,
        torn=torn,
        other_in_process=None if mine is None or reserved is None else max(mine - reserved, 0),
        others=sum(known) if known or not others else None,
        others_by_name=tuple(others),
        uuid=gpu.uuid,
    )


def _free(gpu: GpuSample) -> int | None:
    if gpu.memory_total is None or gpu.memory_used is None:
        return None
    return max(gpu.memory_total - gpu.memory_used - (gpu.memory_reserved or 0), 0)


def _allocator(ordinal: int) -> tuple[int | None, int | None, int | None]:
    """Return the bytes allocated, reserved, and free in fragments between allocated blocks."""
    torch = torch_here()
    if torch is None or not torch.cuda.is_initialized():
        return 0, 0, 0
    from gpumagic.memory.allocator import is_native

    stats: dict[str, Any] = torch.cuda.memory_stats(ordinal)
    # Another allocator does not tell, and says 0.
    torn = stats.get("inactive_split_bytes.all.current") if is_native() else None
    return stats.get("allocated_bytes.all.current"), stats.get("reserved_bytes.all.current"), torn


def _apple(torch: Any) -> list[DeviceMemory]:
    """Apple's GPU, whose memory is the host's."""
    if not torch.backends.mps.is_available():
        return []
    mps = torch.mps
    allocated, reserved = mps.current_allocated_memory(), mps.driver_allocated_memory()
    most = mps.recommended_max_memory()
    return [DeviceMemory("mps:0", "Apple GPU", False, most, None, allocated, reserved)]


WORKSPACE, _REST = "cuBLAS workspace", "held by no Python object"
"""Rows of allocated memory that no root reaches; the second is C++'s, such as DDP's buckets."""


def memory(*names: str) -> MemoryReport:
    """Tell who holds the memory of each GPU: variables, outputs, exceptions, …, by name.

    Parameters
    ----------
    *names : str
        Only what these variables hold; by default everything.

    Returns
    -------
    MemoryReport
        For each GPU its numbers, and its holders, which add up to what torch's allocator counts.

    Raises
    ------
    GpuError
        In one line: a name that is no variable; CUDA is dead.
    """
    cuda_state.check()
    start = perf_counter()
    namespace = user_namespace()
    for name in names:
        if name not in namespace:
            raise GpuError(f"memory: there is no variable {name!r}; type its name as in the cell")
    with no_collections():  # until all that was looked through is gone
        devices = _devices(names, namespace)
    return MemoryReport(devices, perf_counter() - start)


def _devices(names: tuple[str, ...], namespace: Mapping[str, Any]) -> tuple[DeviceMemory, ...]:
    allocator, made_in = allocations()
    found = find(namespace, allocator=allocator)
    devices = [with_other_libraries(device, found) for device in figures()]
    if names:
        found = [_by(names, storage) for storage in found if storage.roots & set(names)]
    cells, whole = places(), not names
    return tuple(
        with_holders(device, found, made_in, cells, allocator, whole=whole) for device in devices
    )


def allocations() -> "tuple[Allocator | None, MadeIn | None]":
    """Return what torch has allocated now, and where it was made; empty without torch."""
    if torch_here() is None:
        return None, None
    from gpumagic.memory.allocator import Allocator, MadeIn

    allocator = Allocator()
    return allocator, MadeIn(allocator)


def _by(names: tuple[str, ...], storage: FoundStorage) -> FoundStorage:
    """Return a storage with the ways from these variables first."""
    ways = sorted(storage.ways, key=lambda way: way.root not in names)
    return storage._replace(ways=tuple(ways))


def with_holders(
    device: DeviceMemory,
    found: Iterable[FoundStorage],
    made_in: "MadeIn | None",
    by_cells: Places,
    allocator: "Allocator | None" = None,
    *,
    whole: bool = True,
) -> DeviceMemory:
    """Return a GPU's figures with its holders; if not the `whole`, without unreached memory."""
    here = [storage for storage in found if storage.device == device.device]
    rows = grouped(here, made_in, by_cells)
    rest = (device.allocated or 0) - sum(row.nbytes for row in rows)
    if whole and rest > 0:
        met = {storage.address for storage in here}
        known = 0 if allocator is None else allocator.workspaces(device.device, met)
        for name, nbytes in ((WORKSPACE, known), (_REST, rest - known)):
            if nbytes > 0:
                rows.append(MemoryHolder(name, UNREACHED, device.device, nbytes))
    return replace(device, holders=tuple(sorted(rows, key=_most_first)))


def grouped(
    found: Iterable[FoundStorage],
    made_in: "MadeIn | None" = None,
    by_cells: Places | None = None,
) -> list[MemoryHolder]:
    """Return a row for each top-level holder (variable, output, …), the largest first."""
    alike: dict[tuple[Way, ...], list[FoundStorage]] = {}
    for ways, run in groupby(found, key=attrgetter("ways")):
        alike.setdefault(ways, []).extend(run)
    of_roots: dict[tuple[str, bool], list[list[FoundStorage]]] = {}
    for (first, *_), storages in alike.items():
        of_roots.setdefault((first.root, is_of_other_library(first.kind)), []).append(storages)
    rows = []
    for (root, _), groups in of_roots.items():
        every = [*chain.from_iterable(groups)]
        if every[0].is_of_other_library:
            made = most_of(every, by_cells or {})
        else:
            addresses = map(attrgetter("address"), every)
            made = made_in.most_of(every[0].device, addresses) if made_in is not None else None
        rows.append(_row(root, groups, made))
    return sorted(rows, key=_most_first)


def _most_first(row: MemoryHolder) -> int:
    return -row.nbytes


def _row(root: str, groups: list[list[FoundStorage]], made: Made | None) -> MemoryHolder:
    """Return the row of one holder; each group is storages that the same ways reach."""
    kinds: Counter[str] = Counter()
    aliases: dict[str, None] = {}
    for storages in groups:
        ways = storages[0].ways
        kinds[ways[0].kind] += sum(storage.nbytes for storage in storages)
        aliases |= dict.fromkeys(way.root for way in ways if way.root != root)
    return MemoryHolder(
        path=root,
        kind=kinds.most_common(1)[0][0],
        device=groups[0][0].device,
        nbytes=kinds.total(),
        made=made,
        aliases=tuple(aliases),
        count=sum(map(len, groups)),
        kinds=tuple(kinds.most_common()),
    )
