"""List the graphics cards of a machine, as Linux's DRM drivers and its PCI bus have them.

Where a card has an id of its own (``unique_id``, https://docs.kernel.org/gpu/amdgpu/driver-misc.html),
its UUID is the one that ROCm has for it. Others are known by their PCI address, which is one of
this machine: the start of its boot id makes it one that no other machine has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gpumagic.drm.folder import Folder
from gpumagic.drm.pci_names import amd_name, pci_name

VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x8086": "intel"}
_CALLED = {"amd": "AMD", "intel": "Intel"}
# Of PCI devices, those that show pictures or compute.
_SHOWS_OR_COMPUTES = ("0x0300", "0x0302", "0x0380", "0x1200")
_CARD = re.compile(r"card[0-9]{1,4}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class GraphicsCard:
    """A card that a DRM driver has; what does not change about it."""

    vendor: str
    address: str  # on the PCI bus, "0000:03:00.0"
    driver: str | None  # "amdgpu", "i915", "xe"
    uuid: str
    name: str | None
    path: Path  # /sys/class/drm/card0

    @property
    def device(self) -> Folder:
        """Its files as a PCI device."""
        return Folder(self.path / "device")

    @cached_property
    def pools(self) -> tuple[str, ...]:
        """Which memory of amdgpu's is this card's: an APU's own is a few hundred megabytes, and
        ROCm uses the host's through the GTT. Only APUs have a northbridge, and its voltage."""
        sensors = self.sensors
        apu = sensors is not None and sensors.number("in1_input") is not None
        return ("vram", "gtt") if apu else ("vram",)

    @property
    def sensors(self) -> Folder | None:
        """The files of its hwmon: of i915's several that of the whole device."""
        folders = [self.device / "hwmon" / name for name in self.device.names("hwmon")]
        whole = (folder for folder in folders if "_gt" not in (folder.text("name") or ""))
        return next(whole, None)

    def memory(self, what: str) -> int | None:
        """Bytes by amdgpu; `what` is "total" or "used"."""
        found = [self.device.number(f"mem_info_{pool}_{what}") for pool in self.pools]
        return None if None in found else sum(count or 0 for count in found)

    @property
    def integrated(self) -> bool:
        """Whether it is a part of Intel's processor, and uses the host's memory."""
        return is_integrated(self.vendor, self.address)


def is_integrated(vendor: str | None, address: str) -> bool:
    """Whether a GPU is the one in Intel's processors, which has always had this address."""
    return vendor == "intel" and address.endswith(":00:02.0")


def graphics_cards(
    root: Path, vendor: str, known: dict[tuple[str, str], GraphicsCard] | None = None
) -> list[GraphicsCard]:
    """The cards of a vendor, in the order of the PCI bus; one that is in `known` under its name and
    address is not looked at again."""
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
    number = (files.text("device") or "").removeprefix("0x")
    if not model and re.fullmatch(r"[0-9a-f]{4}", number):
        code = next(code for code, name in VENDORS.items() if name == vendor)
        revision = (files.text("revision") or "").removeprefix("0x")
        model = amd_name(root, number, revision) if vendor == "amd" else None
        model = model or pci_name(root, code.removeprefix("0x"), number) or f"GPU {number}"
    if not model:
        return None
    called = _CALLED.get(vendor, "")
    return model if model.startswith(called) else f"{called} {model}"


def pci_gpus(root: Path) -> list[tuple[str, str, str | None]]:
    """Vendor, PCI address and driver of each GPU on the bus, with or without a driver."""
    bus = Folder(root / "sys/bus/pci/devices")
    found = []
    for address in sorted(bus.names()):
        files = bus / address
        vendor = VENDORS.get(files.text("vendor") or "")
        if vendor and (files.text("class") or "").startswith(_SHOWS_OR_COMPUTES):
            found.append((vendor, address, files.link("driver")))
    return found
