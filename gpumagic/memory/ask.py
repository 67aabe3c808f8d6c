"""Ask who holds the memory of each GPU now."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain, groupby
from operator import attrgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any

from gpumagic.device import cuda_state
from gpumagic.errors import GpuError
from gpumagic.memory import made_arrays
from gpumagic.memory.device_figures import figures, with_other_libraries
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.heap import no_collections
from gpumagic.memory.memory_report import (
    UNREACHED,
    DeviceMemory,
    Made,
    MemoryHolder,
    MemoryReport,
    is_of_other_library,
)
from gpumagic.memory.ways import Way
from gpumagic.usercode.files import user_namespace
from gpumagic.usercode.values import torch_here

if TYPE_CHECKING:
    from gpumagic.memory.allocator import Allocator
    from gpumagic.memory.made_in import MadeIn

WORKSPACE, _REST = "cuBLAS workspace", "held by no Python object"
"""The rows of what is allocated and reached from nowhere: the other is DDP's buckets, C++'s."""


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
    cells, whole = made_arrays.places(), not names
    return tuple(
        with_holders(device, found, made_in, cells, allocator, whole=whole) for device in devices
    )


def allocations() -> "tuple[Allocator | None, MadeIn | None]":
    """What torch has allocated at this moment, and where it was made; nothing without torch."""
    if torch_here() is None:
        return None, None
    from gpumagic.memory.allocator import Allocator
    from gpumagic.memory.made_in import MadeIn

    allocator = Allocator()
    return allocator, MadeIn(allocator)


def _by(names: tuple[str, ...], storage: FoundStorage) -> FoundStorage:
    """A storage as these variables hold it, though others may hold it too."""
    ways = sorted(storage.ways, key=lambda way: way.root not in names)
    return storage._replace(ways=tuple(ways))


def with_holders(
    device: DeviceMemory,
    found: Iterable[FoundStorage],
    made_in: "MadeIn | None",
    by_cells: made_arrays.Places,
    allocator: "Allocator | None" = None,
    *,
    whole: bool = True,
) -> DeviceMemory:
    """A GPU's figures with who holds what; where it is not the `whole`, without the rest."""
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
    by_cells: made_arrays.Places | None = None,
) -> list[MemoryHolder]:
    """One row for each holder at the top, the largest first: a variable, an output, …"""
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
            made = made_arrays.most_of(every, by_cells or {})
        else:
            made = made_in.most_of(every) if made_in is not None else None
        rows.append(_row(root, groups, made))
    return sorted(rows, key=_most_first)


def _most_first(row: MemoryHolder) -> int:
    return -row.nbytes


def _row(root: str, groups: list[list[FoundStorage]], made: Made | None) -> MemoryHolder:
    """What one holder has, in groups of what has the same ways."""
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
