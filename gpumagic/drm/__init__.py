"""Read the GPUs of AMD and Intel, and the processes on them, from Linux's files; nothing raises.

Cards: a card with a ``unique_id`` (https://docs.kernel.org/gpu/amdgpu/driver-misc.html) has the
UUID that ROCm gives it. Any other card's UUID is its PCI address and the start of the boot id.

Processes: ``/proc/PID/fdinfo/FD`` of each file that is open on ``/dev/dri``, as in
https://docs.kernel.org/gpu/drm-usage-stats.html. Duplicated or inherited files have the same
``drm-client-id`` and are counted once, for the lowest pid. Only this user's processes can be read,
unless this user is root.

KFD (drivers/gpu/drm/amd/amdkfd): ROCm's runtime lists GPUs by ``topology/nodes/N``. Everybody can
read ``proc/PID/vram_GPU`` there, for all users' processes. Pids are the host's, also in containers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

# Maximum bytes read from a file; all files that are read here are shorter.
_LONGEST = 65536


class Folder:
    """The files below a folder, by names relative to it; an unreadable file has no text."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(os.path.join(self.path, name))

    def text(self, name: str) -> str:
        """Return a file's text, stripped."""
        with suppress(OSError), open(os.path.join(self.path, name), "rb") as file:
            return file.read(_LONGEST).decode(errors="replace").strip()
        return ""

    def number(self, *names: str, unit: int = 1) -> int | None:
        """Return the whole number, not negative, in the first of these files that has one."""
        numbers = (whole(self.text(name)) for name in names)
        return next((number // unit for number in numbers if number is not None), None)

    def scaled(self, divisor: float, *names: str) -> float | None:
        """Return a file's number divided by `divisor`: 1e6 turns microwatts into watts."""
        value = self.number(*names)
        return None if value is None else value / divisor

    def percent(self, name: str) -> float | None:
        """Return a number from 0 to 100; None for other values, which drivers may give."""
        value = self.number(name)
        return None if value is None or value > 100 else float(value)

    def link(self, name: str) -> str | None:
        """Return the last part of a link's target, which need not exist."""
        with suppress(OSError):
            return os.path.basename(os.readlink(os.path.join(self.path, name)))
        return None

    def names(self, name: str = "") -> list[str]:
        """Return the names in a folder, ordered by the numbers in the names."""
        with suppress(OSError):
            found = os.listdir(os.path.join(self.path, name))
            return sorted(found, key=lambda each: [*map(int, re.findall("[0-9]+", each))])
        return []


def whole(text: str | None) -> int | None:
    """Parse a whole number, not negative; None for other text, or if it is too long."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,20}", text) else None


VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
# PCI classes of displays and accelerators.
_SHOWS_OR_COMPUTES = ("0x0300", "0x0302", "0x0380", "0x1200")
# Lists of models: "744C, C8, AMD Radeon RX 7900 XTX"; "744c  Navi 31 [Radeon RX 7900 XT/7900 XTX]".
_AMDS = ("usr/share/libdrm/amdgpu.ids",)
_MODELS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "usr/share/pci.ids")


@dataclass(frozen=True)
class GraphicsCard:
    """The constants of a card with a DRM driver."""

    vendor: str
    address: str  # on the PCI bus, "0000:03:00.0"
    driver: str | None  # "amdgpu", "i915", "xe"
    uuid: str
    name: str | None
    path: Path  # /sys/class/drm/card0

    @property
    def device(self) -> Folder:
        """The folder of the card's PCI device."""
        return Folder(self.path / "device")

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """Prefixes of the names of the memory regions that count as the card's."""
        if self.vendor == "intel":
            return ("system", "gtt") if self.integrated else ("vram", "local")
        # ROCm uses an APU's host memory through the GTT. Only APUs have a northbridge voltage, in1.
        return ("vram",) if self.sensors.number("in1_input") is None else ("vram", "gtt")

    @property
    def sensors(self) -> Folder:
        """The card's hwmon folder; if i915 has several, the folder of the whole device."""
        folders = [self.device / "hwmon" / name for name in self.device.names("hwmon")]
        whole = (folder for folder in folders if "_gt" not in folder.text("name"))
        return next(whole, self.device / "hwmon")

    def memory(self, what: str) -> int | None:
        """Return bytes from amdgpu; `what` is "total" or "used"."""
        found = [self.device.number(f"mem_info_{region}_{what}") for region in self.regions]
        return None if None in found else sum(count or 0 for count in found)

    @property
    def integrated(self) -> bool:
        """Whether it is Intel's integrated GPU, which uses the host's memory."""
        return is_integrated(self.vendor, self.address)


def is_integrated(vendor: str | None, address: str) -> bool:
    """Whether a GPU has the PCI address that every integrated GPU of Intel has."""
    return vendor == "intel" and address.endswith(":00:02.0")


def graphics_cards(root: Path, vendor: str) -> list[GraphicsCard]:
    """Return the cards of a vendor in the order of the PCI bus."""
    folder, found = root / "sys/class/drm", []
    for card in Folder(folder).names():
        files, address = Folder(folder / card / "device"), Folder(folder / card).link("device")
        # Connectors such as card0-DP-1 have no vendor; renderD128 is a card's second entry.
        if card.startswith("card") and address and VENDORS.get(files.text("vendor")) == vendor:
            uuid, name = _uuid(root, files, address), _name(root, files, vendor)
            driver = files.link("driver")
            found.append(GraphicsCard(vendor, address, driver, uuid, name, folder / card))
    return sorted(found, key=lambda card: card.address)


def _uuid(root: Path, files: Folder, address: str) -> str:
    own = files.text("unique_id").lower()
    if re.fullmatch(r"[0-9a-f]{8,32}", own) and own.strip("0"):
        return f"GPU-{own}"
    boot = Folder(root).text("proc/sys/kernel/random/boot_id")
    return f"PCI-{address}" + (f"-{boot[:8]}" if re.match(r"[0-9a-f]{8}", boot) else "")


def _name(root: Path, files: Folder, vendor: str) -> str | None:
    model: str | None = files.text("product_name")
    code, number, revision = (
        files.text(name).removeprefix("0x") for name in ("vendor", "device", "revision")
    )
    if not model and re.fullmatch(r"[0-9a-f]{4}", number):
        exact = rf"^{number},\s*{re.escape(revision)},\s*(\S.*)$"
        model = _listed(root, _AMDS, exact) if vendor == "amd" else None
        listed = _listed(root, _MODELS, rf"^{code} .*\n(?:[\t#].*\n)*?\t{number} +(\S.*)$") or ""
        model = model or listed.rpartition("[")[2].rstrip("]") or f"GPU {number}"
    called = {"amd": "AMD", "intel": "Intel"}.get(vendor, "")
    return f"{called} {model}" if model and not model.startswith(called) else model or None


@lru_cache(64)
def _listed(root: Path, names: tuple[str, ...], pattern: str) -> str | None:
    """Search these lists of models in order; return the group of the first match."""
    for name in names:
        with suppress(OSError):
            text = (root / name).read_text(errors="replace")
            if found := re.search(pattern, text, re.MULTILINE | re.IGNORECASE):
                return found[1].strip()
    return None


def pci_gpus(root: Path) -> list[tuple[str, str, str | None]]:
    """Return the vendor, PCI address and driver (if any) of each GPU on the bus."""
    bus = Folder(root / "sys/bus/pci/devices")
    found = []
    for address in sorted(bus.names()):
        files = bus / address
        vendor = VENDORS.get(files.text("vendor"))
        if vendor and files.text("class").startswith(_SHOWS_OR_COMPUTES):
            found.append((vendor, address, files.link("driver")))
    return found


_UNITS = {"": 1, "KiB": 2**10, "kB": 2**10, "MiB": 2**20, "GiB": 2**30}
# If a file has several, the last of these counts. amdgpu before Linux 6.14 writes "memory".
_KINDS = ("total", "memory", "resident")
_HELD = re.compile(
    r"^drm-(total|memory|resident)-(\S+):\s*([0-9]{1,20})(?: (KiB|kB|MiB|GiB))?$", re.MULTILINE
)
_CLIENT = re.compile(r"^drm-client-id:\s*([0-9]{1,20})$", re.MULTILINE)
_PDEV = re.compile(r"^drm-pdev:\s*(\S+)$", re.MULTILINE)


class DrmClient(NamedTuple):
    """One open handle of a process to a GPU."""

    pid: int
    address: str  # of the GPU on the PCI bus
    memory: Mapping[str, int]  # bytes by region: "vram", "gtt", "system0"


def read_clients(root: Path) -> list[DrmClient]:
    """Return each client of all readable processes, once."""
    found: dict[tuple[str, str], DrmClient] = {}
    processes = Folder(root / "proc")
    for pid in filter(str.isdecimal, processes.names()):
        for text in _texts(processes / pid):
            number, address = _CLIENT.search(text), _PDEV.search(text)
            if number and address:
                held = sorted(_HELD.findall(text), key=lambda line: _KINDS.index(line[0]))
                memory = {region: int(count) * _UNITS[unit] for _, region, count, unit in held}
                found.setdefault((address[1], number[1]), DrmClient(int(pid), address[1], memory))
    return list(found.values())


def _texts(process: Folder) -> Iterator[str]:
    """Yield the fdinfo text of each file that a process has open on a GPU."""
    with suppress(OSError):  # another user's process, or it has ended
        for file in list(os.scandir(os.path.join(process.path, "fd"))):
            with suppress(OSError):
                if os.readlink(file.path).startswith("/dev/dri/"):
                    yield process.text(os.path.join("fdinfo", file.name))


# The host's pid namespace: PROC_PID_INIT_INO in include/linux/proc_ns.h.
_FIRST_NAMESPACE = "pid:[4026531836]"


def kfd_gpus(root: Path) -> dict[str, int]:
    """Return KFD's number of each GPU that ROCm can use, by PCI address, in ROCm's order."""
    nodes = Folder(root / "sys/class/kfd/kfd/topology/nodes")
    found = {}
    for name in nodes.names():
        gpu_id = (nodes / name).number("gpu_id")
        fields = dict(re.findall(r"^(\S+) ([0-9]{1,9})$", (nodes / name).text("properties"), re.M))
        # A CPU is a node too, with the id 0.
        if gpu_id and "location_id" in fields:
            at, domain = int(fields["location_id"]), int(fields.get("domain", 0))
            found[f"{domain:04x}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"] = gpu_id
    return found


def kfd_memory(root: Path) -> dict[tuple[int, str], int]:
    """Return KFD's bytes by pid and the GPU's PCI address; none if pids here are not the host's."""
    namespace = Folder(root / "proc/self/ns").link("pid")
    if namespace not in (None, _FIRST_NAMESPACE):
        return {}
    processes, gpus = Folder(root / "sys/class/kfd/kfd/proc"), kfd_gpus(root)
    return {
        (int(pid), address): held
        for pid in filter(str.isdecimal, processes.names())
        for address, gpu_id in gpus.items()
        if (held := (processes / pid).number(f"vram_{gpu_id}"))
    }
