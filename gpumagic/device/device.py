"""Describe one device: the UUID is the key, ordinal and index are labels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["cpu", "cuda", "mps"]


@dataclass(frozen=True)
class Device:
    """A device that tensors can be on.

    Two are equal when they are the same device: what changes with time (free memory) or
    with the asking (the note) is not compared.

    Parameters
    ----------
    kind : {"cpu", "cuda", "mps"}
    ordinal : int, optional
        CUDA's number in this process, the ``1`` of ``cuda:1``.
    uuid : str, optional
        With its prefix, ``"GPU-…"`` or ``"MIG-…"``.
    index : int, optional
        NVML's number on this machine, that of nvidia-smi; for a MIG device its parent's.
    name : str, optional
    memory_total, memory_free : int, optional
        Bytes.
    virtual : bool
        A virtual GPU of this process.
    note : str, optional
        To be said to the user: why this is the CPU and not what was asked for.
    ordinal_certain : bool
        False where CUDA's order cannot be known without CUDA itself: GPUs of several models, and
        ``CUDA_DEVICE_ORDER`` is not ``PCI_BUS_ID``.
    """

    kind: Kind
    ordinal: int | None = None
    uuid: str | None = None
    index: int | None = None
    name: str | None = None
    memory_total: int | None = None
    memory_free: int | None = field(default=None, compare=False)
    virtual: bool = False
    note: str | None = field(default=None, compare=False)
    ordinal_certain: bool = field(default=True, compare=False)

    def __str__(self) -> str:
        return f"cuda:{self.ordinal}" if self.kind == "cuda" else self.kind

    @property
    def label(self) -> str:
        """What to show: ``"cuda:1"``, or ``"cuda:1 (virtual)"``."""
        return f"{self} (virtual)" if self.virtual else str(self)


CPU = Device("cpu")
