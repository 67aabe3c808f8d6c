"""Read which processes hold memory on AMD's and Intel's GPUs, from fdinfo and KFD.

fdinfo: ``/proc/PID/fdinfo/FD`` of each file that is open on ``/dev/dri``, as in "DRM client usage
stats" (https://docs.kernel.org/gpu/drm-usage-stats.html). Duplicated or inherited files have the
same ``drm-client-id`` and are counted once, for the lowest pid. Only this user's processes can be
read, unless this user is root.

KFD: ROCm's runtime lists GPUs by ``topology/nodes/N``. Everybody can read ``proc/PID/vram_GPU`` of
every user's processes. Its pids are the host's, also in a container, which is recognized by the
number of the first pid namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h). After
drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumagic.drm.card_list import Folder, whole

_UNITS = {"": 1, "KiB": 2**10, "kB": 2**10, "MiB": 2**20, "GiB": 2**30}
# The same thing by its newer names first; "memory" is what amdgpu said before Linux 6.14.
_HELD = ("drm-resident-", "drm-memory-", "drm-total-")


@dataclass(frozen=True)
class Client:
    """One opening of a GPU by a process."""

    pid: int
    id: int
    address: str  # of the GPU on the PCI bus
    memory: Mapping[str, int]  # bytes by region: "vram", "gtt", "system0"
    # By engine, of which there may be several alike: units of work done, of those that could have
    # been done (None: nanoseconds, to be compared with a clock), and how many engines.
    engines: Mapping[str, tuple[int, int | None, int]]


def read_clients(root: Path) -> list[Client]:
    """Every client of every process that can be read, once."""
    found: dict[tuple[str, int], Client] = {}
    processes = Folder(root / "proc")
    for name in processes.names():
        pid = whole(name)
        for text in _texts(processes / name) if pid is not None else ():
            client = _client(pid or 0, text)
            if client is not None:
                found.setdefault((client.address, client.id), client)
    return list(found.values())


def _texts(process: Folder) -> Iterator[str]:
    try:
        files = list(os.scandir(os.path.join(process.path, "fd")))
    except OSError:
        return  # another user's, or gone
    for file in files:
        try:
            on_gpu = os.readlink(file.path).startswith("/dev/dri/")
        except OSError:
            continue
        text = process.text(os.path.join("fdinfo", file.name)) if on_gpu else None
        if text is not None:
            yield text


def _client(pid: int, text: str) -> Client | None:
    told = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            told[key.strip()] = value.strip()
    number, address = whole(told.get("drm-client-id")), told.get("drm-pdev")
    if number is None or not address:
        return None
    return Client(pid, number, address, _memory(told), _engines(told))


def _memory(told: Mapping[str, str]) -> dict[str, int]:
    memory: dict[str, int] = {}
    for prefix in _HELD:
        for key, value in told.items():
            count, _, unit = value.partition(" ")
            held, factor = whole(count), _UNITS.get(unit)
            region = key.removeprefix(prefix)
            known = held is not None and factor is not None and not region.startswith("cycles-")
            if region != key and known:
                memory.setdefault(region, (held or 0) * (factor or 1))
    return memory


def _engines(told: Mapping[str, str]) -> dict[str, tuple[int, int | None, int]]:
    engines: dict[str, tuple[int, int | None, int]] = {}
    for key, value in told.items():
        for kind in ("drm-engine-", "drm-cycles-"):
            name = key.removeprefix(kind)
            done = whole(value.removesuffix(" ns"))
            if name == key or name.startswith("capacity-") or done is None:
                continue
            of = whole(told.get(f"drm-total-cycles-{name}")) if kind == "drm-cycles-" else None
            if kind == "drm-cycles-" and of is None:
                continue
            capacity = whole(told.get(f"drm-engine-capacity-{name}")) or 1
            engines[name] = done, of, capacity
    return engines


_FIRST_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class KfdNode:
    """A GPU that ROCm can use."""

    gpu_id: int  # KFD's own number
    address: str  # on the PCI bus, "0000:03:00.0"


def kfd_nodes(root: Path) -> list[KfdNode]:
    """ROCm's GPUs in ROCm's order; none where the driver has no KFD."""
    nodes = Folder(root / "sys/class/kfd/kfd/topology/nodes")
    found = []
    for name in nodes.names():
        gpu_id = (nodes / name).number("gpu_id")
        # A processor is a node too, with the id 0.
        if gpu_id:
            lines = ((nodes / name).text("properties") or "").splitlines()
            told = dict(pair for line in lines if len(pair := line.split()) == 2)
            at, domain = whole(told.get("location_id")), whole(told.get("domain", "0"))
            if at is not None and domain is not None:
                address = f"{domain:04x}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"
                found.append(KfdNode(gpu_id, address))
    return found


def kfd_memory(root: Path) -> dict[tuple[int, int], int]:
    """Bytes that processes hold, by pid and KFD's number of the GPU."""
    namespace = Folder(root / "proc/self/ns").link("pid")
    if namespace not in (None, _FIRST_NAMESPACE):
        return {}
    processes = Folder(root / "sys/class/kfd/kfd/proc")
    found = {}
    for name in processes.names():
        pid = whole(name)
        for file in processes.names(name) if pid is not None else ():
            gpu_id = whole(file.removeprefix("vram_"))
            held = (processes / name).number(file) if file.startswith("vram_") else None
            if pid is not None and gpu_id is not None and held:
                found[pid, gpu_id] = held
    return found
