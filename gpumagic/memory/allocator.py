"""Read torch's allocator: the block that a tensor is in, and the line that allocated it.

A tensor's bytes are its block's, so the bytes of all tensors add up to torch's total. Virtual GPUs
always know the line. On a real one torch must record: `record` turns it on, and each allocation
then costs about 2 µs. Allocations are stamped with the running cell, which distinguishes a cell's
reruns from its first run. Those of autograd's threads have no stamp.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from inspect import signature
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.cuda import memory

from gpumagic.device import has_virtual
from gpumagic.device.caching_allocator import in_blocks
from gpumagic.device.cards import cublas_workspace
from gpumagic.errors import GpuError
from gpumagic.frameworks.framework import Place
from gpumagic.memory.memory_report import Made
from gpumagic.memory.object_graph import no_collections
from gpumagic.usercode.files import is_users, label

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


# -- where it was made
RING = 10_000
"""How many of the last allocations have the stamp of their cell on a real GPU, while recorded."""
_Counted = tuple[tuple[Alike | None, str], int]
_recording = False  # and it was us who turned it on


class MadeIn:
    """Keep where each allocation was made that is live when this is created."""

    def __init__(self, allocator: Allocator | None = None) -> None:
        self._allocator = allocator or Allocator()
        # By the id of the list of frames, which allocations of one line may share, and the stamp.
        self._known: dict[tuple[int, str], Made | None] = {}

    def of(self, device: str, address: int) -> Made | None:
        """Return the cell and line of the allocation at an address of a GPU; None if unknown."""
        return self.most_of(device, [address])

    def most_of(self, device: str, addresses: Iterable[int]) -> Made | None:
        """Return where most bytes at some addresses of a GPU were allocated; None if unknown."""
        found: dict[tuple[int, str], int] = {}
        for (block, trace), count in self._counted(device, addresses):
            if block is not None:
                origin = id(block.frames), block.stamp or trace
                found[origin] = found.get(origin, 0) + count * block.size
                if origin not in self._known:
                    self._known[origin] = _made(block.frames, origin[1])
        return self._known[max(found, key=found.__getitem__)] if found else None

    def _counted(self, device: str, addresses: Iterable[int]) -> Iterable[_Counted]:
        """How many of some blocks are alike, with what the trace has stamped on them."""
        at, traced = self._allocator.blocks(device).get, self._stamps
        if not traced:
            return (((block, ""), count) for block, count in Counter(map(at, addresses)).items())
        return Counter((at(each), traced.get((device, each), "")) for each in addresses).items()

    @cached_property
    def _stamps(self) -> dict[tuple[str, int], str]:
        """Return the last stamp of each address that torch's trace has."""
        traces: list[Any] = (
            memory._snapshot()["device_traces"] if torch._C._cuda_isHistoryEnabled() else []
        )
        return {
            (f"cuda:{number}", entry["addr"]): entry.get("user_metadata", "")
            for number, trace in enumerate(traces)
            for entry in trace
            if entry["action"] == "alloc"
        }


def users(frames: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the user's innermost frame among torch's recorded frames."""
    return next((frame for frame in frames if is_users(frame["filename"])), None)


def _made(frames: Sequence[Mapping[str, Any]], stamp: str) -> Made | None:
    """Return the user's innermost line, and the cell that ran it if that is another one."""
    frame = users(frames)
    if frame is None or frame["filename"].startswith("<timed "):  # `%%time` counts its own lines
        return Made(stamp) if stamp else None
    name = label(frame["filename"])
    # Each run of a cell has the same file; a function in it is as old as its last run.
    if stamp and name.startswith("In [") and frame["name"] == "<module>":
        return Made(stamp, frame["line"])
    cell = next((f for f in frames if _is_cell(f)), None)
    ran_in = stamp or (label(cell["filename"]) if cell is not None else "")
    if ran_in == name:
        ran_in = ""
    elif cell is not None:
        ran_in += f", line {cell['line']}"
    return Made(name, frame["line"], ran_in)


def _is_cell(frame: Mapping[str, Any]) -> bool:
    return bool(frame["name"] == "<module>" and label(frame["filename"]).startswith("In ["))


def record(on: bool) -> str:
    """Turn torch's record of allocations on or off, and say in a line what holds now.

    What the user had turned on stays as it is. Raises GpuError without a CUDA GPU.
    """
    global _recording
    if has_virtual():
        return "virtual GPUs always know the line; there is nothing to record"
    if not hasattr(torch._C, "_cuda_memorySnapshot"):
        raise GpuError("--record is for CUDA GPUs, and this process has none")
    running = torch.cuda.is_initialized() and torch._C._cuda_isHistoryEnabled()
    if running and not _recording:
        return "memory history is recorded already, as your code asked; it stays so"
    if on and not running:
        memory._record_memory_history("all", context="alloc", stacks="python", max_entries=RING)
    if running and not on:
        memory._record_memory_history(None)
    _recording = on
    if on:
        return "lines are recorded from now on, for about 2 µs per allocation; --record off ends it"
    return "lines are no longer recorded" if running else "--record was not on"


def forget() -> None:
    """End the record that was turned on here: the extension is about to go."""
    if _recording:
        record(on=False)
