"""Sample NVIDIA's GPUs through NVML. Slow readings are cached for a few seconds.

``nvmlDeviceGetPcieThroughput`` is not used, because it sleeps 20 ms per direction.
An *Xid* is the number by which NVIDIA's driver reports a kind of error.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpumagic import nvml
from gpumagic.errors import Problem
from gpumagic.telemetry.snapshot import GpuSample, Host, ProcessSample
from gpumagic.telemetry.source import CachedReadings

_CLOCK_SM, _CLOCK_MEMORY = 1, 2  # NVML's enumerations have the same values in all its versions
_SENSOR_GPU, _THRESHOLD_SLOWDOWN = 0, 1
_CORRECTED, _UNCORRECTED, _VOLATILE = 0, 1, 0
# Throttling reasons by bit, without NVML's bits for an idle GPU and for a requested clock.
_THROTTLE = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "power brake",
}

Questions = Mapping[str, nvml.Call]
_SLOW: Questions = {
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
    "temperature_limit": ("nvmlDeviceGetTemperatureThreshold", _THRESHOLD_SLOWDOWN),
    "power_limit": ("nvmlDeviceGetEnforcedPowerLimit",),
    "sm_clock_limit": ("nvmlDeviceGetMaxClockInfo", _CLOCK_SM),
    "pcie_generation_limit": ("nvmlDeviceGetMaxPcieLinkGeneration",),
    "pcie_width_limit": ("nvmlDeviceGetMaxPcieLinkWidth",),
}
# The slowest queries. For each query, the driver goes through all processes that use the driver.
_LISTS: Questions = {
    "compute": ("nvmlDeviceGetComputeRunningProcesses",),
    "graphics": ("nvmlDeviceGetGraphicsRunningProcesses",),
    "mps": ("nvmlDeviceGetMPSComputeRunningProcesses",),
}
_SLOW_S, _LISTS_S = 2.0, 3.0  # seconds for which the answers to _SLOW and _LISTS are cached


def _fast(driver: nvml.Nvml, gpu: nvml.Gpu) -> dict[str, Any]:
    rates_call = ("nvmlDeviceGetUtilizationRates",)
    rates, memory = driver.ask(gpu, {"rates": rates_call, "memory": driver.memory_call}).values()
    memory = memory if memory is not None and memory.total else None
    return {
        "utilization": _percent(getattr(rates, "gpu", None)),
        "memory_utilization": _percent(getattr(rates, "memory", None)),
        "memory_total": getattr(memory, "total", None),
        "memory_used": getattr(memory, "used", None),
        "memory_reserved": getattr(memory, "reserved", None),
    }


def _read(driver: nvml.Nvml, gpu: nvml.Gpu, questions: Questions) -> dict[str, Any]:
    """Query a GPU that has just answered; return the answers in the units of a GpuSample."""
    answers = driver.ask(gpu, questions, alive=True)
    for name, convert in _CONVERT.items():
        if answers.get(name) is not None:
            answers[name] = convert(answers[name])
    return answers


def _merged(
    gpu: nvml.Gpu, lists: Mapping[str, Any], busy: Mapping[int, float | None] | None
) -> list[ProcessSample]:
    """Return one sample per process in `lists`. A process that is missing in `busy` is idle."""
    held: dict[int, int | None] = {}
    for entry in (entry for entries in lists.values() for entry in entries or ()):
        counts = (held.get(entry.pid), entry.usedGpuMemory)
        held[entry.pid] = max((count for count in counts if count is not None), default=None)
    load = {pid: None if busy is None else busy.get(pid, 0.0) for pid in held}
    return [ProcessSample(gpu.uuid, pid, n, utilization=load[pid]) for pid, n in held.items()]


def _percent(value: float | None) -> float | None:
    # Drivers may answer 4294967295 if the value is unknown.
    return None if value is None or not 0 <= value <= 100.5 else min(float(value), 100.0)


_CONVERT: dict[str, Callable[[int], Any]] = {
    **dict.fromkeys(("power", "power_limit"), lambda milliwatts: milliwatts / 1000),
    "fan": float,
    "throttle": lambda bits: tuple(why for bit, why in _THROTTLE.items() if bits & bit),
}

_XID_CURE = "see dmesg, and the number in https://docs.nvidia.com/deploy/xid-errors"


class NvmlSource:
    """Samples NVIDIA's GPUs. Each method calls `driver()`: a forked child needs a new `Nvml`."""

    name = "nvml"

    def __init__(self, driver: Callable[[], nvml.Nvml] = nvml.shared_nvml) -> None:
        self._driver = driver
        # By GPU's UUID and Xid: when the error last occurred, and its Problem. The newest is last.
        self._xids: dict[tuple[str, int], tuple[float, Problem]] = {}
        self._kept = CachedReadings()  # by GPU's UUID and kind of reading

    def software(self) -> dict[str, str]:
        """Return the driver's version, and the newest CUDA that the driver supports: ``"13.0"``."""
        system = self._driver().system
        driver = system("nvmlSystemGetDriverVersion")
        number = system("nvmlSystemGetCudaDriverVersion")
        cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
        return {name: text for name, text in (("driver", driver), ("cuda", cuda)) if text}

    def gpus(self, host: Host, max_age: float = 0.0) -> list[GpuSample]:
        """Return all GPUs, also lost ones. Read Xid errors only for a sampler (`max_age` > 0)."""
        driver = self._driver()
        gpus = driver.gpus()
        for gpu, number in driver.xids() if max_age else ():
            whose = "a program on it" if number in (13, 31, 43, 45) else "the GPU or its driver"
            who = f"{gpu.name or 'a GPU'} (NVML {gpu.index})"
            cause = f"{who} reported Xid {number}: an error of {whose}"
            self._xids.pop((gpu.uuid, number), None)  # move the error to the end
            self._xids[gpu.uuid, number] = time.time(), Problem("xid", cause, _XID_CURE, gpu.uuid)
        samples = [self._sample(driver, gpu, host, max_age) for gpu in gpus]
        known = {gpu.uuid for gpu in gpus}
        samples += [self._lost(gpu) for gpu in driver.gone if gpu.uuid not in known]
        # The sort is stable, so MIG devices stay after their parent.
        return sorted(samples, key=lambda sample: sample.index or 0)

    def processes(self, max_age: float = 0.0) -> list[ProcessSample]:
        """Return the processes that hold memory; takes milliseconds per GPU."""
        driver, found = self._driver(), []
        gpus = driver.gpus()
        # A GPU also lists its MIG devices' processes. Skip GPUs with MIG, to count processes once.
        parents = {gpu.parent for gpu in gpus}
        for gpu in (gpu for gpu in gpus if gpu.uuid not in parents):
            read = partial(_read, driver, gpu, _LISTS)
            lists = self._kept.get((gpu.uuid, "lists"), _LISTS_S, max_age, read)
            busy = None
            if not gpu.parent:
                ask = partial(driver.busy, gpu, 2 * _LISTS_S)
                busy = self._kept.get((gpu.uuid, "busy"), _LISTS_S, max_age, ask)
            found += _merged(gpu, lists, busy)
        return found

    def problems(self) -> list[Problem]:
        """Return the problems: a driver or GPU without an answer, lost GPUs, recent Xid errors."""
        driver = self._driver()
        found = [] if driver.fault is None else [driver.fault]
        found += (driver.silent | driver.lost).values()
        # Xid errors expire after 600 s. If the clock was set back, errors in the future expire too.
        return found + [xid for at, xid in self._xids.values() if 0 <= time.time() - at <= 600.0]

    def _sample(self, driver: nvml.Nvml, gpu: nvml.Gpu, host: Host, max_age: float) -> GpuSample:
        values = _fast(driver, gpu)
        if gpu.uuid in driver.lost:
            return self._lost(gpu)
        if any(value is not None for value in values.values()):  # the GPU has just answered
            read = partial(_read, driver, gpu, _SLOW)
            values |= self._kept.get((gpu.uuid, "slow"), _SLOW_S, max_age, read)
        if unified := gpu.parent is None and driver.shares_memory(gpu):
            values |= {"memory_total": host.memory_total, "memory_used": host.memory_used}
        values |= {"index": gpu.index, "mig": gpu.parent, "unified": unified}
        return GpuSample(gpu.uuid, gpu.name, **values, **self._last_xid(gpu))

    def _lost(self, gpu: nvml.Gpu) -> GpuSample:
        return GpuSample(gpu.uuid, gpu.name, gpu.index, lost=True, **self._last_xid(gpu))

    def _last_xid(self, gpu: nvml.Gpu) -> dict[str, Any]:
        found = [(key[1], at) for key, (at, _) in self._xids.items() if key[0] == gpu.uuid]
        return {"xid": found[-1][0], "xid_time": found[-1][1]} if found else {}
