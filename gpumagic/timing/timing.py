"""Record what was measured: the machine, the devices, the times and their spread."""

from __future__ import annotations

import math
import os
import platform
import re
import socket
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from gpumagic import nvml
from gpumagic.device import Device
from gpumagic.errors import GpuError
from gpumagic.frameworks import known
from gpumagic.frameworks.known import Needed
from gpumagic.usercode.values import comes_from, torch_here

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement, and the threads that torch uses."""

    host: str | None
    cpu: str | None
    cpu_count: int | None
    threads: int | None
    python: str
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    # Versions of other frameworks: {"JAX": "0.10.2"}.
    frameworks: Mapping[str, str] = field(default_factory=dict)


def this_machine(cpuinfo: Path = _CPUINFO) -> Machine:
    """Describe this machine without initializing CUDA; NVML has the driver's version."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    # On ARM the file has no name, and `platform` has only the architecture.
    cpu = named[1] if named else platform.processor() or platform.machine()
    torch, frameworks = torch_here(), known.versions()
    cuda = torch.version.cuda if torch else None
    driver = nvml.door().system("nvmlSystemGetDriverVersion") if cuda or frameworks else None
    return Machine(
        host=socket.gethostname() or None,
        cpu=" ".join(cpu.split()) or None,
        cpu_count=os.cpu_count(),
        threads=torch.get_num_threads() if torch else None,
        python=platform.python_version(),
        torch=torch.__version__ if torch else None,
        cuda=cuda,
        driver=driver.decode() if isinstance(driver, bytes) else driver,
        frameworks=frameworks,
    )


@dataclass(frozen=True)
class TimedDevices:
    """One device, or several at the same time."""

    parts: tuple[Device, ...]

    @property
    def where(self) -> str:
        """``"cuda:1"``, or ``"cuda:0+cuda:1"``."""
        return "+".join(str(device) for device in self.parts)

    @property
    def note(self) -> str | None:
        """Why another device than the requested one was used."""
        return next((device.note for device in self.parts if device.note), None)


def targets(given: Iterable[object] | str | None, needed: Needed) -> tuple[TimedDevices, ...]:
    """Return the named targets in order; the CPU and every GPU if None."""
    if given is None:
        return tuple(TimedDevices((d,)) for d in [needed.find("cpu"), *needed.devices()])
    single = isinstance(given, (str, int, Device)) or comes_from(type(given), "torch.device")
    if single or not isinstance(given, Iterable):
        given = [given]
    found: dict[str, TimedDevices] = {}
    for one in given:
        for target in _named(one, needed):
            if target.where in found:
                said = target.note or found[target.where].note
                raise GpuError(
                    f"{target.where} is named twice{f' ({said})' if said else ''}; type it once"
                )
            found[target.where] = target
    if not found:
        raise GpuError("no device is named; type some, such as cpu 0, or none for all of them")
    return tuple(found.values())


def _named(one: object, needed: Needed) -> list[TimedDevices]:
    if not isinstance(one, str):
        return [TimedDevices((needed.find(one),))]
    made = []
    # A blank next to a comma or a plus separates nothing.
    for part in re.split(r"\s*,\s*|\s+", re.sub(r"\s*\+\s*", "+", one.strip(" ,"))):
        if part.lower() == "all" and (every := needed.devices()):
            made += [TimedDevices((device,)) for device in every]
        else:
            if "+" in part and not all(part.split("+")):
                raise GpuError(f"a device is missing in {part}; type two or more, such as 0+1")
            parts = tuple(needed.find(name) for name in part.split("+"))
            if len({str(device) for device in parts}) < len(parts):
                raise GpuError(f"{part} names a device twice; type different ones, such as 0+1")
            made.append(TimedDevices(parts))
    return made


CONFIDENCE = 0.95
# Fewer repeats have no 95 % interval: 2 · 0.5⁵ is more than 5 %.
LEAST = 6


@dataclass(frozen=True)
class Timing:
    """One device, at one value of the sweep; its times are seconds of one run."""

    where: str  # "cpu", "cuda:1", or "cuda:0+cuda:1" for two at the same time
    # For each repeat: from its first statement until every device was done.
    seconds: tuple[float, ...] = ()
    # The same, until Python continued; less than `seconds` if the device was still busy.
    host: tuple[float, ...] = ()
    # The same by the devices' events; None without a GPU.
    device: tuple[float, ...] | None = None
    number: int = 1  # runs in each repeat, whose mean is one of `seconds`
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's variables: {"n": 256}
    name: str | None = None  # the device's
    uuid: str | None = None
    virtual: bool = False  # its times are the CPU's
    copied: int = 0  # bytes of the inputs, copied once before
    copy_seconds: float = 0.0  # not part of `seconds`
    # Seconds of compiling in the first run, not part of `seconds`; None if unknown.
    compiled: float | None = None
    # Seconds of the first run with tracing and compiling, if these are not known separately.
    first: float | None = None
    # Peak bytes of the allocator above those held before the run, by device; unknown if missing.
    peak: Mapping[str, int] = field(default_factory=dict)
    # Copies between devices and waits in one run, as the ledger says it.
    transfers: str = ""
    energy: float | None = None  # joules of one run, by NVML's counter
    alone: tuple[float, ...] = ()  # for two at the same time: the same runs one after the other
    # Why there are no `seconds`: "out of memory", "interrupted" or an exception's line.
    error: str | None = None
    items: float | None = None  # items in one run there
    steady: bool = True  # False if the time limit came before the median settled

    @cached_property
    def median(self) -> float | None:
        """Seconds of one run; None if nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @cached_property
    def quartiles(self) -> tuple[float, float] | None:
        """The first and third quartile of the repeats, in seconds."""
        return quartiles(self.seconds) if self.seconds else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median; see `interval` for fewer than six repeats."""
        return interval(self.seconds) if self.seconds else None

    @property
    def iqr(self) -> float | None:
        """The interquartile range relative to the median; None for fewer than four repeats."""
        if self.quartiles is None or len(self.seconds) < 4 or not self.median:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    def differs(self, other: Timing) -> bool:
        """Whether two medians differ by more than both spreads."""
        # With thousands of repeats the 95 % interval is narrower than the difference between two
        # runs of a program. So neither median may lie between the other's quartiles either.
        low, high = sorted((self, other), key=lambda t: t.median or 0.0)
        if not (low.interval and high.interval and low.quartiles and high.quartiles):
            return False
        apart = low.interval[1] < high.interval[0] and low.quartiles[1] < (high.median or 0.0)
        return apart and (low.median or 0.0) < high.quartiles[0]

    @property
    def unsteady(self) -> bool:
        """Whether the repeats are noisy, by the rule of torch.utils.benchmark's Measurement."""
        return self.iqr is not None and self.iqr >= 0.1

    @property
    def host_median(self) -> float | None:
        """Seconds until Python continued; None if unknown."""
        return statistics.median(self.host) if self.host else None

    @property
    def device_median(self) -> float | None:
        """Seconds by the devices' events; None without them."""
        return statistics.median(self.device) if self.device else None

    @property
    def scaling(self) -> float | None:
        """For ``0+1``: how much faster both together are than one after the other."""
        return statistics.median(self.alone) / self.median if self.alone and self.median else None

    def rate(self, items: float | None = None) -> float | None:
        """Return items per second, of `items` if it has none; two devices process twice as many."""
        worked = (self.items or items or 0) * (self.where.count("+") + 1)
        return worked / self.median if worked and self.median else None


@dataclass(frozen=True)
class Agreement:
    """Whether a device's results agree with the first one's."""

    where: str
    reference: str
    same: bool | None  # None if they were not compared
    # The largest absolute difference, and the result's name.
    largest: float | None = None
    name: str | None = None
    # Why they were not compared, or how they differ.
    reason: str = ""
    # The sweep's variable; empty without a sweep, or if all values agree equally.
    values: Mapping[str, Any] = field(default_factory=dict)


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the median, for any distribution.

    It lies between the j-th smallest and the j-th largest (J.-Y. Le Boudec, Performance Evaluation
    of Computer and Communication Systems, 2010, theorem 2.1 and its table in appendix A). For fewer
    than `LEAST` values it is the whole range, which covers the median at 94 % for five, 50 % for
    two.
    """
    ordered = sorted(seconds)
    rank = _rank(len(ordered))
    return ordered[rank - 1], ordered[-rank]


@lru_cache(maxsize=128)
def _rank(count: int) -> int:
    if count < LEAST:
        return 1
    if count > 70:
        return max(math.floor(0.5 * count - 0.980 * math.sqrt(count)), 1)
    below, rank, limit = 0, 0, (1 - CONFIDENCE) / 2 * 2**count
    while below + math.comb(count, rank) <= limit:
        below += math.comb(count, rank)
        rank += 1
    return rank


def quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile, interpolated as by `torch.quantile` and Measurement."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, third
