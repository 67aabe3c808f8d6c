"""Read what AMD's compute driver (KFD) tells: ROCm's GPUs in its own order, and who holds them.

``topology/nodes/N`` is what ROCm's runtime itself lists GPUs by. ``proc/PID/vram_GPU`` is readable
by everybody, of every user's processes, and by host's pids also in a container: told apart by the
number that Linux gives the first namespace of pids (PROC_PID_INIT_INO in include/linux/proc_ns.h).
After drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c.
"""

from dataclasses import dataclass
from pathlib import Path

from gpumagic.drm.folder import Folder, whole

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
