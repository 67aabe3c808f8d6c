"""Hold the virtual GPUs of this process, in the order of their ordinals."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass, field
from typing import Any

import torch

from gpumagic.virtual.memory_account import MemoryAccount

C: Any = torch._C
GPUS: list[VirtualGpu] = []


@dataclass(frozen=True)
class Properties:
    """What ``torch.cuda.get_device_properties`` answers: an H100's limits."""

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
    shared_memory_per_block_optin: int = 166912
    shared_memory_per_multiprocessor: int = 167936
    L2_cache_size: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0
    pci_domain_id: int = 0
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory // 2**20}MB, uuid={self.uuid}, virtual=True)"
        )


@dataclass
class VirtualGpu:
    """Hold one device: its account, its random generator, and its current stream."""

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


_Device = torch.device  # itself, also while a placement replaces the name: it is asked often


def gpu_of(device: torch.device | str | int | None = None) -> VirtualGpu:
    """The GPU of a device, of its number, or of None (the current one)."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, _Device):
        device = device.index
    if device is None or device < 0:
        device = int(C._accelerator_getDeviceIndex())
    if device >= len(GPUS):
        raise torch.AcceleratorError("CUDA error: invalid device ordinal")
    return GPUS[device]


def refresh() -> None:
    """Count, and publish, what was allocated and freed until now."""
    for gpu in GPUS:
        gpu.account.refresh()


def in_bad_fork() -> bool:
    """Whether this is the child of a fork, in which CUDA cannot be used either."""
    return any(gpu.account.refusal for gpu in GPUS)


def keep_after_fork() -> None:
    """Let the child of a fork use its copies of the parent's virtual GPUs."""
    for gpu in GPUS:
        gpu.account.refusal = ""


def _leave_to_parent() -> None:
    # The child of a fork has copies of these tensors; what it does with them is not its parent's.
    for gpu in GPUS:
        gpu.account.unpublish()
        gpu.account.refuse(
            "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you "
            "must use the 'spawn' start method"
        )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
