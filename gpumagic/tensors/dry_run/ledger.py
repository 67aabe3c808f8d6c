"""The memory that a dry run would hold on each device.

Every storage is counted once, as long as something refers to it, rounded up to 512 bytes as CUDA's
caching allocator does. What it asks of the driver comes in segments of 2 MiB, and kernels have
workspaces of their own; neither is simulated: a peak is "at least".
"""

import sys
import weakref
from typing import Any

from gpumagic.tensors.dry_run.lines import Place, place

BLOCK = 512


class Ledger:
    """Bytes now and at most on each device, by the device's name, and the line of the most."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.start: dict[str, int] = {}
        self.at: dict[str, Place | None] = {}
        self._known: dict[int, weakref.ref[Any]] = {}
        self._begun = False

    def begin(self) -> None:
        """What is there by now is the start; the peak counts from here."""
        self.start, self.most, self._begun = dict(self.now), dict(self.now), True

    def reset_peak(self) -> None:
        """Count the peak from here, as the report of a real cell does."""
        self.most, self.at = dict(self.now), {}

    def add_existing(self, tensor: Any) -> None:
        """Count the stand-in of a tensor that is there now, also when it is met later."""
        device = str(tensor.device)
        before = self.now.get(device, 0)
        most, at = self.most.get(device, 0), self.at.get(device)
        self.add(tensor)
        if self._begun and device != "cpu":  # on the host it may be a new one all the same
            size = self.now.get(device, 0) - before
            self.start[device] = self.start.get(device, 0) + size
            self.most[device], self.at[device] = most + size, at

    def add(self, tensor: Any) -> None:
        """Count the storage of a stand-in, once."""
        device = str(tensor.device)
        try:
            storage = tensor.untyped_storage()
            nbytes = int(storage.nbytes())
        except (RuntimeError, NotImplementedError, TypeError):  # sparse, nested: no one storage
            return
        key = storage._cdata
        if key in self._known:
            return
        size = -(-nbytes // BLOCK) * BLOCK

        def died(_: Any, known: Any = self._known, now: Any = self.now) -> None:
            known.pop(key, None)
            now[device] -= size

        self._known[key] = weakref.ref(storage, died)
        self.now[device] = self.now.get(device, 0) + size
        if self.now[device] > self.most.get(device, 0):
            self.most[device] = self.now[device]
            if self._begun:
                self.at[device] = place(sys._getframe(1))
