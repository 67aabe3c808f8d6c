"""Ask who holds the memory of each GPU now."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any

import torch

from gpumagic.errors import GpuError
from gpumagic.memory.find_holders import FoundStorage, find
from gpumagic.memory.memory_report import DeviceMemory, MemoryHolder, MemoryReport
from gpumagic.placement.torch_devices import devices

UNREACHED = "held by no Python object"
"""The row of what is allocated and reached from nowhere: workspaces, DDP's buckets, C++."""


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
        In one line: a name that is no variable.
    """
    start = perf_counter()
    namespace = notebook()
    for name in names:
        if name not in namespace:
            raise GpuError(f"memory: there is no variable {name!r}; type its name as in the cell")
    found = find(namespace)
    if names:
        found = [storage for storage in found if storage.paths[0].root in names]
    each = tuple(
        _device_memory(number, found, whole=not names) for number, _ in enumerate(devices())
    )
    return MemoryReport(each, perf_counter() - start)


def notebook() -> Mapping[str, Any]:
    """The variables of the notebook, or of the script."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return vars(sys.modules["__main__"]) if shell is None else shell.user_ns


def _device_memory(number: int, found: Iterable[FoundStorage], *, whole: bool) -> DeviceMemory:
    here, device = devices()[number], f"cuda:{number}"
    free, total = torch.cuda.mem_get_info(number)
    allocated = torch.cuda.memory_allocated(number)
    rows = grouped(storage for storage in found if storage.device == device)
    rest = allocated - sum(row.nbytes for row in rows)
    if whole and rest:
        rows.append(MemoryHolder(UNREACHED, "unreached", device, rest))
    return DeviceMemory(
        device=device,
        name=here.name,
        virtual=here.virtual,
        total=total,
        free=free,
        allocated=allocated,
        reserved=torch.cuda.memory_reserved(number),
        torn=torch.cuda.memory_stats(number).get("inactive_split_bytes.all.current"),
        other_in_process=None,
        others=None,
        holders=tuple(sorted(rows, key=lambda row: -row.nbytes)),
    )


def grouped(found: Iterable[FoundStorage]) -> list[MemoryHolder]:
    """One row for each holder at the top: a variable, an output, an exception, …"""
    of_roots: dict[str, list[FoundStorage]] = {}
    for storage in found:
        of_roots.setdefault(storage.paths[0].root, []).append(storage)
    return [_row(root, storages) for root, storages in of_roots.items()]


def _row(root: str, storages: list[FoundStorage]) -> MemoryHolder:
    kinds: Counter[str] = Counter()
    aliases: dict[str, None] = {}
    for storage in storages:
        kinds[storage.paths[0].kind] += storage.nbytes
        aliases |= dict.fromkeys(path.root for path in storage.paths if path.root != root)
    return MemoryHolder(
        path=root,
        kind=kinds.most_common(1)[0][0],
        device=storages[0].device,
        nbytes=kinds.total(),
        aliases=tuple(aliases),
        count=len(storages),
    )
