"""Tell where tensors lie: in which block of torch's allocator, and how large that is.

A tensor's bytes are those of its block, so that all add up to what torch counts.
"""

import gc
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from gpumagic.device.blocks import in_blocks

# What a subclass may define anew is read where C defines it.
_base: Any = torch._C.TensorBase
_number, _storage = vars(_base)["get_device"], vars(_base)["untyped_storage"]
# Unlike `data_ptr` it copies nothing that is to be copied when it is first written to.
_data_address: Any = torch._C._data_address  # type: ignore[attr-defined]


@contextmanager
def no_collections() -> Iterator[None]:
    """Let no garbage be collected within: there are many objects, none of them garbage."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def is_native() -> bool:
    """Whether torch's own allocator is used, and not CUDA's asynchronous one, which tells less."""
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native")
    return bool(backend() == "native")


class Place(NamedTuple):
    """A piece of a GPU's memory."""

    device: str
    address: int
    nbytes: int


class Allocator:
    """The blocks that are allocated at one moment; where it tells none, storages are blocks."""

    def __init__(self) -> None:
        found: dict[int, list[Place]] = {}
        self.origins: dict[tuple[str, int], tuple[Any, str | None]] = {}
        """By device and address the frames that made a block, and what it is stamped with."""
        with no_collections():
            segments = _segments()
            self._tells = segments is not None
            for segment in segments or ():
                number, device = segment["device"], f"cuda:{segment['device']}"
                blocks = found.setdefault(number, [])
                for block in segment["blocks"]:
                    if block["state"] == "active_allocated":
                        address = block["address"]
                        blocks.append(Place(device, address, block["size"]))
                        origin = block["frames"], block.get("user_metadata")
                        self.origins[device, address] = origin
        self._blocks = {number: sorted(blocks) for number, blocks in found.items()}
        self._starts = {n: [block.address for block in self._blocks[n]] for n in self._blocks}

    @property
    def total(self) -> int:
        """The bytes of all blocks."""
        return sum(block.nbytes for blocks in self._blocks.values() for block in blocks)

    def place(self, obj: Any) -> Place | None:
        """Where a tensor or a storage lies; None of what is on no GPU, and of anything else."""
        if issubclass(type(obj), Tensor):
            return None if (number := _number(obj)) < 0 else self._of_tensor(obj, number)
        if issubclass(type(obj), UntypedStorage) and obj.device.type not in ("cpu", "meta"):
            return self._at(obj.device.index or 0, obj.data_ptr()) or self._alone(obj)
        return None

    def block(self, place: Place) -> Place | None:
        """The block that a place is in; None of other libraries' memory."""
        return self._at(int(place.device.rpartition(":")[2]), place.address)

    def _of_tensor(self, tensor: Any, number: int) -> Place | None:
        try:
            return self._at(number, _data_address(tensor)) or self._alone(_storage(tensor))
        except (RuntimeError, NotImplementedError):  # it has no storage: sparse, fake, a wrapper
            return None

    def _at(self, number: int, address: int) -> Place | None:
        starts = self._starts.get(number, ())
        at = bisect_right(starts, address) - 1
        if at < 0:
            return None
        block = self._blocks[number][at]
        return block if address < block.address + block.nbytes else None

    def _alone(self, storage: Any) -> Place | None:
        """A storage as a block of its own, where the allocator does not tell its blocks."""
        device, address = storage.device, storage.data_ptr()
        if (self._tells and device.type == "cuda") or not address:
            return None  # the memory is another library's, or there is none
        return Place(str(device), address, in_blocks(storage.nbytes()))


def _segments() -> list[Any] | None:
    there = torch.cuda.is_initialized() and hasattr(torch._C, "_cuda_memorySnapshot")
    if not there or not is_native():
        return None
    snapshot: Any = torch.cuda.memory_snapshot
    # Newer ones of torch can leave out the history of all allocations.
    lean = "include_traces" in signature(snapshot).parameters
    return list(snapshot(include_traces=False) if lean else snapshot())
