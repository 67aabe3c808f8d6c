"""Record who holds the memory of each GPU: plain data, no tensor and no frame."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from gpumagic.display.table import Shown
from gpumagic.errors import library_needed
from gpumagic.frameworks.exchange import Pool

if TYPE_CHECKING:
    from pandas import DataFrame

STATE, SAVED = "optimizer state", "saved for backward"
OUTPUT, EXCEPTION, GARBAGE = "output", "exception", "garbage"
UNREACHED, TEMPORARY = "unreached", "temporary"
KEPT = (OUTPUT, EXCEPTION, GARBAGE)
"""The kinds of what no variable holds, and `%gpufree` lets go of."""


_ARRAY = " array"


def kind_of_array(library: str) -> str:
    """The kind of what is an array of a library other than torch: ``"JAX array"``."""
    return library + _ARRAY


def is_of_other_library(kind: str) -> bool:
    """Whether a kind is that of another library's arrays, which torch has not allocated."""
    return kind.endswith(_ARRAY)


@dataclass(frozen=True)
class Made:
    """The code that made something: a cell or a file, and its line."""

    cell: str
    line: int | None = None

    def __str__(self) -> str:
        return self.cell if self.line is None else f"{self.cell}, line {self.line}"


@dataclass(frozen=True)
class MemoryHolder:
    """One holder of memory on one GPU: a variable, an output, an exception's frame, …

    Attributes
    ----------
    path : str
        What one would type to reach it, or where it is: ``"net"``, ``"Out[5]"``,
        ``"the exception of In [4]: train, batch"``.
    kind : str
        What most of its bytes are: ``"parameter"``, ``"buffer"``, ``"gradient"``,
        ``"optimizer state"``, ``"saved for backward"``, ``"tensor"``, ``"output"``,
        ``"exception"``, ``"garbage"``, ``"unreached"``; of other libraries ``"JAX array"`` and the
        like; after an error for want of memory also ``"temporary"``: what the failing line had
        computed by then.
    device : str
        ``"cuda:0"``.
    nbytes : int
        Of all storages that are reached through it and through none before it, as the allocator
        counts them: each once, in blocks of 512 bytes.
    made : Made or None
        Where most of it was made; None where that is not recorded.
    aliases : tuple of str
        Other paths to the same storages.
    count : int
        How many storages.
    kinds : tuple of (str, int)
        Its bytes by kind, the most first.
    """

    path: str
    kind: str
    device: str
    nbytes: int
    made: Made | None = None
    aliases: tuple[str, ...] = ()
    count: int = 1
    kinds: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one GPU; bytes, None where a number is not known.

    Attributes
    ----------
    device, name : str
        ``"cuda:0"`` and the name of the card.
    virtual : bool
        A virtual GPU of this process.
    total, free : int or None
        What the card has, and what its driver could still give.
    allocated : int or None
        What tensors hold, by ``torch.cuda.memory_allocated``, and arrays of other libraries; the
        holders add up to it.
    reserved : int or None
        What the allocators of torch and of other libraries have taken from the driver.
    torn : int or None
        The part of it that is free, in pieces between what is allocated.
    other_in_process : int or None
        What this process holds besides: CUDA's context and other libraries.
    others : int or None
        What other processes hold.
    others_by_name : tuple of (str, int or None)
        The same by who it is: a notebook, a program of yours, another user, or ``"unaccounted"``.
    uuid : str or None
        With its prefix, as nvidia-smi has it.
    pools : tuple of Pool
        What the allocators of JAX and CuPy tell of themselves.
    holders : tuple of MemoryHolder
        The largest first.
    """

    device: str
    name: str | None
    virtual: bool
    total: int | None
    free: int | None
    allocated: int | None
    reserved: int | None
    torn: int | None = None
    other_in_process: int | None = None
    others: int | None = None
    holders: tuple[MemoryHolder, ...] = ()
    others_by_name: tuple[tuple[str, int | None], ...] = ()
    uuid: str | None = None
    pools: tuple[Pool, ...] = ()


@dataclass(frozen=True, repr=False)
class MemoryReport(Shown):
    """Who holds the memory of each GPU at one moment.

    Attributes
    ----------
    devices : tuple of DeviceMemory
        The GPUs that this process can use, by ordinal.
    seconds : float
        How long it took to find out.
    """

    devices: tuple[DeviceMemory, ...]
    seconds: float = 0.0

    @property
    def holders(self) -> tuple[MemoryHolder, ...]:
        """Those of all GPUs, the largest first."""
        every = [holder for device in self.devices for holder in device.holders]
        return tuple(sorted(every, key=lambda holder: -holder.nbytes))

    @property
    def allocated(self) -> int:
        """Bytes that tensors hold, on all GPUs together."""
        return sum(device.allocated or 0 for device in self.devices)

    def to_json(self) -> str:
        """Everything, as JSON of one line; null is a number that is not known."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def to_pandas(self) -> DataFrame:
        """A row for each holder, the largest first: where it is, bytes, and where it was made.

        Raises
        ------
        GpuError
            pandas is not installed.
        """
        with library_needed("pandas", "to_pandas()", "pandas"):
            import pandas
        rows = [
            {
                "device": holder.device,
                "path": holder.path,
                "kind": holder.kind,
                "bytes": holder.nbytes,
                "storages": holder.count,
                "made_in": holder.made and holder.made.cell,
                "line": holder.made and holder.made.line,
                "aliases": ", ".join(holder.aliases),
            }
            for holder in self.holders
        ]
        return pandas.DataFrame(rows)
