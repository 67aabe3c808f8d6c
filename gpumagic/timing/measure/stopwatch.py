"""Measure a block of runs: seconds until Python goes on and until all is done, and joules.

A device works on after the call that gave it the work has returned. So every device that torch has
started in this process is waited for before a block and after it, with all its streams, whichever
is the current one; and so is each other framework that the code needs.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from gpumagic import nvml
from gpumagic.device import Device, cuda_state
from gpumagic.frameworks.framework import Framework
from gpumagic.usercode.torch_classes import torch_here

if TYPE_CHECKING:
    import torch

LEAST_S = 1.0
"""A stretch shorter than this has no energy: the counter follows a power reading that is renewed
every 100 ms or so (Z. Yang, K. Adamek, W. Armour, Part-time power measurements: nvidia-smi's lack
of attention, SC24, arXiv:2312.02741), so that of ten of them a tenth is not certain."""


class TorchDevices:
    """The GPUs of this process, as torch has them; virtual ones too."""

    def started(self) -> Sequence[torch.device]:
        """The GPUs that have a context: to wait for another would make one, of 0.5 GiB."""
        torch = torch_here()
        if torch is None:
            return []
        if torch.cuda.is_initialized():
            return [torch.device("cuda", index) for index in cuda_state.started()]
        return [torch.device("mps", 0)] if torch.backends.mps.is_available() else []

    def wait(self, device: torch.device) -> None:
        """Return when it has done all that it was given, in all its streams."""
        if device.type == "cuda":
            torch_here().cuda.synchronize(device)
        elif device.type == "mps":
            torch_here().mps.synchronize()

    def record(self, device: torch.device) -> Any:
        """An event after what its current stream was given so far; None where it has no events."""
        torch = torch_here()
        if device.type == "cuda":
            event = cuda_state.take_event(device.index)
            event.record(torch.cuda.current_stream(device))
            return event
        if device.type == "mps":
            mark = torch.mps.event.Event(enable_timing=True)
            mark.record()
            return mark
        return None

    def elapsed(self, device: torch.device, start: Any, end: Any) -> float:
        """Seconds between two events that have passed; torch gives milliseconds."""
        seconds = float(start.elapsed_time(end)) * 1e-3
        if device.type == "cuda":
            cuda_state.give_events(device.index, start, end)
        return seconds


@dataclass(frozen=True)
class Lap:
    """Seconds of a block of runs, all together."""

    total: float  # until every device was done
    host: float  # until Python went on
    # Between the events of the device, of the slowest if there are several.
    device: float | None = None


class Stopwatch:
    """Times blocks of runs, by a clock of seconds that only grow."""

    def __init__(
        self,
        devices: TorchDevices | None = None,
        clock: Callable[[], float] = time.perf_counter,
        others: Sequence[Framework] = (),  # that are waited for beside torch
    ) -> None:
        self.devices = devices or TorchDevices()
        self.clock = clock
        self.others = others

    def wait(self) -> Sequence[torch.device]:
        """Wait for every device that was started, and say which of torch's these are."""
        started = self.devices.started()
        self.wait_for(started)
        return started

    def wait_for(self, devices: Iterable[torch.device]) -> None:
        """Wait for these of torch's, and for the frameworks beside it."""
        for device in devices:
            self.devices.wait(device)
        for framework in self.others:
            framework.wait()

    def record(self, device: torch.device | None) -> Any:
        """An event of a GPU's, which counts where torch alone gives it work."""
        return None if device is None or self.others else self.devices.record(device)

    @contextmanager
    def undisturbed(self) -> Iterator[Sequence[torch.device]]:
        """Begin when no device is at work; no garbage is collected within, as `timeit` has it."""
        collects = gc.isenabled()
        gc.disable()
        try:
            yield self.wait()
        finally:
            if collects:
                gc.enable()

    def lap(
        self,
        run: Callable[[Iterable[None]], object],
        number: int,
        on: Iterable[torch.device | None] = (),
    ) -> Lap:
        """Have `run` run `number` times; of the GPUs `on` their own time is wanted too."""
        clock, devices = self.clock, self.devices
        timed = [device for device in on if device is not None and device.type != "cpu"]
        runs = repeat(None, number)
        with self.undisturbed() as started:
            starts = [self.record(device) for device in timed]
            began = clock()
            run(runs)
            went_on = ended = clock()
            ends = [self.record(device) for device in timed]
            if started or self.others:
                self.wait_for(started)
                ended = clock()
            # What the code itself started was not to be seen before.
            late = [device for device in devices.started() if device not in started]
            if late:
                for device in late:
                    devices.wait(device)
                ended = clock()
        passed = [
            devices.elapsed(device, start, end)
            for device, start, end in zip(timed, starts, ends, strict=True)
            if start is not None and end is not None
        ]
        return Lap(ended - began, went_on - began, max(passed, default=None))


def joules(devices: Sequence[Device], door: nvml.Nvml | None = None) -> float | None:
    """What whole boards have used since the driver was loaded; None where one has no counter."""
    if not all(d.kind == "cuda" and d.uuid and not d.virtual for d in devices):
        return None
    door = door or nvml.door()
    question = {"energy": ("nvmlDeviceGetTotalEnergyConsumption",)}
    gpus = {gpu.uuid: gpu for gpu in door.gpus()}
    known = [gpus[device.uuid] for device in devices if device.uuid in gpus]
    counters = [door.ask(gpu, question, alive=True)["energy"] for gpu in known]
    if None in counters or len(counters) < len(devices):
        return None
    return float(sum(counters)) * 1e-3  # of millijoules
