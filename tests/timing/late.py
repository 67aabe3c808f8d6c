"""Devices that finish late, on a clock that stands still unless somebody moves it."""

import torch

from gpumagic.timing.runner import Stopwatch

GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")


class Late:
    """A clock, and devices that have done what they were given only later.

    Attributes
    ----------
    now : float
        Seconds.
    busy : dict
        Until when each device has work.
    calls : int
        Of anything; at `interrupt` the user presses Ctrl-C.
    """

    def __init__(self, *devices):
        self.now = 100.0
        self.busy = dict.fromkeys(devices, 0.0)
        self.waits, self.calls, self.interrupt = [], 0, None

    def _called(self):
        self.calls += 1
        if self.calls == self.interrupt:
            raise KeyboardInterrupt

    def clock(self):
        self._called()
        return self.now

    def work(self, host, device=None, seconds=0.0):
        """Python takes `host` seconds, and queues `seconds` of work on a device."""
        self.now += host
        if device is not None:
            self.busy[device] = max(self.busy.get(device, 0.0), self.now) + seconds

    def wait(self):
        for device, until in self.busy.items():
            self._called()
            self.waits.append(device)
            self.now = max(self.now, until)

    @property
    def stopwatch(self):
        return Stopwatch([self], self.clock)


late = Late()
"""What `work` works on: a module's functions are no variables of the user's, and not copied."""
seen = []
"""What code of a test notes."""


def begin(*devices):
    global late
    late = Late(*devices)
    return late


def work(host, device=None, seconds=0.0):
    late.work(host, device, seconds)
