"""Sample AMD's and Intel's GPUs through Linux's DRM drivers, without waking a sleeping GPU.

AMD's files are documented in https://docs.kernel.org/gpu/amdgpu/thermal.html, driver-misc.html and
ras.html. Two files are not read: ``pcie_bw`` takes a second, and ``gpu_metrics`` varies in layout.

Intel's files are documented in Linux's Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and
-i915-hwmon, and in the source of xe, under "Xe GT Idle". Utilization is computed from the time in
state C6 (sleep), because performance counters need privileges. No file has the used memory.
"""

import re
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumagic import drm
from gpumagic.device import TorchBuild, torch_build
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample
from gpumagic.telemetry.source import CachedReadings, Source

_SLOW_S, _PROCESSES_S = 2.0, 3.0  # refresh intervals of `_slow` and `processes`, in seconds


class DrmSource(Source):
    """Base class of AMD's and Intel's sources; ``root`` is the root of the file system."""

    def __init__(self, root: Path, build: Callable[[], TorchBuild] = torch_build) -> None:
        self.root = root
        self._build = build
        self._kept = CachedReadings()
        # By GPU's UUID and counter's name: the counter's last value, and when the value was read.
        self._counters: dict[tuple[str, str], tuple[float, float]] = {}
        self._cards: list[drm.GraphicsCard] = []

    @abstractmethod
    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Return utilization and memory, as fields of a GpuSample."""

    @abstractmethod
    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Return the other fields of a GpuSample, which change slowly and are cached."""

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        self._cards = self._kept.get("cards", _SLOW_S, max_age, self._listed)
        return [self._sample(n, card, host, max_age) for n, card in enumerate(self._cards)]

    def processes(self, max_age: float = 0.0) -> list[ProcessSample]:
        return self._kept.get("processes", _PROCESSES_S, max_age, self._read_processes)

    def _listed(self) -> list[drm.GraphicsCard]:
        return drm.graphics_cards(self.root, self.name)  # `name` is the vendor's name

    def _sample(self, index: int, card: drm.GraphicsCard, host: Host, max_age: float) -> GpuSample:
        readings: dict[str, Any] = {}
        if card.device.text("power/runtime_status") == "suspended":
            # Counters stop during sleep, so forget them: a rate across the sleep would be wrong.
            self._counters = {key: at for key, at in self._counters.items() if key[0] != card.uuid}
        else:
            slow = self._kept.get(card.uuid, _SLOW_S, max_age, lambda: self._slow(card))
            readings = self._fast(card) | slow
        if card.integrated:
            readings |= {"memory_total": host.memory_total, "memory_used": host.memory_used}
        readings |= {"vendor": self.name, "unified": card.integrated}
        return GpuSample(card.uuid, card.name, index, **readings)

    def _read_processes(self) -> list[ProcessSample]:
        cards = {card.address: card for card in self._cards}
        memory: dict[tuple[int, str], int] = defaultdict(int)
        for client in drm.read_clients(self.root):
            where, card = (client.pid, client.address), cards.get(client.address)
            if card is not None:
                sizes = client.memory.items()
                memory[where] += sum(n for name, n in sizes if name.startswith(card.regions))
        for where, size in drm.kfd_memory(self.root).items():
            if where[1] in cards:
                memory[where] = max(memory[where], size)
        return [
            ProcessSample(cards[address].uuid, pid, size)
            for (pid, address), size in sorted(memory.items())
            if size
        ]


def _temperatures(sensors: drm.Folder, channels: tuple[int, int]) -> dict[str, float | None]:
    """Return the temperature and its limit in °C, from the first of `channels` that exists."""
    there = (n for n in channels if sensors.number(f"temp{n}_input") is not None)
    channel = next(there, channels[0])
    return {
        "temperature": sensors.scaled(1000, f"temp{channel}_input"),
        "temperature_limit": sensors.scaled(1000, f"temp{channel}_crit"),
    }


class AmdSource(DrmSource):
    """Samples the GPUs of the driver ``amdgpu``."""

    name = "amd"

    def software(self) -> dict[str, str]:
        """Return the versions of ROCm (if installed) and amdgpu ("" if it is part of Linux)."""
        files = drm.Folder(self.root)
        installed = files.text("opt/rocm/.info/version").partition("-")[0]
        rocm = {"ROCm": installed} if installed else {}
        return {**rocm, "amdgpu": files.text("sys/module/amdgpu/version")}

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        return {
            "utilization": card.device.percent("gpu_busy_percent"),
            "memory_utilization": card.device.percent("mem_busy_percent"),
            "memory_total": card.memory("total"),
            "memory_used": card.memory("used"),
        }

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        files, sensors = card.device, card.sensors
        # The file has the text "ue: 0\nce: 3" for no uncorrected and three corrected errors.
        errors = dict(re.findall(r"(ce|ue): *([0-9]+)\b", files.text("ras/umc_err_count")))
        # The file has one clock per line, such as "1: 2100Mhz *". A star marks the current clock.
        levels = re.findall(r": *([0-9]{1,9})mhz", files.text("pp_dpm_sclk"), re.I)
        speed, most = sensors.number("fan1_input"), sensors.number("fan1_max")
        return {
            # Channel 1 measures the die's edge. Some GPUs have only channel 2, the hottest spot.
            **_temperatures(sensors, (1, 2)),
            "power": sensors.scaled(1e6, "power1_average", "power1_input"),
            "power_limit": sensors.scaled(1e6, "power1_cap") or None,
            "fan": None if speed is None or not most else min(100.0 * speed / most, 100.0),
            "sm_clock": sensors.number("freq1_input", unit=1_000_000),
            "memory_clock": sensors.number("freq2_input", unit=1_000_000),
            "sm_clock_limit": max(map(int, levels), default=None),
            "ecc_corrected": drm.whole(errors.get("ce")),
            "ecc_uncorrected": drm.whole(errors.get("ue")),
        }


# Two paths for each value: the file of the driver xe, and the file of the driver i915.
_IDLE = ("device/tile0/gt0/gtidle/idle_residency_ms", "gt/gt0/rc6_residency_ms")
_CLOCK = ("device/tile0/gt0/freq0/act_freq", "gt/gt0/rps_act_freq_mhz")
_CLOCK_LIMIT = ("device/tile0/gt0/freq0/max_freq", "gt/gt0/rps_max_freq_mhz")
# Each counter's largest plausible increase per second: "idle" in ms, "energy" in joules.
_MOST = {"idle": 1200.0, "energy": 2000.0}


class IntelSource(DrmSource):
    """Samples the GPUs of the drivers ``xe`` and ``i915``."""

    name = "intel"

    def software(self) -> dict[str, str]:
        """Return the drivers' names, without versions, because these drivers are part of Linux."""
        return {card.driver: "" for card in self._cards if card.driver}

    def _listed(self) -> list[drm.GraphicsCard]:
        found = super()._listed()  # integrated GPUs count only if torch supports Intel's GPUs
        return [card for card in found if not card.integrated or self._build().xpu is not None]

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        files = drm.Folder(card.path)
        idle = self._rate(card, "idle", files.number(*_IDLE))
        # Older versions of xe report the memory of each tile. i915 reports the total of all tiles.
        tiles = [name for name in card.device.names() if name.startswith("tile")]
        sizes = [card.device.number(f"{tile}/physical_vram_size_bytes") for tile in tiles]
        return {
            # `idle` is in ms per second. The GPU's clock may run fast, so clamp the result.
            "utilization": None if idle is None else min(max(100.0 - idle / 10, 0.0), 100.0),
            "memory_total": sum(filter(None, sizes)) or files.number("lmem_total_bytes"),
        }

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        files, sensors = drm.Folder(card.path), card.sensors
        # Channel 1 measures the whole card, channel 2 only the chip. A GPU may lack one of them.
        joules = sensors.scaled(1e6, "energy1_input", "energy2_input")
        return {
            **_temperatures(sensors, (2, 1)),
            "power": self._rate(card, "energy", joules),
            "power_limit": sensors.scaled(1e6, "power1_max", "power2_max") or None,
            "sm_clock": files.number(*_CLOCK),
            "sm_clock_limit": files.number(*_CLOCK_LIMIT),
        }

    def _rate(self, card: drm.GraphicsCard, counter: str, value: float | None) -> float | None:
        """Return a counter's increase per second. None at first, after a reset or a 30 s pause."""
        now, before = time.monotonic(), self._counters.pop((card.uuid, counter), None)
        if value is None:
            return None
        self._counters[card.uuid, counter] = value, now
        if before is None:
            return None
        grown, passed = value - before[0], now - before[1]
        plausible = 0 < passed <= 30.0 and 0 <= grown <= _MOST[counter] * passed
        return grown / passed if plausible else None
