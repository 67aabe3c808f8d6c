"""Count the memory that a run would allocate on each device, and compare it with GPU models.

A storage counts once, until nothing refers to it. Sizes are rounded as on CUDA. Workspaces of
libraries are not counted, so a peak is a lower bound. A `Card` is a GPU model with all memory free.
"""

import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from gpumagic.device import Device, cuda_state, is_where
from gpumagic.device import here as devices_here
from gpumagic.device.caching_allocator import CachingAllocator, in_blocks
from gpumagic.device.cards import Card, card, cards
from gpumagic.dryrun.result import OnCard, Peak
from gpumagic.errors import GpuError
from gpumagic.placement.torch_devices import find
from gpumagic.usercode.files import UserLine, innermost
from gpumagic.virtual import gate
from gpumagic.virtual.memory_account import host_has


@dataclass
class _Storage:
    alive: weakref.ref[Any]
    order: int  # number of the storage, in order of creation
    device: str
    requested: int
    size: int = 0  # counted bytes; on a GPU, the size of the allocated block
    address: int = -1  # address of the allocated block; negative if there is none


class HeldMemory:
    """Count present and peak bytes by device name; record the line of each peak."""

    def __init__(self) -> None:
        self.now: dict[str, int] = {}
        self.most: dict[str, int] = {}  # the peak since `reset_peak`
        self.start: dict[str, int] = {}  # bytes allocated before the run
        self.rises: dict[str, list[tuple[int, UserLine | None]]] = {}  # each new peak, and its line
        self._known: dict[int, _Storage] = {}
        self._allocators: defaultdict[str, CachingAllocator] = defaultdict(CachingAllocator)
        self._begun = False
        self.made = 0  # number of storages created so far
        self._leaving: int | None = None  # key of a storage that the newest storage may replace

    def age(self, tensor: Any) -> int:
        """Return the creation number of a tensor's storage; the latest number if unknown."""
        known = self._known.get(tensor.untyped_storage()._cdata)
        return self.made if known is None else known.order

    def begin(self) -> None:
        """Record the present memory as the start, and reset the peak."""
        self.start, self._begun = dict(self.now), True
        self.reset_peak()

    def reset_peak(self) -> None:
        self.most = dict(self.now)
        self.rises = {device: [(nbytes, None)] for device, nbytes in self.now.items()}

    def add(
        self, tensor: Any, replaced: tuple[Any, bool] | None = None, *, existing: bool = False
    ) -> None:
        """Count the storage of a fake once, until the storage is freed.
        `replaced` has a tensor whose memory a real run may reuse, and whether reuse is certain.
        `existing` means that the memory was allocated before the dry run."""
        if tensor.layout is not torch.strided:
            return  # a sparse tensor has no storage
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, int(storage.nbytes())
        if key in self._known:
            return

        def died(_: Any, known: Any = self._known) -> None:
            if self._leaving != key:
                self._settle()
            self._leaving = None
            self._free(known.pop(key))

        self._settle()
        device, self.made = str(tensor.device), self.made + 1
        new = _Storage(weakref.ref(storage, died), self.made, device, nbytes)
        self._known[key] = new
        old, certain = None, False
        if replaced is not None:
            old, certain = replaced[0].untyped_storage()._cdata, replaced[1]
        if certain and old in self._known:
            self._free(self._known[old])
        new.size = in_blocks(nbytes)
        if nbytes and device.startswith("cuda"):
            new.address, new.size = self._allocators[device].allocate(nbytes)
        self.now[device] = self.now.get(device, 0) + new.size
        # Ignore `existing` on the CPU: `Fakes` also sets it for tensors that the code has created.
        if existing and self._begun and device != "cpu":
            self.start[device] = self.start.get(device, 0) + new.size
            self.most[device] = self.most.get(device, 0) + new.size
        elif old is not None and not certain:
            # If `old` is freed next, the new storage reuses that memory. If not, both count.
            self._leaving = old
        else:
            self._raise_peak(device)

    def pass_through(self, device: str, sizes: list[int]) -> None:
        """Count an operator's temporary memory, and free it."""
        allocator = self._allocators[device]
        taken = [(*allocator.allocate(nbytes), nbytes) for nbytes in sizes if nbytes]
        if taken:
            # Do not count the storage `old`, whose memory the operator's result may reuse.
            old = self._known.get(self._leaving or 0)
            self.now[device] = allocator.bytes.current - (0 if old is None else old.size)
            self._raise_peak(device)
        for block in taken:
            allocator.free(*block)
            self.now[device] = allocator.bytes.current

    def _free(self, storage: _Storage) -> None:
        if storage.address >= 0:
            self._allocators[storage.device].free(storage.address, storage.size, storage.requested)
        self.now[storage.device] -= storage.size
        storage.address, storage.size = -1, 0

    def _settle(self) -> None:
        """Raise the peaks if the storage `_leaving` still exists, so that both storages count."""
        if self._leaving is not None:
            self._leaving = None
            for device in self.now:
                self._raise_peak(device)

    def _raise_peak(self, device: str) -> None:
        if self.now[device] > self.most.get(device, 0):
            self.most[device] = self.now[device]
            if self._begun:
                line, rises = innermost(sys._getframe(1)), self.rises.setdefault(device, [])
                if rises and rises[-1][1] == line:
                    rises.pop()
                rises.append((self.now[device], line))


@dataclass(frozen=True)
class Before:
    """Record the devices' state before the fork, because the child must not query devices."""

    time: float  # seconds by `time.monotonic`
    memory: dict[str, tuple[int, int | None]]  # bytes allocated and free, by device
    virtual: bool
    real: list[tuple[Any, int]]  # properties and allocated bytes of each GPU that is not virtual


def measure(target: torch.device | None, card: Card | None = None) -> Before:
    """Measure the devices of this process, or describe only `card` if it is given."""
    real: list[tuple[Any, int]] = []
    memory: dict[str, tuple[int, int | None]] = {"cpu": (0, host_has())}
    if card is not None:
        if problem := gate.static_problem():
            raise GpuError(f"no dry run for a card that is not here: {problem}")
        facts = dict(zip(("major", "minor"), card.capability, strict=True))
        real.append((SimpleNamespace(name=card.name, total_memory=card.total, **facts), 0))
        memory["cuda:0"] = 0, card.usable
        return Before(time.monotonic(), memory, False, real)
    cuda_state.check()
    gpus = {device.ordinal: device for device in devices_here()}
    virtual = any(device.virtual for device in gpus.values())
    if target is not None and target.type == "cuda":
        torch.cuda.init()
    started = cuda_state.started()  # querying any other GPU would create a context (0.5 GiB)
    for index in range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ():
        allocated, gpu = torch.cuda.memory_allocated(index), gpus.get(index)
        unused = gpu.memory_free if gpu is not None else None
        free = cuda_state.free_bytes(index) if index in started else unused
        memory[f"cuda:{index}"] = allocated, free
        if not virtual:
            real.append((torch.cuda.get_device_properties(index), allocated))
    return Before(time.monotonic(), memory, virtual, real)


def peaks(held: HeldMemory, before: Before) -> dict[str, Peak]:
    """Return the peak of each device on which the code had tensors."""
    found = {}
    for device in sorted(held.most):
        start = held.start.get(device, 0)
        most = max(held.most[device], held.now.get(device, 0))
        allocated, free = before.memory.get(device, (start, None))
        base = start if device == "cpu" else allocated
        if device != "meta" and (most or start):
            at = held.rises.get(device, [(0, None)])[-1][1]
            found[device] = Peak(device, base + most - start, max(most - start, 0), free, at)
    return found


def target_of(on: object) -> tuple[Device | None, tuple[Card, ...]]:
    """Return the device and the cards in `on`; with cards, the device simulates the first card."""
    if on is None:
        return None, ()
    chosen: tuple[Card, ...] = ()
    if isinstance(on, Card):
        chosen = (on,)
    elif isinstance(on, str) and not is_where(on):
        try:
            chosen = cards(on)
        except GpuError as error:
            raise GpuError(f"{error}; or type a device: 1, cuda:1, cpu, free") from None
    elif isinstance(on, Iterable) and not isinstance(on, str):
        chosen = tuple(each if isinstance(each, Card) else card(each) for each in on)
    if not chosen:
        return find(on), ()
    first = chosen[0]
    return Device("cuda", 0, name=first.name, memory_total=first.total), chosen


def on_card(held: HeldMemory, card: Card) -> OnCard:
    """Compare the highest peak of all GPUs with a card; find the first line that does not fit."""
    device = max(held.most.keys() - {"cpu", "meta"}, key=held.most.__getitem__, default="")
    at = next((line for nbytes, line in held.rises.get(device, []) if nbytes > card.usable), None)
    return OnCard(card, held.most.get(device, 0), at)
