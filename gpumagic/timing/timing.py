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
from gpumagic.frameworks.needed import Needed
from gpumagic.usercode.values import comes_from, torch_here

_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Where it was measured: what it has, and how many threads torch uses."""

    host: str | None
    cpu: str | None
    cpu_count: int | None
    threads: int | None
    python: str
    torch: str | None = None
    cuda: str | None = None
    driver: str | None = None
    # The versions of those beside torch: {"JAX": "0.10.2"}.
    frameworks: Mapping[str, str] = field(default_factory=dict)


def this_machine(cpuinfo: Path = _CPUINFO) -> Machine:
    """What this machine is, without starting CUDA: the driver is known by NVML."""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        text = ""
    named = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    # ARM's kernels give none there, and `platform` the architecture at most.
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
        """Why it is not what was asked for."""
        return next((device.note for device in self.parts if device.note), None)


def targets(given: Iterable[object] | str | None, needed: Needed) -> tuple[TimedDevices, ...]:
    """The targets that are named, in that order; the CPU and every GPU if None; or GpuError."""
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
    # A blank beside a comma or a plus is none between two devices.
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
# Fewer repeats than these have no such interval: 2 · 0.5⁵ is more than 5 %.
LEAST = 6


@dataclass(frozen=True)
class Timing:
    """One device, at one value of the sweep; its times are seconds of one run."""

    where: str  # "cpu", "cuda:1", or "cuda:0+cuda:1" for two at the same time
    # One for each repeat: from its first statement until every device was done.
    seconds: tuple[float, ...] = ()
    # The same, until Python went on; less than `seconds` where the device was still busy.
    host: tuple[float, ...] = ()
    # The same by the devices' own events; None where there is no GPU.
    device: tuple[float, ...] | None = None
    number: int = 1  # runs in each repeat, whose mean is one of `seconds`
    values: Mapping[str, Any] = field(default_factory=dict)  # the sweep's variables: {"n": 256}
    name: str | None = None  # the device's
    uuid: str | None = None
    virtual: bool = False  # its times are the CPU's
    copied: int = 0  # bytes of the inputs, copied there once before
    copy_seconds: float = 0.0  # what that took; in none of `seconds`
    # Seconds of compiling in the first run, in none of `seconds`; None where nothing tells of it.
    compiled: float | None = None
    # Seconds of the first run, tracing and compiling included, where nothing tells of these.
    first: float | None = None
    # The most bytes that the allocator held while it ran beyond those that it held when its
    # inputs were there, by device; no entry is not known.
    peak: Mapping[str, int] = field(default_factory=dict)
    # What one run copied between devices and waited for, as the ledger says it.
    transfers: str = ""
    energy: float | None = None  # joules of one run, by NVML's counter
    alone: tuple[float, ...] = ()  # of two together: the same runs one device after the other
    # Why there are no `seconds`: "out of memory", "interrupted" or an exception's line.
    error: str | None = None
    items: float | None = None  # what one run works through there
    steady: bool = True  # False where the time limit came before the median was certain

    @cached_property
    def median(self) -> float | None:
        """Seconds of one run; None where nothing was measured."""
        return statistics.median(self.seconds) if self.seconds else None

    @cached_property
    def quartiles(self) -> tuple[float, float] | None:
        """Seconds that a quarter, and that three quarters, of the repeats took at most."""
        return quartiles(self.seconds) if self.seconds else None

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the median; see `interval` for fewer than six repeats."""
        return interval(self.seconds) if self.seconds else None

    @property
    def iqr(self) -> float | None:
        """From the first quartile to the third, out of the median; None for under four repeats."""
        if self.quartiles is None or len(self.seconds) < 4 or not self.median:
            return None
        return (self.quartiles[1] - self.quartiles[0]) / self.median

    def differs(self, other: Timing) -> bool:
        """Whether two medians differ by more than both spreads."""
        # Of thousands of repeats the 95 % interval is narrower than what one run of a program
        # differs from the next: so neither median may lie between the other's quartiles either.
        low, high = sorted((self, other), key=lambda t: t.median or 0.0)
        if not (low.interval and high.interval and low.quartiles and high.quartiles):
            return False
        apart = low.interval[1] < high.interval[0] and low.quartiles[1] < (high.median or 0.0)
        return apart and (low.median or 0.0) < high.quartiles[0]

    @property
    def unsteady(self) -> bool:
        """Whether the repeats are spread widely, as torch.utils.benchmark's Measurement warns."""
        return self.iqr is not None and self.iqr >= 0.1

    @property
    def host_median(self) -> float | None:
        """Seconds until Python went on; None where that is not known."""
        return statistics.median(self.host) if self.host else None

    @property
    def device_median(self) -> float | None:
        """Seconds by the devices' own events; None where there are none."""
        return statistics.median(self.device) if self.device else None

    @property
    def scaling(self) -> float | None:
        """Of ``0+1``: how much sooner both are done than one after the other."""
        return statistics.median(self.alone) / self.median if self.alone and self.median else None

    def rate(self, items: float | None = None) -> float | None:
        """Items a second, of `items` where it has none of its own; two devices do two at once."""
        worked = (self.items or items or 0) * (self.where.count("+") + 1)
        return worked / self.median if worked and self.median else None


@dataclass(frozen=True)
class Agreement:
    """Whether a device gave the numbers that the first one gave."""

    where: str
    reference: str
    same: bool | None  # None where they were not compared
    # The largest absolute difference, and the name of the result that it is in.
    largest: float | None = None
    name: str | None = None
    # Why they were not compared, or how they differ.
    reason: str = ""
    # The sweep's variables; empty without a sweep, or where all values agree alike.
    values: Mapping[str, Any] = field(default_factory=dict)


def interval(seconds: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the median, whatever the distribution.

    Between the j-th smallest and the j-th largest (J.-Y. Le Boudec, Performance Evaluation of
    Computer and Communication Systems, 2010, theorem 2.1 and its table in appendix A). Of fewer
    than `LEAST` it is the whole range: that covers the median at 94 % for five, 50 % for two.
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
    """The first and the third, interpolated as `torch.quantile` and Measurement do."""
    if len(seconds) < 2:
        return seconds[0], seconds[0]
    first, _, third = statistics.quantiles(seconds, n=4, method="inclusive")
    return first, third
