"""Define the virtual GPUs of this process, and the memory functions that ``torch.cuda`` calls.

Memory snapshots have torch's layout. The blocks of a virtual GPU are scattered over the host's
memory, so each block is shown as a segment. One more segment is the reserved memory outside all
blocks. A recorded allocation has one line of the user's code as its stack; a free has no stack.
"""

import os
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import CodeType
from typing import Any

import torch

from gpumagic.device.caching_allocator import MemoryStat
from gpumagic.usercode.files import line_of
from gpumagic.virtual import memory_account
from gpumagic.virtual.memory_account import MemoryAccount

C: Any = torch._C
GPUS: list["VirtualGpu"] = []  # the virtual GPUs that are on, by ordinal


@dataclass(frozen=True)
class Properties:
    """A GPU's properties. Sizes are in bytes, clock rates in kHz. Defaults are from an H100 SXM."""

    name: str
    total_memory: int
    uuid: uuid.UUID
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 132
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    shared_memory_per_block: int = 49152
    shared_memory_per_block_optin: int = 232448
    shared_memory_per_multiprocessor: int = 233472
    L2_cache_size: int = 52428800
    clock_rate: int = 1980000
    memory_clock_rate: int = 2619000
    memory_bus_width: int = 5120
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    pci_domain_id: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    gcnArchName: str = ""


@dataclass
class VirtualGpu:
    """One virtual GPU: its memory account, its random generator and its current stream."""

    index: int
    account: MemoryAccount
    properties: Properties
    generator: Any = None
    stream: Any = None
    device: torch.device = field(init=False)
    code: int = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device("cuda", self.index)
        self.code = 2 | self.index << 32  # DLDevice {kDLCUDA, index}, read as one int64


_Device = torch.device  # torch's class, even while gpumagic replaces `torch.device`


def gpu_of(device: torch.device | str | int | None = None) -> VirtualGpu:
    """Return the GPU for a device or ordinal; the current GPU if `device` has no ordinal."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, _Device):
        device = device.index
    if device is None or device < 0:
        device = int(C._accelerator_getDeviceIndex())
    if device >= len(GPUS):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return GPUS[device]


_FORKED = (
    "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
    "must use the 'spawn' start method"
)


def in_bad_fork() -> bool:
    """Whether this process is the child of a fork and may not use its virtual GPUs."""
    return any(gpu.account.refusal == _FORKED for gpu in GPUS)


def keep_after_fork() -> None:
    """Let the child of a fork use its copies of the parent's virtual GPUs."""
    for gpu in GPUS:
        gpu.account.refusal = ""


def _leave_to_parent() -> None:
    for gpu in GPUS:  # the child's copies must not change the parent's counts
        gpu.account.unpublish(_FORKED)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)

_POOL = (0, 0)


def memory_functions(stack: ExitStack) -> dict[str, Any]:
    """Return replacements for functions of ``torch._C``, by the functions' names."""
    set_metadata = partial(setattr, memory_account, "metadata")
    stack.callback(set_metadata, "")
    stack.callback(memory_account.observers.clear)
    info = _of_account(lambda account: (account.free, account.capacity))
    return {
        "_cuda_memoryStats": _of_account(_stats),
        "_accelerator_getDeviceStats": _of_account(_stats),
        "_cuda_cudaMemGetInfo": info,
        "_accelerator_getMemoryInfo": info,
        "_cuda_resetPeakMemoryStats": _of_account(MemoryAccount.reset_peak),
        "_accelerator_resetPeakStats": _of_account(MemoryAccount.reset_peak),
        "_cuda_resetAccumulatedMemoryStats": _of_account(MemoryAccount.reset_accumulated),
        "_accelerator_resetAccumulatedStats": _of_account(MemoryAccount.reset_accumulated),
        "_cuda_getMemoryFraction": _of_account(lambda account: account.limit / account.capacity),
        "_cuda_setMemoryFraction": _set_fraction,
        "_cuda_emptyCache": _empty_cache,
        "_accelerator_emptyCache": _empty_cache,
        "_accelerator_isAllocatorInitialized": lambda: True,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_memoryMetadataSupported": lambda: True,
        "_cuda_setMemoryMetadata": set_metadata,
        "_cuda_getMemoryMetadata": lambda: memory_account.metadata,
        "_cuda_record_memory_history": _record,
        "_cuda_isHistoryEnabled": lambda: any(gpu.account.events is not None for gpu in GPUS),
        "_cuda_memorySnapshot": _snapshot,
        "_cuda_attach_out_of_memory_observer": memory_account.observers.append,
    }


def _of_account(function: Callable[[MemoryAccount], Any]) -> Callable[[int], Any]:
    return lambda index: function(gpu_of(index).account)


def _set_fraction(fraction: float, index: int) -> None:
    account = gpu_of(index).account
    account.limit = int(account.capacity * fraction)
    account.refresh()


def _empty_cache() -> None:
    for gpu in GPUS:
        gpu.account.empty_cache()


def _stats(account: MemoryAccount) -> dict[str, Any]:
    account.refresh()
    allocator, none = account.allocator, MemoryStat()
    stats = {
        **dict.fromkeys(("allocated_bytes", "active_bytes"), allocator.bytes),
        **dict.fromkeys(("allocation", "active"), allocator.blocks),
        **dict.fromkeys(("inactive_split", "inactive_split_bytes"), none),
        "requested_bytes": allocator.requested,
        "reserved_bytes": account.reserved(),
        "segment": allocator.segments,
    }
    pools: dict[str, Any] = {  # report everything in the large pool
        name: {"all": {**vars(stat)}, "large_pool": {**vars(stat)}, "small_pool": vars(none)}
        for name, stat in stats.items()
    }
    return pools | {
        **dict.fromkeys(("oversize_allocations", "oversize_segments"), vars(none)),
        "num_alloc_retries": account.retries,
        "num_ooms": account.ooms,
        "num_sync_all_streams": 0,
        "num_device_alloc": allocator.segments.allocated,
        "num_device_free": allocator.segments.freed,
        "max_split_size": -1,
    }


def _record(
    enabled: str | None, context: Any, stacks: str, most: int, clear: bool = False, *others: Any
) -> None:
    for gpu in GPUS:
        if clear:
            gpu.account.record_events(None)
        count = most if enabled == "all" else 1
        gpu.account.record_events(None if enabled is None else count)


@lru_cache(maxsize=4096)
def _shared_frames(code: CodeType | None, at: int, file: str) -> list[dict[str, Any]]:
    """Return a line as a list of one frame. As in torch, all blocks of one line share the list."""
    return [{"name": code.co_name, "filename": file, "line": line_of(code, at)}] if code else []


def _frames(code: CodeType | None, at: int) -> list[dict[str, Any]]:
    # The cache's key includes the file, because code objects of two cells may be equal.
    return _shared_frames(code, at, getattr(code, "co_filename", ""))


def _snapshot(*pool: Any) -> dict[str, Any]:
    """Return the snapshot for ``torch.cuda.memory._snapshot`` and ``memory_snapshot``."""
    return {
        "segments": [segment for gpu in GPUS for segment in _segments(gpu)],
        "device_traces": [_trace(gpu) for gpu in GPUS],
        "allocator_settings": {},
        "external_annotations": [],
    }


def _segments(gpu: VirtualGpu) -> list[dict[str, Any]]:
    """Return a segment for each block, and one for the reserved memory outside the blocks."""
    blocks: list[dict[str, Any]] = [
        {
            "address": block.address,
            "size": block.place[1],
            "requested_size": block.requested,
            "state": "active_allocated",
            "frames": _frames(block.made, block.at),
            "user_metadata": block.metadata,
        }
        for block in gpu.account.blocks_now()
    ]
    unused = gpu.account.allocator.reserved.current - sum(block["size"] for block in blocks)
    if unused > 0:
        end = blocks[-1]["address"] + blocks[-1]["size"] if blocks else 2**12  # an unused address
        rest = {"address": end, "size": unused, "requested_size": 0, "state": "inactive"}
        blocks.append(rest | {"frames": [], "user_metadata": ""})
    return [
        {
            "device": gpu.index,
            "address": block["address"],
            "total_size": block["size"],
            "allocated_size": block["size"] if block["requested_size"] else 0,
            "active_size": block["size"] if block["requested_size"] else 0,
            "requested_size": block["requested_size"],
            "stream": 0,
            "segment_type": "large" if block["size"] > 2**20 else "small",
            "segment_pool_id": _POOL,
            "is_expandable": False,
            "frames": [],
            "blocks": [block],
        }
        for block in blocks
    ]


def _trace(gpu: VirtualGpu) -> list[dict[str, Any]]:
    gpu.account.refresh()
    return [
        {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size,
            "stream": 0,
            "time_us": time // 1000,
            "compile_context": "",
            "user_metadata": metadata,
            "pool_id": _POOL,
            "frames": _frames(*line),
        }
        for action, address, size, time, metadata, line in [*(gpu.account.events or ())]
    ]
