"""Count the memory that a dry run would hold on each device, and compare it with the card's.

Each storage counts once while anything refers to it, with the block size and the temporary memory
that CUDA would take. Libraries' workspaces are not counted: a peak is "at least". A card that is
not in this machine is taken as empty.
"""

import sys
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import psutil
import torch

from gpumagic.device import Device, cuda_state
from gpumagic.device import here as devices_here
from gpumagic.device.caching_allocator import CachingAllocator, in_blocks
from gpumagic.device.cards import Card
from gpumagic.dryrun.result import OnCard, Peak, cards_meant
from gpumagic.errors import GpuError
from gpumagic.placement.torch_devices import find
from gpumagic.usercode.files import UserLine, innermost
from gpumagic.virtual import gate


@dataclass
class _Storage:
    alive: weakref.ref[Any]
    order: int  # which one it is of all that were made
    size: int  # bytes that count for it
    device: str
    requested: int
    address: int = -1  # of its block; below 0 if it has none


class HeldMemory:
    """Bytes now and at most on each device, by the device's name, and the line of the most."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.start: dict[str, int] = {}
        self.at: dict[str, UserLine | None] = {}
        # Each time there was more than ever: how much by which line, in their order.
        self.rises: dict[str, list[tuple[int, UserLine | None]]] = {}
        self.made = 0
        self._known: dict[int, _Storage] = {}
        self._allocators: defaultdict[str, CachingAllocator] = defaultdict(CachingAllocator)
        self._begun = False
        self._leaving: int | None = None  # the storage that a result takes the place of

    def age(self, tensor: Any) -> int:
        """Return how many storages had been made before this one."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return self.made if known is None else known.order

    def begin(self) -> None:
        """Begin to count: present memory is the start, and the peak counts from here."""
        self.start, self._begun = dict(self.now), True
        self.reset_peak()

    def reset_peak(self) -> None:
        """Count the peak from here, as the report of a real cell does."""
        self.most, self.at = dict(self.now), {}
        self.rises = {device: [(nbytes, None)] for device, nbytes in self.now.items()}

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

        `replaced` is the storage that a run with data would write into, and whether that is
        certain. If uncertain: the memory is reused when nothing else refers to it; otherwise both
        count from the next change.
        """
        device = str(tensor.device)
        try:
            storage = tensor.untyped_storage()
            nbytes = int(storage.nbytes())
        except (RuntimeError, NotImplementedError, TypeError):  # it has no storage of its own
            for part in _parts(tensor):
                self.add(part)
            return
        key = storage._cdata
        if key in self._known:
            return
        self._settle()

        def died(_: Any, known: Any = self._known, now: Any = self.now) -> None:
            if self._leaving != key:
                self._settle()
            self._leaving = None
            self._give(known.pop(key))

        self.made += 1
        new = _Storage(weakref.ref(storage, died), self.made, 0, device, nbytes)
        self._known[key] = new
        old = None if replaced is None else replaced[0].untyped_storage()._cdata
        if replaced is not None and replaced[1] and old in self._known:
            self._give(self._known[old])
        self._take(new, nbytes)
        if replaced is None or replaced[1]:
            self._raise(device)
        else:
            self._leaving = old

    def resize(self, storage: Any, nbytes: int) -> None:
        """Count a live storage's memory when it is freed or allocated again (`resize_`)."""
        known = self._known.get(storage._cdata)
        if known is not None:
            self._settle()
            self._give(known)
            self._take(known, nbytes)
            self._raise(known.device)

    def pass_through(self, device: str, sizes: list[int]) -> None:
        """Count an operator's temporary memory, which it frees again."""
        allocator = self._allocators[device]
        taken = [(allocator.take(nbytes), nbytes) for nbytes in sizes if nbytes]
        if taken:
            # What a result takes the place of is the result meanwhile.
            old = None if self._leaving is None else self._known.get(self._leaving)
            self.now[device] = allocator.bytes.current - (0 if old is None else old.size)
            self._raise(device)
        for (address, size), nbytes in taken:
            allocator.give(address, size, nbytes)
            self.now[device] = allocator.bytes.current

    def _take(self, storage: _Storage, nbytes: int) -> None:
        """Allocate for it: on a GPU a block, on the host so many bytes."""
        device, storage.requested, storage.size = storage.device, nbytes, in_blocks(nbytes)
        if nbytes and device.startswith("cuda"):
            storage.address, storage.size = self._allocators[device].take(nbytes)
        self.now[device] = self.now.get(device, 0) + storage.size

    def _give(self, storage: _Storage) -> None:
        """Free what it has."""
        if storage.address >= 0:
            allocator = self._allocators[storage.device]
            allocator.give(storage.address, storage.size, storage.requested)
        self.now[storage.device] -= storage.size
        storage.address, storage.size = -1, 0

    def _settle(self) -> None:
        if self._leaving is not None:
            self._leaving = None
            for device in self.now:
                self._raise(device)

    def _raise(self, device: str) -> None:
        if self.now[device] > self.most.get(device, 0):
            self.most[device] = self.now[device]
            if self._begun:
                line = self.at[device] = innermost(sys._getframe(1))
                rises = self.rises.setdefault(device, [])
                if rises and rises[-1][1] == line:
                    rises.pop()
                rises.append((self.now[device], line))


def _parts(tensor: Any) -> list[Any]:
    """Return the parts of a sparse tensor; empty for other tensors."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


@dataclass(frozen=True)
class Before:
    """Record the state before the code, measured in the parent, which may use the devices."""

    time: float  # seconds, by a clock that only grows
    memory: dict[str, tuple[int, int | None]]  # bytes allocated and free, by device
    virtual: bool
    real: list[tuple[Any, int]]  # properties and bytes allocated, where a driver is in use


def measure(target: torch.device | None) -> Before:
    """Measure each device that this process uses, or will use for `target`."""
    cuda_state.check()
    memory: dict[str, tuple[int, int | None]]
    memory, real = {"cpu": (0, int(psutil.virtual_memory().available))}, []
    virtual = any(device.virtual for device in devices_here(memory=False))
    if target is not None and target.type == "cuda":
        torch.cuda.init()
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            allocated = torch.cuda.memory_allocated(index)
            memory[f"cuda:{index}"] = allocated, cuda_state.room(index)
            if not virtual:
                real.append((torch.cuda.get_device_properties(index), allocated))
    return Before(time.monotonic(), memory, virtual, real)


def peaks(held: HeldMemory, before: Before) -> dict[str, Peak]:
    """The peak of every device on which the code had tensors."""
    found = {}
    for device in sorted(held.most):
        start = held.start.get(device, 0)
        most = max(held.most[device], held.now.get(device, 0))
        allocated, free = before.memory.get(device, (start, None))
        base = start if device == "cpu" else allocated
        if device == "meta" or (most == 0 and start == 0):
            continue
        found[device] = Peak(
            device, base + most - start, max(most - start, 0), free, held.at.get(device)
        )
    return found


def target_of(on: object) -> tuple[Device | None, tuple[Card, ...]]:
    """Return the device that `on` names, without cards; or all cards, with the first's stand-in."""
    if on is None:
        return None, ()
    chosen = cards_meant(on)
    return (stand_in(chosen[0]), chosen) if chosen else (find(on), ())


def stand_in(card: Card) -> Device:
    """Return the device that imitates a card in the forked child."""
    return Device("cuda", 0, name=card.name, memory_total=card.total)


def before_on(card: Card) -> Before:
    """Return the state of an empty card."""
    if problem := gate.static_problem():
        raise GpuError(f"no dry run for a card that is not here: {problem}")
    major, minor = card.capability
    properties = SimpleNamespace(name=card.name, total_memory=card.total, major=major, minor=minor)
    memory: dict[str, tuple[int, int | None]]
    memory = {"cuda:0": (0, card.usable), "cpu": (0, int(psutil.virtual_memory().available))}
    return Before(time.monotonic(), memory, False, [(properties, 0)])


def on_card(held: HeldMemory, card: Card, device: str) -> OnCard:
    """Whether what was counted on the device has room on a card, and from which line on not."""
    rises = held.rises.get(device, [])
    at = next((line for nbytes, line in rises if nbytes > card.usable), None)
    return OnCard(card, held.most.get(device, 0), at)
