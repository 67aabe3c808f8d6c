"""Sample the GPUs of AMD and Intel that Linux's DRM drivers have, and the processes on them.

Reads files only, no library. A value is None if the driver does not give it. A GPU that sleeps
(``power/runtime_status``) is not asked anything that would wake it. A GPU that has disappeared, or
gives no values any more, is lost.

AMD: https://docs.kernel.org/gpu/amdgpu/thermal.html (hwmon, busy, clocks), driver-misc.html
(product name, unique id, memory) and ras.html (ECC). Not read: ``pcie_bw``, for which the driver
sleeps a second, and ``gpu_metrics``, whose layout changes. amdsmi reads the same files.

Intel: Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and -i915-hwmon, and the comment "Xe GT
Idle" of the driver. Utilization is the part of the time in which the GT did not sleep (C6), since
performance counters need rights. Only older drivers give the size of the memory, none its use. An
integrated GPU is listed only where torch is built for XPU: otherwise half of all laptops would show
a GPU that cannot be used.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from gpumagic import drm
from gpumagic.device import torch_build
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample
from gpumagic.telemetry.source import CachedReadings, Rates, Source

_SLOW_S, _PROCESSES_S = 2.0, 3.0
_COMPUTES, _DRAWS = ("compute", "ccs"), ("gfx", "render", "rcs")


class DrmSource(Source):
    """The common part of AMD's and Intel's sources; ``root`` is the root of the file system."""

    vendor: ClassVar[str]

    def __init__(
        self, root: Path = Path("/"), monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.root = root
        self._kept = CachedReadings(monotonic)
        self._known: dict[tuple[str, str], drm.GraphicsCard] = {}
        self._cards: list[drm.GraphicsCard] = []
        self._seen: dict[str, GpuSample] = {}
        self._closed: list[drm.GraphicsCard] = []

    # Methods of a vendor.

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Return utilization and memory."""
        raise NotImplementedError

    def _slow(self, card: drm.GraphicsCard) -> dict[str, Any]:
        """Return readings that change slowly or never."""
        raise NotImplementedError

    def _is_held(self, card: drm.GraphicsCard, region: str) -> bool:
        """Whether a region of memory counts as the GPU's."""
        raise NotImplementedError

    def _slept(self, card: drm.GraphicsCard) -> None:
        """Reset the counters of a sleeping GPU, which stand still."""

    def _held_elsewhere(self) -> dict[tuple[int, str], int]:
        """Return bytes by pid and PCI address from other sources than fdinfo."""
        return {}

    # The interface of a source.

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        """Return all GPUs, lost ones too; a reading is at most `max_age` of its intervals old."""
        self._cards = self._kept.get("cards", _SLOW_S, max_age, self._listed)
        if not self._cards and not self._seen:
            return []
        there = {card.uuid for card in self._cards}
        self._kept.keep_only(lambda key: key in (*there, "cards", "processes"))
        self._closed = []
        samples = [self._sample(n, card, host, max_age) for n, card in enumerate(self._cards)]
        gone = [_lost(gpu) for uuid, gpu in self._seen.items() if uuid not in there]
        self._seen |= {gpu.uuid: gpu for gpu in samples}
        return samples + gone

    def processes(self, max_age: float = 0.0) -> list[ProcessSample]:
        """Return the processes that hold memory; `max_age` as in :meth:`gpus`."""
        if not self._cards:
            return []
        return self._kept.get("processes", _PROCESSES_S, max_age, self._read_processes)

    def problems(self) -> list[Problem]:
        """Return a problem for each GPU whose files this user may not read."""
        return [
            Problem(
                "not-permitted",
                f"this user may not read the files of {card.name or card.address} ({card.path})",
                "run %gpus --doctor; in a container, /sys must be mounted readable",
                card.uuid,
            )
            for card in self._closed
        ]

    def read_ahead(self, *, processes: bool, seconds: float) -> None:
        """Read values that are due, for at most `seconds`."""
        self._kept.read_ahead(seconds, lambda key: processes or key != "processes")

    def _listed(self) -> list[drm.GraphicsCard]:
        return drm.graphics_cards(self.root, self.vendor, self._known)

    def _sample(self, index: int, card: drm.GraphicsCard, host: Host, max_age: float) -> GpuSample:
        asleep = card.device.text("power/runtime_status") == "suspended"
        readings = {} if asleep else self._fast(card)
        facts = GpuSample(card.uuid, card.name, index, vendor=self.vendor, unified=card.integrated)
        known = [value for value in readings.values() if value is not None]
        if asleep:
            self._slept(card)
        else:
            slow = self._kept.get(card.uuid, _SLOW_S, max_age, lambda: self._slow(card))
            readings |= slow
            known += [value for value in slow.values() if value is not None]
        if card.integrated:
            readings |= {"memory_total": host.memory_total, "memory_used": host.memory_used}
        if not known and not asleep:
            if any(card.device.is_closed(name) for name in card.device.names()):
                self._closed.append(card)
            elif card.uuid in self._seen:
                return _lost(self._seen[card.uuid])
        return GpuSample(**{**vars(facts), **readings})

    def _read_processes(self) -> list[ProcessSample]:
        cards = {card.address: card for card in self._cards}
        clients = [one for one in drm.read_clients(self.root) if one.address in cards]
        memory: dict[tuple[int, str], int] = defaultdict(int)
        ran: dict[tuple[int, str], set[str]] = defaultdict(set)
        for client in clients:
            where, card = (client.pid, client.address), cards[client.address]
            held = [size for name, size in client.memory.items() if self._is_held(card, name)]
            memory[where] += sum(held)
            ran[where] |= client.ran
        told = {at: n for at, n in self._held_elsewhere().items() if at[1] in cards}
        for where, size in told.items():
            memory[where] = max(memory[where], size)
        return [
            ProcessSample(
                uuid=cards[where[1]].uuid,
                pid=where[0],
                memory=size,
                kind=_kind(ran[where], computes=where in told),
            )
            for where, size in sorted(memory.items())
            # A process without memory counts if an engine has run for it.
            if size or ran[where]
        ]


def _lost(gpu: GpuSample) -> GpuSample:
    return GpuSample(gpu.uuid, gpu.name, gpu.index, vendor=gpu.vendor, lost=True)


def _kind(ran: set[str], *, computes: bool) -> str | None:
    kinds = ["compute"] if computes or ran & set(_COMPUTES) else []
    kinds += ["graphics"] if ran & set(_DRAWS) else []
    return "+".join(kinds) or None


def temperatures(sensors: drm.Folder, channels: Iterable[int]) -> Mapping[str, float | None]:
    """Return the temperature of the first existing channel and its throttling limit, in °C."""
    for channel in channels:
        value = sensors.scaled(f"temp{channel}_input", 1000)
        if value is not None:
            limit = sensors.scaled(f"temp{channel}_crit", 1000)
            return {"temperature": value, "temperature_limit": limit}
    return {"temperature": None, "temperature_limit": None}


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
        }
        return {**found, **_sensors(card.sensors)} if card.sensors else found

    def _is_held(self, card: drm.GraphicsCard, region: str) -> bool:
        return region in card.pools

    def _held_elsewhere(self) -> dict[tuple[int, str], int]:
        addresses = {node.gpu_id: node.address for node in drm.kfd_nodes(self.root)}
        held = drm.kfd_memory(self.root).items()
        return {(pid, addresses[gpu]): count for (pid, gpu), count in held if gpu in addresses}


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
    return max(map(int, re.findall(r": *([0-9]{1,9})mhz", levels or "", re.I)), default=None)


def _ecc(counts: str) -> tuple[int | None, int | None]:
    """Return corrected and uncorrected errors of ``"ue: 0\\nce: 3"``."""
    told = dict(re.findall(r"(ce|ue): *([0-9]+)\s", f"{counts}\n"))
    return drm.whole(told.get("ce")), drm.whole(told.get("ue"))


# Files of the two drivers for the same value.
_IDLE = ("device/tile0/gt0/gtidle/idle_residency_ms", "gt/gt0/rc6_residency_ms")
_CLOCK = ("device/tile0/gt0/freq0/act_freq", "gt/gt0/rps_act_freq_mhz")
_CLOCK_LIMIT = ("device/tile0/gt0/freq0/max_freq", "gt/gt0/rps_max_freq_mhz")
# The greatest increase of a counter in a second: milliseconds, and joules.
_MOST = {"idle": 1200.0, "energy": 2000.0}


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
        return self._rates.per_second((card.uuid, counter), value, _MOST[counter])


def _either(card: drm.GraphicsCard, names: tuple[str, str]) -> int | None:
    found = map(drm.Folder(card.path).number, names)
    return next((value for value in found if value is not None), None)


def _tiles(card: drm.GraphicsCard) -> int | None:
    """Return the memory of all tiles, from older versions of xe and from i915."""
    tiles = (name for name in card.device.names() if name.startswith("tile"))
    found = [card.device.number(f"{tile}/physical_vram_size_bytes") for tile in tiles]
    return sum(filter(None, found)) or drm.Folder(card.path).number("lmem_total_bytes")
