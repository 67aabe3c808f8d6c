"""Read the GPUs of AMD and Intel, and the processes on them, from Linux's files; nothing raises.

Cards: a card with an id of its own (``unique_id``,
https://docs.kernel.org/gpu/amdgpu/driver-misc.html) has the UUID that ROCm gives it. Others are
identified by their PCI address and the start of the machine's boot id, which makes it unique.

Processes: ``/proc/PID/fdinfo/FD`` of each file that is open on ``/dev/dri``, as in
https://docs.kernel.org/gpu/drm-usage-stats.html. Duplicated or inherited files have the same
``drm-client-id`` and are counted once, for the lowest pid. Only this user's processes can be read,
unless this user is root.

KFD: ROCm's runtime lists GPUs by ``topology/nodes/N``. Everybody can read ``proc/PID/vram_GPU`` of
every user's processes. Its pids are the host's, also in a container, which is recognized by the
number of the first pid namespace (PROC_PID_INIT_INO in include/linux/proc_ns.h). After
drivers/gpu/drm/amd/amdkfd/kfd_topology.c and kfd_process.c.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

# No file that is read here is this long.
_LONGEST = 65536


class Folder:
    """The files below a folder, by names relative to it."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(os.path.join(self.path, name))

    def text(self, name: str) -> str | None:
        """Return a file's text, stripped."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read(_LONGEST).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """Return a file's whole number, not negative."""
        return whole(self.text(name))

    def scaled(self, name: str, divisor: float) -> float | None:
        """Return a number divided by a unit: microwatts to watts by 1e6."""
        value = self.number(name)
        return None if value is None else value / divisor

    def percent(self, name: str) -> float | None:
        """Return a number from 0 to 100; None for other values, which drivers may give."""
        value = self.number(name)
        return None if value is None or value > 100 else float(value)

    def link(self, name: str) -> str | None:
        """Return the last part of a link's target, which need not exist."""
        try:
            return os.path.basename(os.readlink(os.path.join(self.path, name)))
        except OSError:
            return None

    def names(self, name: str = "") -> list[str]:
        """Return the names in a folder, ordered by the numbers in them."""
        try:
            return sorted(os.listdir(os.path.join(self.path, name)), key=_in_order)
        except OSError:
            return []

    def is_closed(self, name: str) -> bool:
        """Whether a file exists but this user may not read it."""
        path = os.path.join(self.path, name)
        effective = os.access in os.supports_effective_ids
        return os.path.exists(path) and not os.access(path, os.R_OK, effective_ids=effective)


def whole(text: str | None) -> int | None:
    """Parse a whole number, not negative; None for any other or too long text."""
    plain = text is not None and len(text) <= 20 and text.isascii() and text.isdigit()
    return int(text) if plain and text else None


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part) if len(part) < 20 else 0, part) for part in re.findall(r"[0-9]+", name)]


_AMDS = "usr/share/libdrm/amdgpu.ids"
_LISTS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "usr/share/pci.ids")


@lru_cache(64)
def pci_name(root: Path, vendor: str, device: str) -> str | None:
    """Return ``"Radeon RX 7900 XTX"`` for ``"1002"`` and ``"744c"``; None without a list.

    The name is in brackets: "Navi 31 [Radeon RX 7900 XT/7900 XTX]".
    """
    for name in _LISTS:
        try:
            with (root / name).open(errors="replace") as lines:
                its = False
                for line in lines:
                    if line[:1] not in "\t#\n":
                        its = line.startswith(f"{vendor} ")
                    elif its and line.startswith(f"\t{device} "):
                        model = line[6:].strip()
                        return model.rpartition("[")[2].rstrip("]") or model
        except OSError:
            continue
    return None


@lru_cache(64)
def amd_name(root: Path, device: str, revision: str) -> str | None:
    """Return ``"AMD Radeon RX 7900 XTX"`` for device ``"744c"``, revision ``"c8"``."""
    text = Folder(root).text(_AMDS) or ""
    found = re.search(
        rf"^{device},\s*{re.escape(revision)},\s*(\S.*)$", text, re.MULTILINE | re.IGNORECASE
    )
    return found[1].strip() if found else None


VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_CALLED = {"amd": "AMD", "intel": "Intel"}
# PCI classes of displays and accelerators.
_SHOWS_OR_COMPUTES = ("0x0300", "0x0302", "0x0380", "0x1200")
_CARD = re.compile(r"card[0-9]{1,4}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


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
        """The folder of its PCI device."""
        return Folder(self.path / "device")

    @cached_property
    def pools(self) -> tuple[str, ...]:
        """The memory pools of an amdgpu card. An APU has a few hundred megabytes, and ROCm uses the
        host's through the GTT. Only APUs have a northbridge voltage."""
        sensors = self.sensors
        apu = sensors is not None and sensors.number("in1_input") is not None
        return ("vram", "gtt") if apu else ("vram",)

    @property
    def sensors(self) -> Folder | None:
        """The folder of its hwmon; of several of i915, that of the whole device."""
        folders = [self.device / "hwmon" / name for name in self.device.names("hwmon")]
        whole = (folder for folder in folders if "_gt" not in (folder.text("name") or ""))
        return next(whole, None)

    def memory(self, what: str) -> int | None:
        """Return bytes from amdgpu; `what` is "total" or "used"."""
        found = [self.device.number(f"mem_info_{pool}_{what}") for pool in self.pools]
        return None if None in found else sum(count or 0 for count in found)

    @property
    def integrated(self) -> bool:
        """Whether it is Intel's integrated GPU, which uses the host's memory."""
        return is_integrated(self.vendor, self.address)


def is_integrated(vendor: str | None, address: str) -> bool:
    """Whether a GPU is Intel's integrated one, which always has this address."""
    return vendor == "intel" and address.endswith(":00:02.0")


def graphics_cards(
    root: Path, vendor: str, known: dict[tuple[str, str], GraphicsCard] | None = None
) -> list[GraphicsCard]:
    """Return the cards of a vendor in the order of the PCI bus; cards in `known` with the same name
    and address are not read again."""
    known = {} if known is None else known
    drm = Folder(root / "sys/class/drm")
    found = []
    for name in filter(_CARD.fullmatch, drm.names()):
        address = (drm / name).link("device") or ""
        card = known.get((name, address)) or _card(root, name, address)
        if card is not None:
            known[name, address] = card
            found.append(card)
    return sorted((c for c in found if c.vendor == vendor), key=lambda card: card.address)


def _card(root: Path, name: str, address: str) -> GraphicsCard | None:
    path = root / "sys/class/drm" / name
    files = Folder(path / "device")
    vendor = VENDORS.get(files.text("vendor") or "")
    if vendor is None or not _ADDRESS.fullmatch(address):
        return None
    return GraphicsCard(
        vendor=vendor,
        address=address,
        driver=files.link("driver"),
        uuid=_uuid(root, files, address),
        name=_name(root, files, vendor),
        path=path,
    )


def _uuid(root: Path, files: Folder, address: str) -> str:
    own = (files.text("unique_id") or "").lower()
    if re.fullmatch(r"[0-9a-f]{8,32}", own) and own.strip("0"):
        return f"GPU-{own}"
    boot = Folder(root).text("proc/sys/kernel/random/boot_id") or ""
    return f"PCI-{address}" + (f"-{boot[:8]}" if re.match(r"[0-9a-f]{8}", boot) else "")


def _name(root: Path, files: Folder, vendor: str) -> str | None:
    model = files.text("product_name")
    code, number, revision = (
        (files.text(name) or "").removeprefix("0x") for name in ("vendor", "device", "revision")
    )
    if not model and re.fullmatch(r"[0-9a-f]{4}", number):
        model = amd_name(root, number, revision) if vendor == "amd" else None
        model = model or pci_name(root, code, number) or f"GPU {number}"
    called = _CALLED.get(vendor, "")
    return model if not model or model.startswith(called) else f"{called} {model}"


def pci_gpus(root: Path) -> list[tuple[str, str, str | None]]:
    """Return the vendor, PCI address and driver (if any) of each GPU on the bus."""
    bus = Folder(root / "sys/bus/pci/devices")
    found = []
    for address in sorted(bus.names()):
        files = bus / address
        vendor = VENDORS.get(files.text("vendor") or "")
        if vendor and (files.text("class") or "").startswith(_SHOWS_OR_COMPUTES):
            found.append((vendor, address, files.link("driver")))
    return found


_UNITS = {"": 1, "KiB": 2**10, "kB": 2**10, "MiB": 2**20, "GiB": 2**30}
# Newer names first; amdgpu used "memory" before Linux 6.14.
_HELD = ("drm-resident-", "drm-memory-", "drm-total-")
_ENGINE = re.compile(r"drm-(engine|cycles)-(?!capacity-)(.+)")


@dataclass(frozen=True)
class Client:
    """One open handle of a process to a GPU."""

    pid: int
    id: int
    address: str  # of the GPU on the PCI bus
    memory: Mapping[str, int]  # bytes by region: "vram", "gtt", "system0"
    ran: frozenset[str]  # the types of engines that have worked for it


def read_clients(root: Path) -> list[Client]:
    """Return each client of all readable processes, once."""
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
        return  # another user's, or ended
    for file in files:
        try:
            on_gpu = os.readlink(file.path).startswith("/dev/dri/")
        except OSError:
            continue
        text = process.text(os.path.join("fdinfo", file.name)) if on_gpu else None
        if text is not None:
            yield text


def _client(pid: int, text: str) -> Client | None:
    lines = (line.partition(":") for line in text.splitlines())
    told = {key.strip(): value.strip() for key, colon, value in lines if colon}
    number, address = whole(told.get("drm-client-id")), told.get("drm-pdev")
    if number is None or not address:
        return None
    return Client(pid, number, address, _memory(told), _ran(told))


def _memory(told: Mapping[str, str]) -> dict[str, int]:
    memory: dict[str, int] = {}
    for prefix in _HELD:
        for key, value in told.items():
            count, _, unit = value.partition(" ")
            held, region = whole(count), key.removeprefix(prefix)
            if region != key and held is not None and unit in _UNITS:
                memory.setdefault(region, held * _UNITS[unit])
    return memory


def _ran(told: Mapping[str, str]) -> frozenset[str]:
    engines = ((_ENGINE.fullmatch(key), value) for key, value in told.items())
    return frozenset(
        found[2] for found, value in engines if found and whole(value.removesuffix(" ns"))
    )


_FIRST_NAMESPACE = "pid:[4026531836]"


@dataclass(frozen=True)
class KfdNode:
    """A GPU that ROCm can use."""

    gpu_id: int  # KFD's own number
    address: str  # on the PCI bus, "0000:03:00.0"


def kfd_nodes(root: Path) -> list[KfdNode]:
    """Return ROCm's GPUs in ROCm's order; empty if the driver has no KFD."""
    nodes = Folder(root / "sys/class/kfd/kfd/topology/nodes")
    found = []
    for name in nodes.names():
        gpu_id = (nodes / name).number("gpu_id")
        # A CPU is a node too, with the id 0.
        if gpu_id:
            lines = ((nodes / name).text("properties") or "").splitlines()
            told = dict(pair for line in lines if len(pair := line.split()) == 2)
            at, domain = whole(told.get("location_id")), whole(told.get("domain", "0"))
            if at is not None and domain is not None:
                address = f"{domain:04x}:{at >> 8:02x}:{at >> 3 & 31:02x}.{at & 7}"
                found.append(KfdNode(gpu_id, address))
    return found


def kfd_memory(root: Path) -> dict[tuple[int, int], int]:
    """Return bytes by pid and KFD's number of the GPU."""
    namespace = Folder(root / "proc/self/ns").link("pid")
    if namespace not in (None, _FIRST_NAMESPACE):
        return {}
    processes = Folder(root / "sys/class/kfd/kfd/proc")
    found = {}
    for pid in processes.names():
        for file in processes.names(pid):
            name, gpu = file.partition("vram_")[::2]
            held = None if name else (processes / pid).number(file)
            if held and pid.isdecimal() and gpu.isdecimal():
                found[int(pid), int(gpu)] = held
    return found
