"""Read AMD's and Intel's GPUs, and the GPUs' processes, from /sys and /proc. No function raises.

A card's UUID contains the driver's ``unique_id``, as in ROCm
(https://docs.kernel.org/gpu/amdgpu/driver-misc.html), or else the PCI address and the boot id.

For each open file of ``/dev/dri``, Linux provides a file ``/proc/PID/fdinfo/FD``
(https://docs.kernel.org/gpu/drm-usage-stats.html). Duplicated and inherited descriptors share
a ``drm-client-id`` and count once, for the lowest pid. Only root can read other users' files.

KFD is the kernel's driver for ROCm (drivers/gpu/drm/amd/amdkfd). Every user can read KFD's files in
``/sys/class/kfd/kfd`` for all processes. The pids are the host's, even inside a container.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple


class Folder:
    """Read the files of a folder by their relative names; an unreadable file counts as empty."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __truediv__(self, name: str) -> "Folder":
        return Folder(os.path.join(self.path, name))

    def text(self, name: str) -> str:
        with suppress(OSError), open(os.path.join(self.path, name), "rb") as file:
            return file.read(65536).decode(errors="replace").strip()  # the files here are shorter
        return ""

    def number(self, *names: str, unit: int = 1) -> int | None:
        """Return the first non-negative integer in these files, divided by `unit`; or None."""
        numbers = (whole(self.text(name)) for name in names)
        return next((number // unit for number in numbers if number is not None), None)

    def scaled(self, divisor: float, *names: str) -> float | None:
        """Return a file's number divided by `divisor`: 1e6 turns microwatts into watts."""
        value = self.number(*names)
        return None if value is None else value / divisor

    def percent(self, name: str) -> float | None:
        """Return a file's number; None above 100, because some drivers write invalid values."""
        value = self.number(name)
        return None if value is None or value > 100 else float(value)

    def link(self, name: str) -> str | None:
        """Return the last part of a symbolic link's target; the target may be missing."""
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
    """Parse a non-negative integer of at most 20 digits; None for any other text."""
    return int(text) if text and re.fullmatch(r"[0-9]{1,20}", text) else None


VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_SHOWS_OR_COMPUTES = ("0x0300", "0x0302", "0x0380", "0x1200")  # PCI classes
# AMD's list of models, with lines such as "744C, C8, AMD Radeon RX 7900 XTX".
_AMDS = ("usr/share/libdrm/amdgpu.ids",)
# Lists of models by vendor, with lines such as "744c  Navi 31 [Radeon RX 7900 XT/7900 XTX]".
_MODELS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "usr/share/pci.ids")


@dataclass(frozen=True)
class GraphicsCard:
    """A graphics card that has a DRM driver."""

    vendor: str
    address: str  # PCI address: "0000:03:00.0"
    driver: str | None  # "amdgpu", "i915", "xe"
    uuid: str
    name: str | None
    path: Path  # /sys/class/drm/card0

    @property
    def device(self) -> Folder:
        return Folder(self.path / "device")

    @cached_property
    def regions(self) -> tuple[str, ...]:
        """The names of the card's memory regions. Drivers may add a number, as in "vram0"."""
        if self.vendor == "intel":
            return ("system", "gtt") if self.integrated else ("vram", "local")
        # On an APU, ROCm also allocates host memory (GTT). Only an APU has the voltage sensor in1.
        return ("vram",) if self.sensors.number("in1_input") is None else ("vram", "gtt")

    @property
    def sensors(self) -> Folder:
        """The card's hwmon folder; if i915 provides several, the folder of the whole device."""
        folders = [self.device / "hwmon" / name for name in self.device.names("hwmon")]
        whole = (folder for folder in folders if "_gt" not in folder.text("name"))
        return next(whole, self.device / "hwmon")

    def memory(self, what: str) -> int | None:
        """Return the card's "total" or "used" bytes as amdgpu reports them; None if unknown."""
        found = [self.device.number(f"mem_info_{region}_{what}") for region in self.regions]
        return None if None in found else sum(count or 0 for count in found)

    @property
    def integrated(self) -> bool:
        """Whether the card is an integrated GPU of Intel, which uses the host's memory."""
        return is_integrated(self.vendor, self.address)


def is_integrated(vendor: str | None, address: str) -> bool:
    """Whether a GPU is Intel's integrated GPU, which always has the PCI address 00:02.0."""
    return vendor == "intel" and address.endswith(":00:02.0")


def graphics_cards(root: Path, vendor: str) -> list[GraphicsCard]:
    """Return the cards of a vendor, sorted by PCI address."""
    folder, found = root / "sys/class/drm", []
    for card in Folder(folder).names():
        files, address = Folder(folder / card / "device"), Folder(folder / card).link("device")
        # Skip a card's other entries: connectors (card0-DP-1) and the render node (renderD128).
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
    texts = map(files.text, ("vendor", "device", "revision"))
    code, number, revision = (text.removeprefix("0x") for text in texts)
    if not model and re.fullmatch(r"[0-9a-f]{4}", number):
        exact = rf"^{number},\s*{re.escape(revision)},\s*(\S.*)$"
        model = _listed(root, _AMDS, exact) if vendor == "amd" else None
        listed = _listed(root, _MODELS, rf"^{code} .*\n(?:[\t#].*\n)*?\t{number} +(\S.*)$") or ""
        model = model or listed.rpartition("[")[2].rstrip("]") or f"GPU {number}"
    called = {"amd": "AMD", "intel": "Intel"}.get(vendor, "")
    return f"{called} {model}" if model and not model.startswith(called) else model or None


@lru_cache(64)
def _listed(root: Path, names: tuple[str, ...], pattern: str) -> str | None:
    """Return the name that `pattern` captures in the first matching file, or None."""
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
# Keys of a region's bytes. Later keys have priority. Before Linux 6.14, amdgpu wrote "memory".
_KINDS = ("total", "memory", "resident")
_HELD = re.compile(
    r"^drm-(total|memory|resident)-(\S+):\s*([0-9]{1,20})(?: (KiB|kB|MiB|GiB))?$", re.MULTILINE
)
_CLIENT = re.compile(r"^drm-client-id:\s*([0-9]{1,20})$", re.MULTILINE)
_PDEV = re.compile(r"^drm-pdev:\s*(\S+)$", re.MULTILINE)


class DrmClient(NamedTuple):
    """One open handle of a process to a GPU."""

    pid: int
    address: str  # PCI address of the GPU
    memory: Mapping[str, int]  # bytes by region: "vram", "gtt", "system0"


def read_clients(root: Path) -> list[DrmClient]:
    """Return the clients of all readable processes, without duplicates."""
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
    """Yield the fdinfo text of each file in ``/dev/dri`` that a process has open."""
    with suppress(OSError):  # the process is another user's, or has ended
        for file in list(os.scandir(os.path.join(process.path, "fd"))):
            with suppress(OSError):
                if os.readlink(file.path).startswith("/dev/dri/"):
                    yield process.text(os.path.join("fdinfo", file.name))


def kfd_gpus(root: Path) -> dict[str, int]:
    """Return KFD's ids of the GPUs that ROCm can use, by PCI address, in ROCm's order."""
    nodes = Folder(root / "sys/class/kfd/kfd/topology/nodes")
    found = {}
    for name in nodes.names():
        gpu_id = (nodes / name).number("gpu_id")
        fields = dict(re.findall(r"^(\S+) ([0-9]{1,9})$", (nodes / name).text("properties"), re.M))
        # CPUs are nodes too; their gpu_id is 0.
        if gpu_id and "location_id" in fields:
            at, domain = int(fields["location_id"]), int(fields.get("domain", 0))
            found[f"{domain:04x}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"] = gpu_id
    return found


def kfd_memory(root: Path) -> dict[tuple[int, str], int]:
    """Return bytes of GPU memory by pid and PCI address; empty in a container with its own pids."""
    # 4026531836 is the host's pid namespace, PROC_PID_INIT_INO in include/linux/proc_ns.h.
    if Folder(root / "proc/self/ns").link("pid") not in (None, "pid:[4026531836]"):
        return {}
    processes, gpus = Folder(root / "sys/class/kfd/kfd/proc"), kfd_gpus(root)
    return {
        (int(pid), address): held
        for pid in filter(str.isdecimal, processes.names())
        for address, gpu_id in gpus.items()
        if (held := (processes / pid).number(f"vram_{gpu_id}"))
    }
