"""Read by NVML a GPU's values, and who holds its memory, each as often as it needs.

In a sample's units, with rates of counters by their own time: never negative, never more than can
be. Never ``nvmlDeviceGetPcieThroughput``: it sleeps 20 ms a direction.
"""

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.snapshot import ProcessSample

# Values of NVML's enumerations; fixed by its binary interface.
_SENSOR_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_THRESHOLD_SLOWDOWN = 1
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
_PCIE_SENT, _PCIE_RECEIVED = 197, 198
# In KiB, over all links.
_NVLINK_SENT, _NVLINK_RECEIVED = (138, nvml.ALL_LINKS), (139, nvml.ALL_LINKS)
# Metrics of GPM: percent, and MiB a second.
_GPM_PERCENT = {"sm_activity": 2, "sm_occupancy": 3, "tensor_activity": 5, "dram_activity": 10}
_GPM_RATES = {"pcie_sent": 20, "pcie_received": 21, "nvlink_received": 60, "nvlink_sent": 61}
_GPM = (*_GPM_PERCENT.values(), *_GPM_RATES.values())

# Those that slow a GPU down: being idle, and a clock that was asked for, are no such reasons.
_THROTTLE = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
}
# Bytes a second that no link of today does.
_MOST_PCIE, _MOST_NVLINK = 250e9, 5e12
_MOST_FAN = 200
# A mean over longer than this says nothing of now.
_LONGEST_S = 30.0


@dataclass(frozen=True)
class Tier:
    """Questions that are asked together, how often, and how often where the answer was empty."""

    name: str
    every_s: float
    questions: Mapping[str, nvml.Call]
    empty_s: float | None = None


FAST: dict[str, nvml.Call] = {"utilization": ("nvmlDeviceGetUtilizationRates",)}
SLOW = Tier(
    "slow",
    2.0,
    {
        "temperature": ("nvmlDeviceGetTemperature", _SENSOR_GPU),
        "power": ("nvmlDeviceGetPowerUsage",),
        "sm_clock": ("nvmlDeviceGetClockInfo", _CLOCK_SM),
        "memory_clock": ("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
        "throttle": ("nvmlDeviceGetCurrentClocksEventReasons",),
        "fan": ("nvmlDeviceGetFanSpeed",),
        "pcie_generation": ("nvmlDeviceGetCurrPcieLinkGeneration",),
        "pcie_width": ("nvmlDeviceGetCurrPcieLinkWidth",),
        "ecc_corrected": ("nvmlDeviceGetTotalEccErrors", _CORRECTED, _VOLATILE),
        "ecc_uncorrected": ("nvmlDeviceGetTotalEccErrors", _UNCORRECTED, _VOLATILE),
    },
)
# Seen to take the driver 3 ms.
RARE = Tier("rare", 10.0, {"energy": ("nvmlDeviceGetTotalEnergyConsumption",)})
# What does not change; a single look reads it anew.
STILL = Tier(
    "still",
    1e9,
    {
        "temperature_limit": ("nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN),
        "power_limit": ("nvmlDeviceGetEnforcedPowerLimit",),
        "sm_clock_limit": ("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
        "memory_clock_limit": ("nvmlDeviceGetMaxClockInfo", _CLOCK_MEMORY),
        "pcie_generation_limit": ("nvmlDeviceGetMaxPcieLinkGeneration",),
        "pcie_width_limit": ("nvmlDeviceGetMaxPcieLinkWidth",),
    },
)
TIERS = (STILL, SLOW, RARE)
# The most expensive: the driver goes through all its clients. Where nobody was in a list of
# graphics or MPS, there will hardly be anybody soon.
LISTS = (
    Tier("compute", 3.0, {"list": ("nvmlDeviceGetComputeRunningProcesses",)}),
    Tier("graphics", 3.0, {"list": ("nvmlDeviceGetGraphicsRunningProcesses",)}, empty_s=15.0),
    Tier("mps", 3.0, {"list": ("nvmlDeviceGetMPSComputeRunningProcesses",)}, empty_s=15.0),
)
# Asked together with them; not in MIG.
BUSY = Tier("busy", 3.0, {})
_BEFORE_535: dict[str, nvml.Call] = {"throttle": ("nvmlDeviceGetCurrentClocksThrottleReasons",)}


class Rates:
    """What each counter was before; the clock is for those that do not say when they were read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Its value, when that was read, and how fast it grew then.
        self._before: dict[Hashable, tuple[float, float, float | None]] = {}

    def per_second(self, key: Hashable, field: nvml.Field | None, most: float) -> float | None:
        """How fast a counter grows, where ``most`` is the greatest rate that can be.

        None at first, where it wrapped or was reset, and where it may have wrapped unseen.
        """
        if field is None:
            self._before.pop(key, None)
            return None
        at_s = self._clock() if field.at_us is None else field.at_us / 1e6
        value, before_s, rate = self._before.get(key, (math.inf, -math.inf, None))
        passed, grown = at_s - before_s, field.value - value
        if passed == 0:
            return rate
        # 32 bits of bytes are full in a tenth of a second on a fast link.
        wraps = field.narrow and most * passed >= 2**32
        plausible = 0 < passed <= _LONGEST_S and 0 <= grown <= most * passed
        rate = grown / passed if plausible and not wraps else None
        self._before[key] = (field.value, at_s, rate)
        return rate


def fast(door: nvml.Nvml, gpu: nvml.Gpu) -> tuple[dict[str, Any], bool]:
    """Utilization and memory, and whether the GPU answered at all."""
    answers = door.ask(gpu, {**FAST, "memory": door.memory_call})
    memory = answers["memory"]
    rates = answers["utilization"]
    alive = memory is not None or rates is not None
    if memory is None or not memory.total:
        memory = door.memory(gpu, alive=alive)
        alive = alive or memory is not None
    return {
        "utilization": _percent(_integer(rates, "gpu")),
        "memory_utilization": _percent(_integer(rates, "memory")),
        "memory_total": _integer(memory, "total"),
        "memory_used": _integer(memory, "used"),
        "memory_reserved": _integer(memory, "reserved"),
    }, alive


def read(door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier, rates: Rates) -> dict[str, Any]:
    """A tier's readings of a GPU that has just answered something else."""
    answers = door.ask(gpu, tier.questions, alive=True)
    if tier is STILL:
        return {**answers, "power_limit": _thousandth(answers["power_limit"])}
    if tier is RARE:
        return {"energy": _thousandth(answers["energy"])}
    bits = answers["throttle"]
    if bits is None:
        bits = door.ask(gpu, _BEFORE_535, alive=True)["throttle"]
    slowing = None if bits is None else tuple(why for bit, why in _THROTTLE.items() if bits & bit)
    fan = answers["fan"]
    return {
        **answers,
        "power": _thousandth(answers["power"]),
        "throttle": slowing,
        "fan": float(fan) if fan is not None and fan <= _MOST_FAN else None,
        **_activity(door, gpu, rates),
    }


def read_list(door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier) -> tuple[Any, ...]:
    """NVML's entries of one list."""
    found = door.ask(gpu, tier.questions, alive=True)["list"]
    if found is None:
        # The older question where the driver is older than 510, or says no to the newer one.
        (function,) = tier.questions["list"]
        found = door.ask(gpu, {"list": (f"{function}_v2",)}, alive=True)["list"]
    return tuple(found or ())


def merge(
    gpu: nvml.Gpu, lists: Mapping[str, tuple[Any, ...]], busy: Mapping[int, float | None] | None
) -> list[ProcessSample]:
    """A GPU's processes; one that is in two lists holds its memory once, one not `busy` is idle."""
    memory: dict[int, int | None] = {}
    kinds: dict[int, list[str]] = {}
    for kind, entries in lists.items():
        for entry in entries:
            pid = int(entry.pid)
            kinds.setdefault(pid, []).append(kind)
            known = [m for m in (memory.get(pid), entry.usedGpuMemory) if m is not None]
            memory[pid] = max(known, default=None)
    used = {pid: None if busy is None else busy.get(pid, 0.0) for pid in memory}
    return [
        ProcessSample(gpu.uuid, pid, memory[pid], "+".join(kinds[pid]), utilization=used[pid])
        for pid in memory
    ]


def _activity(door: nvml.Nvml, gpu: nvml.Gpu, rates: Rates) -> dict[str, float | None]:
    """From GPM where there is one, for its counters are wide; else from counters by field."""
    metrics = door.gpm(gpu, _GPM)
    found: dict[str, float | None] = {
        name: _percent(metrics.get(number)) for name, number in _GPM_PERCENT.items()
    }
    for name, number in _GPM_RATES.items():
        value = metrics.get(number)
        found[name] = None if value is None or value < 0 else value * 2**20
    counters: tuple[tuple[str, nvml.FieldId, nvml.FieldId, int, float], ...] = (
        ("pcie", _PCIE_SENT, _PCIE_RECEIVED, 1, _MOST_PCIE),
        ("nvlink", _NVLINK_SENT, _NVLINK_RECEIVED, 1024, _MOST_NVLINK),
    )
    for kind, sent, received, unit, most in counters:
        if found[f"{kind}_sent"] is not None or gpu.parent:
            continue
        fields = door.fields(gpu, (sent, received))
        for name, field in ((f"{kind}_sent", sent), (f"{kind}_received", received)):
            rate = rates.per_second((gpu.uuid, name), fields.get(field), most / unit)
            found[name] = None if rate is None else rate * unit
    return found


def _integer(structure: Any, name: str) -> int | None:
    value = getattr(structure, name, None)
    return None if value is None else int(value)


def _percent(value: float | None) -> float | None:
    # Drivers are known to answer nonsense such as 4294967295.
    return None if value is None or not 0 <= value <= 100.5 else min(float(value), 100.0)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1000
