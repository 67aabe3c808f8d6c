"""Read who has a DRM device open, the memory that it holds there, and how long engines ran for it.

``/proc/PID/fdinfo/FD`` of each file that is open on ``/dev/dri``, after "DRM client usage stats"
(https://docs.kernel.org/gpu/drm-usage-stats.html). Files that were duplicated, or are shared with a
child, have one ``drm-client-id``, and are counted once, for the process of the lowest pid. Only of
this user's processes can it be read, unless this user is root.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumagic.drm.folder import Folder, whole

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
