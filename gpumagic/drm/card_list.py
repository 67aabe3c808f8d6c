"""List the graphics cards that Linux's DRM drivers and PCI bus have.

A card with an id of its own (``unique_id``,
https://docs.kernel.org/gpu/amdgpu/driver-misc.html) has the UUID that ROCm gives it. Others are
identified by their PCI address and the start of the machine's boot id, which makes it unique.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

# No file that is asked for here is as long.
_LONGEST = 65536


class Folder:
    """The files below a folder, by names relative to it."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(os.path.join(self.path, name))

    def text(self, name: str) -> str | None:
        """A file's text, without the white space around it."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read(_LONGEST).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The whole number, not negative, that a file consists of."""
        return whole(self.text(name))

    def scaled(self, name: str, divisor: float) -> float | None:
        """A number in another unit: of microwatts, watts by 1e6."""
        value = self.number(name)
        return None if value is None else value / divisor

    def percent(self, name: str) -> float | None:
        """A number from 0 to 100; drivers are known to answer nonsense too."""
        value = self.number(name)
        return None if value is None or value > 100 else float(value)

    def link(self, name: str) -> str | None:
        """The last part of what a link leads to, be that there or not."""
        try:
            return os.path.basename(os.readlink(os.path.join(self.path, name)))
        except OSError:
            return None

    def names(self, name: str = "") -> list[str]:
        """What lies in it, or in a folder in it, in the order of the numbers in their names."""
        try:
            return sorted(os.listdir(os.path.join(self.path, name)), key=_in_order)
        except OSError:
            return []

    def is_closed(self, name: str) -> bool:
        """Whether it is there and this user may not read it."""
        path = os.path.join(self.path, name)
        effective = os.access in os.supports_effective_ids
        return os.path.exists(path) and not os.access(path, os.R_OK, effective_ids=effective)


def whole(text: str | None) -> int | None:
    """The whole number, not negative, that a text is; None for any other, and for one too long."""
    plain = text is not None and len(text) <= 20 and text.isascii() and text.isdigit()
    return int(text) if plain and text else None


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part) if len(part) < 20 else 0, part) for part in re.findall(r"[0-9]+", name)]


_AMDS = "usr/share/libdrm/amdgpu.ids"
_LISTS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids", "usr/share/pci.ids")


@lru_cache(64)
def pci_name(root: Path, vendor: str, device: str) -> str | None:
    """``"Radeon RX 7900 XTX"`` of ``"1002"`` and ``"744c"``; None where there is no list.

    What stands in brackets is what shops call it: "Navi 31 [Radeon RX 7900 XT/7900 XTX]".
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
    """``"AMD Radeon RX 7900 XTX"`` of ``"744c"`` and ``"c8"``, which of several that are alike."""
    try:
        with (root / _AMDS).open(errors="replace") as lines:
            for line in lines:
                words = [word.strip() for word in line.split(",", 2)]
                if len(words) == 3 and [w.lower() for w in words[:2]] == [device, revision]:
                    return words[2] or None
    except OSError:
        pass
    return None


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
