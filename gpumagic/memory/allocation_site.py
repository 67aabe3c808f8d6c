"""Find the cell and line that made an allocation on a GPU, from the allocator's record.

Virtual GPUs always know. On a real one torch must record: `record` turns it on, and each allocation
then costs about 2 µs. Allocations are stamped with the running cell, which distinguishes a cell's
reruns from its first run. Those of autograd's threads have no stamp.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch.cuda import memory

from gpumagic.device import has_virtual
from gpumagic.errors import GpuError
from gpumagic.memory.allocator import Alike, Allocator
from gpumagic.memory.find_holders import FoundStorage
from gpumagic.memory.memory_report import Made
from gpumagic.usercode.files import is_users, label

RING = 10_000
"""How many of the last allocations have the stamp of their cell on a real GPU, while recorded."""
_C: Any = torch._C
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
        return self._most(device, [address])

    def most_of(self, storages: Sequence[FoundStorage]) -> Made | None:
        """Return where most bytes of a GPU's storages were allocated; None if unknown."""
        return self._most(storages[0].device, map(attrgetter("address"), storages))

    def _most(self, device: str, addresses: Iterable[int]) -> Made | None:
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
            memory._snapshot()["device_traces"] if _C._cuda_isHistoryEnabled() else []
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
    if not hasattr(_C, "_cuda_memorySnapshot"):
        raise GpuError("--record is for CUDA GPUs, and this process has none")
    running = torch.cuda.is_initialized() and _C._cuda_isHistoryEnabled()
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
