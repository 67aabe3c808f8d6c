"""Sample AMD's GPUs: ``amdgpu``'s files in sysfs, fdinfo, and KFD's list of who computes.

What each file says: https://docs.kernel.org/gpu/amdgpu/thermal.html (hwmon, busy, clocks),
driver-misc.html (product name, unique id, memory) and ras.html (ECC). Not read: ``pcie_bw``, for
which the driver sleeps a second, and ``gpu_metrics``, whose layout changes. Nor is amdsmi asked: it
reads the same files.
"""

from typing import Any, ClassVar

from gpumagic import drm
from gpumagic.drm.card_list import whole
from gpumagic.telemetry.drm_source import DrmSource, first_known, pcie_link, temperatures


class AmdSource(DrmSource):
    """Samples of the GPUs that ``amdgpu`` has."""

    name: ClassVar[str] = "amd"
    vendor: ClassVar[str] = "amd"

    def software(self) -> dict[str, str]:
        """ROCm's version, where it is installed, and the driver's, where it has one of its own."""
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
    """Channel 1 is the die's edge, 2 its hottest spot; accelerators have only the latter."""
    power = (sensors.scaled(f"power1_{kind}", 1e6) for kind in ("average", "input"))
    speed, most = sensors.number("fan1_input"), sensors.number("fan1_max")
    return {
        **temperatures(sensors, (1, 2)),
        "power": first_known(power),
        "power_limit": sensors.scaled("power1_cap", 1e6) or None,
        "fan": None if speed is None or not most else min(100.0 * speed / most, 100.0),
        "sm_clock": _mhz(sensors.number("freq1_input")),
        "memory_clock": _mhz(sensors.number("freq2_input")),
    }


def _mhz(hertz: int | None) -> int | None:
    return None if hertz is None else round(hertz / 1e6)


def _highest(levels: str | None) -> int | None:
    """2100 of ``"0: 500Mhz\\n1: 2100Mhz *"``: the speed that the clock can have at most."""
    words = [line.partition(":")[2].strip() for line in (levels or "").splitlines()]
    speeds = [whole(word.lower().partition("mhz")[0]) for word in words]
    return max((speed for speed in speeds if speed is not None), default=None)


def _ecc(counts: str) -> tuple[int | None, int | None]:
    """Corrected and uncorrected of ``"ue: 0\\nce: 3"``."""
    told = {key.strip(): value for key, _, value in (n.partition(":") for n in counts.splitlines())}
    return whole(told.get("ce", "").strip()), whole(told.get("ue", "").strip())
