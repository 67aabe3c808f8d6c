"""Find the block of torch's allocator that a tensor is in.

A tensor's bytes are those of its block, so all of them add up to torch's total.
"""

from bisect import bisect_right
from collections.abc import Container
from inspect import signature
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from gpumagic.device import has_virtual
from gpumagic.device.caching_allocator import in_blocks
from gpumagic.device.cards import cublas_workspace
from gpumagic.frameworks.framework import Place
from gpumagic.memory.object_graph import no_collections

# A subclass may override these methods, so they are called on C's own class.
_base: Any = torch._C.TensorBase
_number, _storage = vars(_base)["get_device"], vars(_base)["untyped_storage"]
# Unlike `data_ptr` it copies nothing that is to be copied when it is first written to.
_data_address: Any = torch._C._data_address  # type: ignore[attr-defined]


def is_native() -> bool:
    """Whether torch's own allocator is used, and not CUDA's asynchronous one, which tells less."""
    backend = getattr(torch._C, "_cuda_getAllocatorBackend", lambda: "native")
    return bool(backend() == "native")


Spot = tuple[str, int, int]
"""The fields of a `Place`, as a plain tuple, which is faster to make."""


class Alike:
    """Share the facts of all blocks of one size from the same line of the same cell."""

    __slots__ = ("frames", "size", "stamp")

    def __init__(self, size: int, frames: list[Any], stamp: str) -> None:
        self.size, self.frames, self.stamp = size, frames, stamp


class Allocator:
    """Hold the blocks allocated at one moment; if the allocator lists none, storages are blocks."""

    def __init__(self) -> None:
        self._blocks: dict[int, dict[int, Alike]] = {}
        with no_collections():
            segments = _segments()
            self._tells = segments is not None
            self._read(segments or [])
        # By device the addresses in order, of those devices for which they were needed.
        self._starts: dict[int, list[int]] = {}

    def _read(self, segments: list[Any]) -> None:
        known: dict[tuple[int, int, str | None], Alike] = {}
        for segment in segments:
            blocks = self._blocks.setdefault(segment["device"], {})
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    frames, stamp = block["frames"], block.get("user_metadata")
                    key = block["size"], id(frames), stamp
                    alike = known.get(key)
                    if alike is None:
                        alike = known[key] = Alike(block["size"], frames, stamp or "")
                    blocks[block["address"]] = alike

    @property
    def total(self) -> int:
        """The bytes of all blocks."""
        every = self._blocks.values()
        return sum(sum(map(attrgetter("size"), blocks.values())) for blocks in every)

    def blocks(self, device: str) -> dict[int, Alike]:
        """The blocks on ``"cuda:0"``, by address."""
        return self._blocks.get(_ordinal(device), {})

    def workspaces(self, device: str, met: Container[int]) -> int:
        """Return the bytes of cuBLAS's workspaces: blocks of their size, not at addresses `met`."""
        found = torch.cuda.get_device_properties(_ordinal(device))
        nbytes = cublas_workspace((found.major, found.minor))
        blocks = self.blocks(device).items()
        return sum(b.size for address, b in blocks if b.size == nbytes and address not in met)

    def place(self, obj: Any) -> Place | None:
        """Return the place of a tensor or storage on a GPU; None for any other object."""
        if issubclass(type(obj), Tensor):
            number = _number(obj)
            return self._of_tensor(obj, number) if number >= 0 else None
        if issubclass(type(obj), UntypedStorage) and obj.device.type not in ("cpu", "meta"):
            return self._at(obj.device.index or 0, obj.data_ptr()) or self._alone(obj)
        return None

    def places(self, objects: list[Any]) -> list[Spot | None]:
        """Return the places of several objects; tensors in torch's blocks are read together."""
        try:
            numbers, addresses = [*map(_number, objects)], [*map(_data_address, objects)]
            (number,) = {*numbers}
            blocks = self._blocks[number]
            sizes = [blocks[address].size for address in addresses]
        except (LookupError, ValueError, TypeError, RuntimeError, NotImplementedError):
            return [*map(self.place, objects)]
        return [*zip(repeat(f"cuda:{number}"), addresses, sizes)]

    def block(self, place: Place) -> Place | None:
        """Return the block that a place is in; None for another library's memory."""
        return self._at(_ordinal(place.device), place.address)

    def _of_tensor(self, tensor: Any, number: int) -> Place | None:
        try:
            address = _data_address(tensor)
            if number in self._blocks and address in self._blocks[number]:
                return Place(f"cuda:{number}", address, self._blocks[number][address].size)
            return self._at(number, address) or self._alone(_storage(tensor))
        except (RuntimeError, NotImplementedError):  # it has no storage: sparse, fake, a wrapper
            return None

    def _at(self, number: int, address: int) -> Place | None:
        """Return the block that contains an address."""
        blocks = self._blocks.get(number, {})
        if number not in self._starts:
            self._starts[number] = sorted(blocks)
        at = bisect_right(self._starts[number], address) - 1
        start = self._starts[number][at] if at >= 0 else address
        size = blocks[start].size if at >= 0 else 0
        return Place(f"cuda:{number}", start, size) if address < start + size else None

    def _alone(self, storage: Any) -> Place | None:
        """Return a storage as a block of its own, if the allocator does not list blocks."""
        device, address = storage.device, storage.data_ptr()
        if (self._tells and device.type == "cuda") or not address:
            return None  # the memory is another library's, or there is none
        return Place(str(device), address, in_blocks(storage.nbytes()))


def _ordinal(device: str) -> int:
    kind, _, number = device.partition(":")
    return int(number or 0) if kind == "cuda" else -1


def clear_workspaces() -> None:
    """Give cuBLAS's workspaces back to torch's allocator; the next product allocates one again.

    Nothing is given back if CUDA graphs were captured, because they may use a workspace.
    """
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    segments = None if clear is None or has_virtual() else _segments()
    pools = {tuple(segment.get("segment_pool_id", ())) for segment in segments or ()}
    if clear is not None and segments and pools <= {(), (0, 0)}:
        clear()


def _segments() -> list[Any] | None:
    there = torch.cuda.is_initialized() and hasattr(torch._C, "_cuda_memorySnapshot")
    if not there or not is_native():
        return None
    snapshot: Any = torch.cuda.memory_snapshot
    # Newer ones of torch can leave out the history of all allocations.
    lean = "include_traces" in signature(snapshot).parameters
    return list(snapshot(include_traces=False) if lean else snapshot())
