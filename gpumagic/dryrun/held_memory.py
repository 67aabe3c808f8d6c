"""Count the memory that a dry run would hold on each device.

Every storage is counted once, as long as something refers to it, rounded up to 512 bytes as CUDA's
caching allocator does. The allocator's segments of 2 MiB and the workspaces of kernels are not
simulated: a peak is "at least".
"""

import sys
import weakref
from dataclasses import dataclass
from typing import Any

from gpumagic.usercode.lines import UserLine, innermost

BLOCK = 512


@dataclass
class _Storage:
    alive: weakref.ref[Any]
    order: int  # which one it is of all that were made
    size: int  # bytes that count for it


class HeldMemory:
    """Bytes now and at most on each device, by the device's name, and the line of the most."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.start: dict[str, int] = {}
        self.at: dict[str, UserLine | None] = {}
        self.made = 0
        self._known: dict[int, _Storage] = {}
        self._begun = False
        self._leaving: int | None = None  # the storage that a result takes the place of

    def age(self, tensor: Any) -> int:
        """How many storages were made when this one was."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return self.made if known is None else known.order

    def begin(self) -> None:
        """What is there by now is the start; the peak counts from here."""
        self.start, self.most, self._begun = dict(self.now), dict(self.now), True

    def reset_peak(self) -> None:
        """Count the peak from here, as the report of a real cell does."""
        self.most, self.at = dict(self.now), {}

    def add_existing(self, tensor: Any) -> None:
        """Count the fake of a tensor that is there now, also when it is met later."""
        device = str(tensor.device)
        before = self.now.get(device, 0)
        most, at = self.most.get(device, 0), self.at.get(device)
        self.add(tensor)
        if self._begun and device != "cpu":  # on the host it may be a new one all the same
            size = self.now.get(device, 0) - before
            self.start[device] = self.start.get(device, 0) + size
            self.most[device], self.at[device] = most + size, at

    def add(self, tensor: Any, replaced: tuple[Any, bool] | None = None) -> None:
        """Count the storage of a fake, once.

        `replaced` is what would be written into in a run with data, and whether that is certain. If
        not, it is so if nothing else holds it: else it is still there at the next change, and only
        then both count.
        """
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
        self._settle()

        def died(_: Any, known: Any = self._known, now: Any = self.now) -> None:
            if self._leaving != key:
                self._settle()
            self._leaving = None
            now[device] -= known.pop(key).size

        self.made += 1
        self._known[key] = _Storage(weakref.ref(storage, died), self.made, size)
        old = None if replaced is None else replaced[0].untyped_storage()._cdata
        if replaced is not None and replaced[1] and old in self._known:
            before = self._known[old]
            size -= before.size
            before.size = 0
        self.now[device] = self.now.get(device, 0) + size
        if replaced is None or replaced[1]:
            self._raise(device)
        else:
            self._leaving = old

    def _settle(self) -> None:
        if self._leaving is not None:
            self._leaving = None
            for device in self.now:
                self._raise(device)

    def _raise(self, device: str) -> None:
        if self.now[device] > self.most.get(device, 0):
            self.most[device] = self.now[device]
            if self._begun:
                self.at[device] = innermost(sys._getframe(1))
