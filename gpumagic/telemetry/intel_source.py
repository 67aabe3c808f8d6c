"""Sample Intel's GPUs: files of ``xe`` and ``i915`` in sysfs, and fdinfo.

After Documentation/ABI/testing/sysfs-driver-intel-xe-hwmon and -i915-hwmon, and the comments "Xe GT
Idle" and "Xe GT Throttle" of the driver. Neither tells how busy the GPU is, except to who may read
its performance counters: utilization is the part of the time in which the GT did not sleep (C6).
Nor do they tell how much memory there is, except by Level Zero: see ``level_zero.py``. The GPU in a
processor uses the host's, and is listed only where torch is a build that can use it: otherwise half
of all laptops would have a GPU that is none.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from gpumagic import drm
from gpumagic.device import torch_build
from gpumagic.nvml import Field
from gpumagic.telemetry.drm_source import DrmSource, first_known, pcie_link, temperatures
from gpumagic.telemetry.level_zero import LevelZero
from gpumagic.telemetry.nvml_readings import Rates

# Where the two drivers have the same thing.
_IDLE = ("device/tile0/gt0/gtidle/idle_residency_ms", "gt/gt0/rc6_residency_ms")
_CLOCK = ("device/tile0/gt0/freq0/act_freq", "gt/gt0/rps_act_freq_mhz")
_CLOCK_LIMIT = ("device/tile0/gt0/freq0/max_freq", "gt/gt0/rps_max_freq_mhz")
_REASON = ("device/tile0/gt0/freq0/throttle/reason_", "gt/gt0/throttle_reason_")
# The greatest that a counter can grow in a second: milliseconds, and joules.
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
    """Samples of the GPUs that ``xe`` or ``i915`` has; ``integrated``: also those in processors."""

    name: ClassVar[str] = "intel"
    vendor: ClassVar[str] = "intel"

    def __init__(
        self,
        root: Path = Path("/"),
        monotonic: Callable[[], float] = time.monotonic,
        integrated: bool | None = None,
        level_zero: LevelZero | None = None,
    ) -> None:
        super().__init__(root, monotonic)
        self._integrated = integrated
        self._level_zero = level_zero or LevelZero()
        self._rates = Rates(monotonic)

    def software(self) -> dict[str, str]:
        """The drivers' names; they have the kernel's version."""
        return {card.driver: "" for card in self._cards if card.driver}

    def _listed(self) -> list[drm.GraphicsCard]:
        found = super()._listed()
        if self._integrated is None and any(card.integrated for card in found):
            self._integrated = torch_build().xpu is not None
        return [card for card in found if self._integrated or not card.integrated]

    def _fast(self, card: drm.GraphicsCard) -> dict[str, Any]:
        idle = self._per_second(card, "idle", _either(card, _IDLE))
        total, used = self._level_zero.memory(card.address) or (_tiles(card), None)
        return {
            # Of each second so many milliseconds; a counter may run ahead of the clock a little.
            "utilization": None if idle is None else min(max(100.0 - idle / 10, 0.0), 100.0),
            "memory_total": total,
            "memory_used": used,
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
            "power_limit": limit or None,  # 0 is what it says where there is no limit
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
    files = drm.Folder(card.path)
    return first_known(files.number(name) for name in names)


def _tiles(card: drm.GraphicsCard) -> int | None:
    """What older versions of xe told of each tile's memory, and of i915."""
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
