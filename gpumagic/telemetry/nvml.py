"""NVIDIA's GPUs, as NVML sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpumagic import nvml
from gpumagic.telemetry.snapshot import GpuSample, Host, Problem, ProcessSample

# Values of NVML's enumerations; fixed by its binary interface.
_SENSOR_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_THRESHOLD_SLOWDOWN = 1

_QUESTIONS: dict[str, nvml.Call] = {
    "utilization": ("nvmlDeviceGetUtilizationRates",),
    "temperature": ("nvmlDeviceGetTemperature", _SENSOR_GPU),
    "temperature_limit": ("nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN),
    "power": ("nvmlDeviceGetPowerUsage",),
    "power_limit": ("nvmlDeviceGetEnforcedPowerLimit",),
    "sm_clock": ("nvmlDeviceGetClockInfo", _CLOCK_SM),
    "memory_clock": ("nvmlDeviceGetClockInfo", _CLOCK_MEMORY),
    "throttle": ("nvmlDeviceGetCurrentClocksEventReasons",),
    "throttle_before_535": ("nvmlDeviceGetCurrentClocksThrottleReasons",),
}

# Those that slow a GPU down: being idle, and a clock that was asked for, are no such reasons.
_THROTTLE = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
}

_KINDS = {
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}


class NvmlSource:
    """Samples of NVIDIA's GPUs.

    Parameters
    ----------
    door : callable
        Returns the door to NVML; asked anew each time, for a fork closes it.
    """

    def __init__(self, door: Callable[[], nvml.Nvml] = nvml.door) -> None:
        self._door = door

    def driver(self) -> str | None:
        """The driver's version."""
        version = self._door().system("nvmlSystemGetDriverVersion")
        return None if version is None else str(version)

    def gpus(self, host: Host) -> list[GpuSample]:
        """All GPUs; the host's memory stands for that of a GPU that shares it."""
        return [self._sample(gpu, host) for gpu in self._door().gpus()]

    def processes(self) -> list[ProcessSample]:
        """Who holds memory where: pid and bytes. Walks the driver's clients: some ms per GPU."""
        gpus = self._door().gpus()
        # A GPU that is cut into MIG devices lists theirs once more.
        cut = {gpu.parent for gpu in gpus}
        return [p for gpu in gpus if gpu.uuid not in cut for p in self._holders(gpu)]

    def problems(self) -> list[Problem]:
        """The driver that cannot be asked; the GPUs that are lost."""
        door = self._door()
        found = [] if door.fault is None else [_problem(door.fault)]
        return found + [_problem(fault, uuid) for uuid, fault in door.lost.items()]

    def _sample(self, gpu: nvml.Gpu, host: Host) -> GpuSample:
        door = self._door()
        answers = door.ask(gpu, _QUESTIONS)
        memory = door.memory(gpu)
        rates = answers["utilization"]
        throttle = answers["throttle"]
        if throttle is None:
            throttle = answers["throttle_before_535"]
        unified = gpu.memory_total is None and gpu.parent is None and rates is not None
        return GpuSample(
            uuid=gpu.uuid,
            name=gpu.name,
            index=gpu.index,
            mig=gpu.parent,
            unified=unified,
            memory_total=host.memory_total if unified else _integer(memory, "total"),
            memory_used=host.memory_used if unified else _integer(memory, "used"),
            memory_reserved=_integer(memory, "reserved"),
            utilization=_percent(rates, "gpu"),
            memory_utilization=_percent(rates, "memory"),
            temperature=answers["temperature"],
            temperature_limit=answers["temperature_limit"],
            power=_watts(answers["power"]),
            power_limit=_watts(answers["power_limit"]),
            sm_clock=answers["sm_clock"],
            memory_clock=answers["memory_clock"],
            throttle=None if throttle is None else _reasons(throttle),
        )

    def _holders(self, gpu: nvml.Gpu) -> list[ProcessSample]:
        door = self._door()
        answers = door.ask(gpu, {kind: (function,) for kind, function in _KINDS.items()})
        for kind, function in _KINDS.items():
            if answers[kind] is None:
                # The driver is older than 510, or says no; the older question is learnt likewise.
                answers[kind] = door.ask(gpu, {kind: (f"{function}_v2",)})[kind]
        memory: dict[int, int | None] = {}
        kinds: dict[int, list[str]] = {}
        for kind, holders in answers.items():
            for holder in holders or ():
                pid = int(holder.pid)
                kinds.setdefault(pid, []).append(kind)
                # A process in two lists holds its memory once.
                known = [m for m in (memory.get(pid), holder.usedGpuMemory) if m is not None]
                memory[pid] = max(known, default=None)
        return [ProcessSample(gpu.uuid, pid, memory[pid], "+".join(kinds[pid])) for pid in memory]


def _problem(fault: nvml.Fault, uuid: str | None = None) -> Problem:
    # A lost GPU whose UUID was never seen is known by its index only.
    known = uuid if uuid and not uuid.startswith("index ") else None
    return Problem(fault.code, fault.cause, fault.cure, known)


def _integer(structure: Any, name: str) -> int | None:
    value = getattr(structure, name, None)
    return None if value is None else int(value)


def _percent(rates: Any, name: str) -> float | None:
    value = _integer(rates, name)
    # Drivers are known to answer nonsense such as 4294967295.
    return None if value is None or value > 100 else float(value)


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _reasons(bits: int) -> tuple[str, ...]:
    return tuple(reason for bit, reason in _THROTTLE.items() if bits & bit)
