"""Sample the GPUs of AMD, Intel and Apple.

AMD: https://docs.kernel.org/gpu/amdgpu/thermal.html (hwmon, busy, clocks), driver-misc.html
(product name, unique id, memory) and ras.html (ECC). Not read: ``pcie_bw``, for which the driver
sleeps a second, and ``gpu_metrics``, whose layout changes. amdsmi reads the same files.

Intel: Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and -i915-hwmon, and the comments "Xe
GT Idle" and "Xe GT Throttle" of the driver. Utilization is the part of the time in which the GT did
not sleep (C6), since performance counters need rights. Only older drivers give the size of the
memory, none its use. An integrated GPU is listed only where torch is built for XPU: otherwise half
of all laptops would show a GPU that cannot be used.

Apple: ``PerformanceStatistics`` of the class ``AGXAccelerator`` has the utilization and the use of
the host's memory, all of which the GPU may use. Temperature and power need root.
"""

import plistlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from platform import mac_ver
from typing import Any, ClassVar
from xml.parsers.expat import ExpatError

from gpumagic import drm
from gpumagic.device import torch_build
from gpumagic.nvml import Field
from gpumagic.telemetry.drm_source import DrmSource, pcie_link, temperatures
from gpumagic.telemetry.snapshot import GpuSample, Host
from gpumagic.telemetry.source import CachedReadings, Rates, Source


class AmdSource(DrmSource):
    """Samples of the GPUs of ``amdgpu``."""

    name = "amd"
    vendor: ClassVar[str] = "amd"

    def software(self) -> dict[str, str]:
        """Return the version of ROCm, if installed, and of a driver outside the kernel."""
        installed = (drm.Folder(self.root).text("opt/rocm/.info/version") or "").partition("-")[0]
        driver = drm.Folder(self.root).text("sys/module/amdgpu/version")
        rocm = {"ROCm": installed} if installed else {}
        return {**rocm, "amdgpu": driver or ""}

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        files = card.device
        return {
            "utilization": files.percent("gpu_busy_percent"),
            "memory_utilization": files.percent("mem_busy_percent"),
            "memory_total": card.memory("total"),
            "memory_used": card.memory("used"),
        }

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        files = card.device
        corrected, uncorrected = _ecc(files.text("ras/umc_err_count") or "")
        found: dict[str, Any] = {
            "sm_clock_limit": _highest(files.text("pp_dpm_sclk")),
            "memory_clock_limit": _highest(files.text("pp_dpm_mclk")),
            "ecc_corrected": corrected,
            "ecc_uncorrected": uncorrected,
            **pcie_link(files),
        }
        return {**found, **_sensors(card.sensors)} if card.sensors else found

    def _is_held(self, card: drm.GraphicsCard, region: str) -> bool:
        return region in card.pools

    def _held_elsewhere(self) -> dict[tuple[int, str], int]:
        addresses = {node.gpu_id: node.address for node in drm.kfd_nodes(self.root)}
        held = drm.kfd_memory(self.root)
        return {
            (pid, addresses[gpu]): count for (pid, gpu), count in held.items() if gpu in addresses
        }


def _sensors(sensors: drm.Folder) -> dict[str, Any]:
    """Return the sensors. Channel 1 is the die's edge, 2 its hottest spot, always there."""
    power = sensors.scaled("power1_average", 1e6)
    speed, most = sensors.number("fan1_input"), sensors.number("fan1_max")
    return {
        **temperatures(sensors, (1, 2)),
        "power": sensors.scaled("power1_input", 1e6) if power is None else power,
        "power_limit": sensors.scaled("power1_cap", 1e6) or None,
        "fan": None if speed is None or not most else min(100.0 * speed / most, 100.0),
        "sm_clock": _mhz(sensors.number("freq1_input")),
        "memory_clock": _mhz(sensors.number("freq2_input")),
    }


def _mhz(hertz: int | None) -> int | None:
    return None if hertz is None else round(hertz / 1e6)


def _highest(levels: str | None) -> int | None:
    """2100 of ``"0: 500Mhz\\n1: 2100Mhz *"``: the highest clock."""
    words = [line.partition(":")[2].strip() for line in (levels or "").splitlines()]
    speeds = [drm.whole(word.lower().partition("mhz")[0]) for word in words]
    return max((speed for speed in speeds if speed is not None), default=None)


def _ecc(counts: str) -> tuple[int | None, int | None]:
    """Return corrected and uncorrected errors of ``"ue: 0\\nce: 3"``."""
    told = {key.strip(): value for key, _, value in (n.partition(":") for n in counts.splitlines())}
    return drm.whole(told.get("ce", "").strip()), drm.whole(told.get("ue", "").strip())


# Files of the two drivers for the same value.
_IDLE = ("device/tile0/gt0/gtidle/idle_residency_ms", "gt/gt0/rc6_residency_ms")
_CLOCK = ("device/tile0/gt0/freq0/act_freq", "gt/gt0/rps_act_freq_mhz")
_CLOCK_LIMIT = ("device/tile0/gt0/freq0/max_freq", "gt/gt0/rps_max_freq_mhz")
_REASON = ("device/tile0/gt0/freq0/throttle/reason_", "gt/gt0/throttle_reason_")
# The greatest increase of a counter in a second: milliseconds, and joules.
_MOST = {"idle": 1200.0, "energy": 2000.0}
_REASONS = {
    "pl1": "power cap",
    "pl2": "power cap",
    "pl4": "current limit",
    "thermal": "hardware thermal slowdown",
    "prochot": "processor too hot",
    "ratl": "hardware thermal slowdown",
    "vr_thermalert": "voltage regulator too hot",
    "vr_tdc": "voltage regulator's limit",
}


class IntelSource(DrmSource):
    """Samples of the GPUs of ``xe`` and ``i915``; ``integrated``: also those in processors."""

    name = "intel"
    vendor: ClassVar[str] = "intel"

    def __init__(
        self,
        root: Path = Path("/"),
        monotonic: Callable[[], float] = time.monotonic,
        integrated: bool | None = None,
    ) -> None:
        super().__init__(root, monotonic)
        self._integrated = integrated
        self._rates = Rates(monotonic)

    def software(self) -> dict[str, str]:
        """Return the drivers' names; they have the kernel's version."""
        return {card.driver: "" for card in self._cards if card.driver}

    def _listed(self) -> list[drm.GraphicsCard]:
        found = super()._listed()
        if self._integrated is None and any(card.integrated for card in found):
            self._integrated = torch_build().xpu is not None
        return [card for card in found if self._integrated or not card.integrated]

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        idle = self._per_second(card, "idle", _either(card, _IDLE))
        return {
            # Milliseconds per second; a counter may be slightly ahead of the clock.
            "utilization": None if idle is None else min(max(100.0 - idle / 10, 0.0), 100.0),
            "memory_total": _tiles(card),
            "memory_used": None,
        }

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        found: dict[str, Any] = {
            "sm_clock": _either(card, _CLOCK),
            "sm_clock_limit": _either(card, _CLOCK_LIMIT),
            "throttle": _throttle(card),
            **pcie_link(card.device),
        }
        sensors = card.sensors
        if sensors is None:
            return found
        # xe has the package's in channel 2, i915 the only one in 1; of power and energy, the card's
        # in 1 and the package's in 2, where there is but one of them on some models.
        joules = sensors.scaled("energy1_input", 1e6) or sensors.scaled("energy2_input", 1e6)
        limit = sensors.scaled("power1_max", 1e6) or sensors.scaled("power2_max", 1e6)
        return {
            **found,
            **temperatures(sensors, (2, 1)),
            "energy": joules,
            "power": self._per_second(card, "energy", joules),
            "power_limit": limit or None,  # 0 means no limit
        }

    def _slept(self, card: drm.GraphicsCard) -> None:
        for counter in _MOST:
            self._per_second(card, counter, None)

    def _is_held(self, card: drm.GraphicsCard, region: str) -> bool:
        own = ("system", "gtt") if card.integrated else ("vram", "local")
        return region.startswith(own)

    def _per_second(
        self, card: drm.GraphicsCard, counter: str, value: float | None
    ) -> float | None:
        field = None if value is None else Field(value, None, narrow=False)
        return self._rates.per_second((card.uuid, counter), field, _MOST[counter])


def _either(card: drm.GraphicsCard, names: tuple[str, str]) -> int | None:
    found = map(drm.Folder(card.path).number, names)
    return next((value for value in found if value is not None), None)


def _tiles(card: drm.GraphicsCard) -> int | None:
    """Return the memory of all tiles, from older versions of xe and from i915."""
    found = [
        card.device.number(f"{name}/physical_vram_size_bytes")
        for name in card.device.names()
        if name.startswith("tile")
    ]
    known = [size for size in found if size]
    return sum(known) if known else drm.Folder(card.path).number("lmem_total_bytes")


def _throttle(card: drm.GraphicsCard) -> tuple[str, ...] | None:
    files = drm.Folder(card.path)
    for prefix in _REASON:
        states = {name: files.number(f"{prefix}{name}") for name in _REASONS}
        if any(state is not None for state in states.values()):
            return tuple(dict.fromkeys(_REASONS[name] for name, on in states.items() if on))
    return None


# It takes some 20 ms.
_EVERY_S = 2.0
# Errors of plistlib for broken data.
_MALFORMED = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ExpatError)
_COMMAND = ("ioreg", "-a", "-r", "-d", "1", "-c", "AGXAccelerator")


def ioreg() -> bytes:
    """Return the output of the command; empty if it does not exist."""
    try:
        return subprocess.run(_COMMAND, capture_output=True, timeout=5, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        return b""


class AppleSource(Source):
    """Samples of the GPU of a Mac with Apple silicon; elsewhere empty.

    It has no processes: shared memory is not attributed to the GPU.
    """

    name = "apple"

    def __init__(
        self,
        read: Callable[[], bytes] = ioreg,
        platform: str = sys.platform,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._here = platform == "darwin"
        self._kept = CachedReadings(monotonic)

    def software(self) -> dict[str, str]:
        """Return the system's version."""
        return {"macOS": mac_ver()[0]}

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        """Return the GPU; a reading is at most `max_age` of its intervals old."""
        if not self._here:
            return []
        found = self._kept.get("ioreg", _EVERY_S, max_age, lambda: _entries(self._read()))
        return [_sample(n, entry, host) for n, entry in enumerate(found)]

    def read_ahead(self, *, processes: bool, seconds: float) -> None:
        """Read values that are due, for at most `seconds`."""
        self._kept.read_ahead(seconds, lambda key: True)


def _entries(plist: bytes) -> list[dict[str, Any]]:
    """Return the accelerators of a property list; empty if it cannot be parsed."""
    try:
        found = plistlib.loads(plist)
    except _MALFORMED:
        return []
    entries = found if isinstance(found, list) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _sample(index: int, entry: dict[str, Any], host: Host) -> GpuSample:
    told = entry.get("PerformanceStatistics")
    statistics = told if isinstance(told, dict) else {}
    model = entry.get("model")
    if isinstance(model, bytes):  # on some models, with a zero at the end
        model = model.rstrip(b"\0").decode(errors="replace")
    busy = _count(statistics.get("Device Utilization %"))
    return GpuSample(
        uuid=f"MPS-{host.name or 'here'}" + (f"-{index}" if index else ""),
        name=model if isinstance(model, str) else None,
        index=index,
        ordinal=index,
        vendor="apple",
        unified=True,
        memory_total=host.memory_total,
        memory_used=_count(statistics.get("In use system memory")),
        utilization=None if busy is None or busy > 100 else float(busy),
    )


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None
