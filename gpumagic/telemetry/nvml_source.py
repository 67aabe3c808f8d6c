"""Sample NVIDIA's GPUs through NVML, each reading as often as its kind needs.

Values are in the units of a sample. ``nvmlDeviceGetPcieThroughput`` is not used: it sleeps 20 ms
per direction.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample
from gpumagic.telemetry.source import CachedReadings

# Values of NVML's enumerations; fixed by its binary interface.
_SENSOR_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_THRESHOLD_SLOWDOWN = 1
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0


# Throttling reasons; being idle and a requested clock are none.
_THROTTLE = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
}
_MOST_FAN = 200


@dataclass(frozen=True, eq=False)
class Tier:
    """Queries made together, with their interval, and the interval after an empty answer."""

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
# Constant values; a single snapshot reads them again.
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
TIERS = (STILL, SLOW)
# The most expensive: the driver walks all its clients. An empty list of graphics or MPS clients
# mostly stays empty.
LISTS = (
    Tier("compute", 3.0, {"list": ("nvmlDeviceGetComputeRunningProcesses",)}),
    Tier("graphics", 3.0, {"list": ("nvmlDeviceGetGraphicsRunningProcesses",)}, empty_s=15.0),
    Tier("mps", 3.0, {"list": ("nvmlDeviceGetMPSComputeRunningProcesses",)}, empty_s=15.0),
)
# Asked together with them; not in MIG.
BUSY = Tier("busy", 3.0, {})
_BEFORE_535: dict[str, nvml.Call] = {"throttle": ("nvmlDeviceGetCurrentClocksThrottleReasons",)}


def fast(door: nvml.Nvml, gpu: nvml.Gpu) -> tuple[dict[str, Any], bool]:
    """Return utilization and memory, and whether the GPU answered."""
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


def read(door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier) -> dict[str, Any]:
    """Return a tier's readings of a GPU that has just answered."""
    answers = door.ask(gpu, tier.questions, alive=True)
    if tier is SLOW and answers["throttle"] is None:
        answers |= door.ask(gpu, _BEFORE_535, alive=True)
    for name, convert in _CONVERT.items():
        if answers.get(name) is not None:
            answers[name] = convert(answers[name])
    return answers


def read_list(door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier) -> tuple[Any, ...]:
    """Return the entries of one of NVML's lists."""
    found = door.ask(gpu, tier.questions, alive=True)["list"]
    if found is None:
        # The older question, if the driver is older than 510 or refuses the newer one.
        (function,) = tier.questions["list"]
        found = door.ask(gpu, {"list": (f"{function}_v2",)}, alive=True)["list"]
    return tuple(found or ())


def merge(
    gpu: nvml.Gpu, lists: Mapping[str, tuple[Any, ...]], busy: Mapping[int, float | None] | None
) -> list[ProcessSample]:
    """Return a GPU's processes; memory in two lists counts once, those not `busy` are idle."""
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


def _integer(structure: Any, name: str) -> int | None:
    value = getattr(structure, name, None)
    return None if value is None else int(value)


def _percent(value: float | None) -> float | None:
    # Drivers may answer 4294967295.
    return None if value is None or not 0 <= value <= 100.5 else min(float(value), 100.0)


def _thousandth(value: int) -> float:
    return value / 1000


_CONVERT: dict[str, Callable[[int], Any]] = {
    "power": _thousandth,
    "power_limit": _thousandth,
    "fan": lambda percent: float(percent) if percent <= _MOST_FAN else None,
    "throttle": lambda bits: tuple(why for bit, why in _THROTTLE.items() if bits & bit),
}

# Seconds for which an Xid error is a problem.
_XID_S = 600.0
# Meanings and cures after NVIDIA's "XID Errors", https://docs.nvidia.com/deploy/xid-errors/.
_PROGRAM = "run the program under compute-sanitizer, or with CUDA_LAUNCH_BLOCKING=1"
_RESET = "stop what runs on it and reset it (sudo nvidia-smi --gpu-reset -i {index})"
_REPLACE = f"{_RESET}; if it comes again, the GPU has to be replaced"
_XIDS = {
    13: ("a program made an illegal memory access or instruction", _PROGRAM),
    31: ("a program read or wrote memory that is not its own (page fault)", _PROGRAM),
    43: ("a program's work on the GPU was stopped after an error in it", _PROGRAM),
    45: ("work was cleaned up after a program had ended or failed", "see the error before it"),
    48: ("an ECC error in memory that could not be corrected", _REPLACE),
    63: ("a faulty row of memory is to be replaced by a spare one", _RESET),
    64: ("a faulty row of memory could not be replaced by a spare one", _REPLACE),
    74: ("an error on an NVLink", f"{_RESET}; if it comes again, check bridge and cables"),
    79: ("the GPU has fallen off the bus", "restart the machine; check power, heat and seating"),
    94: ("an ECC error that struck only the program that used that memory", "restart the program"),
    95: ("an ECC error that may have struck every program on the GPU", _RESET),
    119: ("the GPU's own processor (GSP) did not answer the driver in time", _RESET),
}
_UNKNOWN = ("a critical error of the driver", "look the number up in NVIDIA's list of Xid errors")


class NvmlSource:
    """Samples of NVIDIA's GPUs; ``door`` is called each time, since a fork closes it."""

    name = "nvml"

    def __init__(
        self,
        door: Callable[[], nvml.Nvml] = nvml.door,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._door = door
        self._clock = clock
        # By UUID and number; and the last one's fields of a sample, by UUID.
        self._xids: dict[tuple[str, int], tuple[float, Problem]] = {}
        self._last_xid: dict[str, dict[str, Any]] = {}
        self._software: dict[str, str] = {}
        self._kept = CachedReadings(monotonic)  # by UUID and tier
        self._present: set[str] = set()

    def software(self) -> dict[str, str]:
        """Return the driver's version, and the newest CUDA that it can run: ``"13.0"``."""
        told, system = self._software, self._door().system
        if "driver" not in told and (version := system("nvmlSystemGetDriverVersion")):
            told["driver"] = str(version)
        if "cuda" not in told and (number := system("nvmlSystemGetCudaDriverVersion")):
            told["cuda"] = f"{number // 1000}.{number % 1000 // 10}"
        return dict(told)

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        """Return all GPUs, lost ones too; a reading is at most ``max_age`` of its intervals old.
        Unless it is 0, Xid errors are watched."""
        door = self._door()
        gpus = door.gpus()
        if not gpus:
            self._software = {}
        for gpu, number in door.xids() if max_age else ():
            now = self._clock()
            self._xids[gpu.uuid, number] = (now, _xid_problem(gpu, number))
            self._last_xid[gpu.uuid] = {"xid": number, "xid_time": now}
        self._present = set()
        samples = [self._sample(door, gpu, host, max_age) for gpu in gpus]
        known = {gpu.uuid for gpu in gpus}
        samples += [self._lost(gpu) for gpu in door.gone if gpu.uuid not in known]
        self._kept.keep_only(lambda key: key[0] in known)
        # A stable sort: MIG devices stay behind their parent.
        return sorted(samples, key=lambda sample: sample.index or 0)

    def processes(self, max_age: float = 0.0) -> list[ProcessSample]:
        """Return the processes that hold memory, in some ms per GPU; `max_age` as above."""
        door = self._door()
        found: list[ProcessSample] = []
        for gpu in _uncut(door.gpus()):
            lists = {tier.name: self._reading(door, gpu, tier, max_age) for tier in LISTS}
            busy = None if gpu.parent else self._reading(door, gpu, BUSY, max_age)
            found += merge(gpu, lists, busy)
        return found

    def problems(self) -> list[Problem]:
        """Return problems: an unreachable driver, lost or silent GPUs, recent Xid errors."""
        door = self._door()
        found = [] if door.fault is None else [_problem(door.fault)]
        found += [_problem(f, uuid) for uuid, f in (door.silent | door.lost).items()]
        now = self._clock()
        # If the clock was set back, they must still expire.
        return found + [xid for at, xid in self._xids.values() if 0 <= now - at <= _XID_S]

    def read_ahead(self, *, processes: bool, seconds: float) -> None:
        """Read values that are due, the most overdue first, for at most `seconds`."""
        skipped = () if processes else (*LISTS, BUSY)
        self._kept.read_ahead(
            seconds, lambda key: key[0] in self._present and key[1] not in skipped
        )

    def _sample(self, door: nvml.Nvml, gpu: nvml.Gpu, host: Host, max_age: float) -> GpuSample:
        values, alive = fast(door, gpu)
        if gpu.uuid in door.lost:
            return self._lost(gpu)
        if alive:
            self._present.add(gpu.uuid)
            for tier in TIERS:
                values.update(self._reading(door, gpu, tier, max_age))
        unified = gpu.parent is None and door.shares_memory(gpu)
        if unified:
            values.update(memory_total=host.memory_total, memory_used=host.memory_used)
        values |= {"index": gpu.index, "mig": gpu.parent, "unified": unified}
        return GpuSample(gpu.uuid, gpu.name, **values, **self._last_xid.get(gpu.uuid, {}))

    def _lost(self, gpu: nvml.Gpu) -> GpuSample:
        xid = self._last_xid.get(gpu.uuid, {})
        return GpuSample(gpu.uuid, gpu.name, gpu.index, lost=True, **xid)

    def _reading(self, door: nvml.Nvml, gpu: nvml.Gpu, tier: Tier, max_age: float) -> Any:
        """Return a tier's readings of a GPU, read again if they are too old."""

        def look() -> Any:
            if tier is BUSY:
                return door.busy(gpu, 2 * tier.every_s)
            if tier in LISTS:
                return read_list(door, gpu, tier)
            return read(door, gpu, tier)

        return self._kept.get((gpu.uuid, tier), tier.every_s, max_age, look, tier.empty_s)


def _xid_problem(gpu: nvml.Gpu, number: int) -> Problem:
    meaning, cure = _XIDS.get(number, _UNKNOWN)
    cause = f"{gpu.name or 'a GPU'} (NVML {gpu.index}) reported Xid {number}: {meaning}"
    return Problem("xid", cause, cure.format(index=gpu.index), gpu.uuid)


def _uncut(gpus: tuple[nvml.Gpu, ...]) -> list[nvml.Gpu]:
    """Leave out processes that a GPU lists again for its MIG devices."""
    cut = {gpu.parent for gpu in gpus}
    return [gpu for gpu in gpus if gpu.uuid not in cut]


def _problem(fault: nvml.DriverFault, uuid: str | None = None) -> Problem:
    # A lost GPU that was never seen has only an index.
    known = uuid if uuid and not uuid.startswith("index ") else None
    return Problem(fault.code, fault.cause, fault.cure, known)
