"""Provide history and snapshots to ``torch.cuda.memory``, in the layout of C++.

The host's allocator puts each block of a virtual GPU wherever it likes, so each is a segment of its
own, at the address that its storage has; what is reserved beyond is one more, and inactive.
"""

import gc
import os
from collections.abc import Iterable
from contextlib import ExitStack
from operator import attrgetter
from types import CodeType
from typing import Any

from torch._C._profiler import symbolize_tracebacks

from gpumagic.usercode.lines import line_of
from gpumagic.virtual.memory_history import (
    Allocation,
    Recording,
    Stack,
    history,
)
from gpumagic.virtual.virtual_gpus import GPUS, VirtualGpu

_OURS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_LARGE_SEGMENT = 2**20
_NOWHERE = 2**12
"""An address at which no memory lies."""
_POOL = (0, 0)
_SETTINGS = {
    "PYTORCH_CUDA_ALLOC_CONF": "",
    "max_split_size": -1,
    "garbage_collection_threshold": 0.0,
    "expandable_segments": False,
    "pinned_num_register_threads": 1,
    "release_lock_on_cudamalloc": False,
    "pinned_use_cuda_host_register": False,
    "roundup_power2_divisions": {},
}


def functions(stack: ExitStack) -> dict[str, Any]:
    """Return functions by name, for ``torch._C``; closing `stack` forgets the record."""
    stack.callback(history.forget)
    return {
        "_cuda_memorySnapshot": snapshot,
        "_cuda_record_memory_history": _record,
        "_cuda_record_memory_history_legacy": _record_as_before,
        "_cuda_isHistoryEnabled": lambda: history.recording.enabled,
        "_cuda_allocationTraceback": _traceback_of,
        "_cuda_memoryMetadataSupported": lambda: True,
        "_cuda_setMemoryMetadata": lambda text: history.set_metadata(text),
        "_cuda_getMemoryMetadata": lambda: history.thread.metadata,
        "_cuda_annotateMemory": _annotate,
        "_cuda_attach_out_of_memory_observer": lambda observer: history.observers.append(observer),
        "_cuda_getAllocatorBackend": lambda: "native",
    }


def snapshot(pool: tuple[Any, ...] | None = None) -> dict[str, Any]:
    """Return what ``torch.cuda.memory._snapshot`` and ``memory_snapshot`` return."""
    traces = pool is None or len(pool) < 3 or pool[2]
    mine = pool is None or tuple(pool[:2]) == _POOL
    frames = _Frames()
    collects = gc.isenabled()
    gc.disable()  # hundreds of thousands of dicts, none of them garbage
    try:
        return {
            "segments": [s for gpu in GPUS if mine for s in _segments(gpu, frames)],
            "device_traces": [_trace(gpu, frames) for gpu in GPUS] if traces else [],
            "allocator_settings": dict(_SETTINGS),
            "external_annotations": [],
        }
    finally:
        if collects:
            gc.enable()


class _Frames:
    """Lines as torch gives them; each is made once for a snapshot, and so are those of a block."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[dict[str, Any]]] = {}
        self._stacks: dict[int, list[dict[str, Any]]] = {}

    def learn(self, stacks: Iterable[Stack]) -> None:
        """Read some stacks, all at once: what they have in common is shared."""
        new = [each for each in stacks if each is not None and id(each) not in self._stacks]
        for each, lines in zip(new, symbolize_tracebacks(new), strict=True):
            others = [line for line in lines if not line["filename"].startswith(_OURS)]
            self._stacks[id(each)] = others

    def of(self, stack: Stack) -> list[dict[str, Any]]:
        """Return the frames of a learned stack."""
        return [] if stack is None else self._stacks[id(stack)]

    def of_block(self, block: Allocation) -> list[dict[str, Any]]:
        code, at = block.made, block.at
        try:
            return self._known[id(code), at]
        except KeyError:
            if not isinstance(code, CodeType):
                return self.of(code)
            name, file = code.co_name, code.co_filename
            found = [{"name": name, "filename": file, "line": line_of(code, at)}]
            self._known[id(code), at] = found
            return found


def _segments(gpu: VirtualGpu, frames: _Frames) -> list[dict[str, Any]]:
    blocks, of, device = gpu.account.blocks_now(), frames.of_block, gpu.index
    if {*map(type, map(attrgetter("made"), blocks))} - {CodeType}:
        frames.learn(block.made for block in blocks if not isinstance(block.made, CodeType))
    sizes = [block.place[1] for block in blocks]
    segments = [
        _segment(device, block.address, size, block.requested, of(block), block.metadata)
        for block, size in zip(blocks, sizes, strict=True)
    ]
    cached = gpu.account.allocator.reserved.current - sum(sizes)
    if cached > 0:
        above = blocks[-1].address + sizes[-1] if blocks else _NOWHERE
        unused = _segment(device, above, cached, cached, [], "")
        unused |= {"allocated_size": 0, "active_size": 0, "requested_size": 0}
        unused["blocks"][0]["state"] = "inactive"
        segments.append(unused)
    return segments


# What differs from one to another is filled in by `_segment`.
_INSIDE: dict[str, Any] = {
    **dict.fromkeys(("address", "size", "requested_size"), 0),
    "state": "active_allocated",
    **dict.fromkeys(("frames", "user_metadata")),
}
_SEGMENT: dict[str, Any] = {
    **dict.fromkeys(("device", "address", "total_size", "allocated_size", "active_size"), 0),
    **dict.fromkeys(("requested_size", "stream"), 0),
    "segment_type": "small",
    "segment_pool_id": _POOL,
    "is_expandable": False,
    **dict.fromkeys(("frames", "blocks")),
}


def _segment(
    device: int, address: int, size: int, requested: int, frames: list[Any], metadata: str
) -> dict[str, Any]:
    """Return a segment with one block, which is allocated."""
    # To copy a dictionary is faster than to make it, and there may be a hundred thousand.
    inside, segment = _INSIDE.copy(), _SEGMENT.copy()
    inside["address"] = segment["address"] = address
    inside["size"] = segment["total_size"] = size
    segment["allocated_size"] = segment["active_size"] = size
    inside["requested_size"] = segment["requested_size"] = requested
    inside["frames"], inside["user_metadata"] = frames, metadata
    segment["device"], segment["frames"], segment["blocks"] = device, [], [inside]
    if size > _LARGE_SEGMENT:
        segment["segment_type"] = "large"
    return segment


def _trace(gpu: VirtualGpu, frames: _Frames) -> list[dict[str, Any]]:
    gpu.account.refresh()
    ring = gpu.account.ring
    events = [] if ring is None else ring.events()
    frames.learn(stack for _, stack in events)
    return [each | {"pool_id": _POOL, "frames": frames.of(stack)} for each, stack in events]


def _record(
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = 2**63 - 1,
    clear: bool = False,
    compile_context: bool = False,
    annotations: bool = False,
    skip: Any = (),
    *rest: Any,
) -> None:
    for given, known, what in (
        (enabled, ("state", "all", None), "state to be 'state', 'all', or None"),
        (
            context,
            ("state", "alloc", "all", None),
            "context to be 'state', 'alloc', 'all', or None",
        ),
        (stacks, ("python", "all"), "stacks to be 'python', or 'all'"),
    ):
        if given not in known:
            raise RuntimeError(f"expected {what}")
    entries = max_entries if enabled == "all" else 1
    _begin(Recording(enabled is not None, entries, context, frozenset(skip)), clear=clear)


def _record_as_before(
    enabled: bool,
    record_context: bool = True,
    max_entries: int = 1,
    trace_context: bool = False,
    cpp: bool = False,
    clear: bool = False,
    *rest: Any,
    skip: Any = (),
    **others: Any,
) -> None:
    context = "alloc" if trace_context else "state" if record_context else None
    _begin(Recording(enabled, max_entries, context, frozenset(skip)), clear=clear)


def _begin(recording: Recording, *, clear: bool) -> None:
    history.recording = recording
    for gpu in GPUS:
        if clear:
            gpu.account.record(Recording())
        gpu.account.record(recording)


def _traceback_of(address: int) -> list[dict[str, Any]] | None:
    found = [block for gpu in GPUS for block in _segments(gpu, _Frames())]
    frames = (each["blocks"][0]["frames"] for each in found if each["address"] == address)
    return next(frames, None) or None


def _annotate(address: int, metadata: str) -> None:
    for gpu in GPUS:
        for block in gpu.account.blocks_now():
            if block.address == address and gpu.account.ring is not None:
                recorded = not isinstance(block.made, CodeType)
                stack = block.made if recorded and gpu.account.ring.traces_stacks else None
                size = block.requested
                gpu.account.ring.note("annotate", address, size, size, stack, metadata)
